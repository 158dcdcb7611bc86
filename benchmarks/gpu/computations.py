"""Everything that computes: the product's own engines, learner, critic, ... with a network on meta.

Each takes a device lane and a family of `tiny_policies`, and runs once from observations or episodes
on the host to actions, metrics or weights.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu.crossings import META, unwatched
from benchmarks.gpu.tiny_policies import (
    demonstrated,
    observation,
    policy_on_host,
    policy_on_meta,
    trajectories,
    trajectory,
    vjepa2_folder,
)
from vla_rl.algorithms import EmbeddingConfig, VJepa2Config
from vla_rl.engines import DeviceLane, EngineConfig, make_torch_engine
from vla_rl.learner import Critic, CriticConfig, ImitationConfig, Learner, LearnerConfig
from vla_rl.learner.imitation import Demonstration, Imitator
from vla_rl.learner.scoring import Reference
from vla_rl.models.trajectory_encoders import trajectory_encoder
from vla_rl.types import ReplyOptions, Sampling, Trajectory
from vla_rl.types.language import ANY_REPLY


async def act(lane: DeviceLane, *, family: str) -> None:
    """Decide for five episodes at once, sampled and greedy."""
    engine = make_torch_engine(policy_on_meta(family), lane, EngineConfig())
    samplings = [Sampling(seed=number, greedy=number == 0) for number in range(5)]
    async with engine:
        await asyncio.gather(
            *(engine.act(observation(family, each.seed), each) for each in samplings)
        )


async def converse(
    lane: DeviceLane, *, options: ReplyOptions = ANY_REPLY, max_tokens: int = 3
) -> None:
    """Generate replies for prompts of two lengths."""
    engine = make_torch_engine(policy_on_meta("language"), lane, EngineConfig())
    async with engine:
        await asyncio.gather(
            *(
                engine.generate(
                    said, sampling=Sampling(seed=1), max_tokens=max_tokens, options=options
                )
                for said in ("one", "one two one two")
            )
        )


async def learn(
    lane: DeviceLane,
    *,
    family: str,
    change: Callable[[Any], Any] = lambda policy: policy,
    get_episodes: Callable[[], Sequence[Trajectory]] | None = None,
    updates: int = 1,
    **fields: Any,
) -> None:
    """Update a policy from these episodes (None: `trajectories`); the optimizer has a state in the
    second update only."""
    with unwatched():
        policy = change(policy_on_meta(family))
    config = LearnerConfig(**{"micro_batch": 4, "entropy_coef": 0.01, **fields})
    learner = Learner(policy, lane, config)
    episodes = trajectories(family) if get_episodes is None else get_episodes()
    reference = None
    if config.loss.kl.coef:
        reference = await Reference(policy, lane, 4).log_probs(episodes)
    for _ in range(updates):
        await learner.update(episodes, [1.0, -1.0, 0.5], reference)


async def compare(lane: DeviceLane, *, family: str) -> None:
    """Score episodes by a frozen reference."""
    with unwatched():
        reference = Reference(policy_on_meta(family), lane, 4)
    await reference.log_probs(trajectories(family))


async def publish(lane: DeviceLane, *, family: str) -> None:
    """Update in two optimizer steps, and give the weights to an engine that has a copy of them."""
    engine = make_torch_engine(policy_on_meta(family), lane, EngineConfig())
    config = LearnerConfig(micro_batch=4, epochs=2)
    async with engine:
        learner = Learner(policy_on_meta(family), lane, config, [engine])
        await learner.update(trajectories(family), [1.0, -1.0, 0.5])
        await engine.act(observation(family, 0), Sampling(seed=0))


async def save(lane: DeviceLane, *, family: str) -> None:
    """Take a snapshot for a checkpoint after an update."""
    learner = Learner(policy_on_meta(family), lane, LearnerConfig(micro_batch=4))
    await learner.update(trajectories(family), [1.0, -1.0, 0.5])
    await learner.snapshot()


async def estimate_values(lane: DeviceLane, *, family: str, trunk: Any) -> None:
    """Compute a critic's values and fit them."""
    config = CriticConfig(trunk=trunk, micro_batch=4, epochs=1)
    with unwatched():
        critic = Critic(policy_on_meta(family), lane, config, seed=0)
    episodes = trajectories(family)
    estimates = await critic.values(episodes)
    returns = [np.ones(len(each.steps), np.float32) for each in episodes]
    await critic.fit_values(episodes, estimates, returns)


async def imitate(lane: DeviceLane, *, family: str) -> None:
    """Fine-tune on demonstrations, and evaluate if the family can."""
    imitator = Imitator(policy_on_meta(family), lane, ImitationConfig(micro_batch=2))
    shown = demonstrated(family)
    examples = [
        Demonstration(observation=observation(family, each), actions=shown, num_valid=len(shown))
        for each in range(3)
    ]
    await imitator.train_step(examples)
    if family != "language":
        await imitator.evaluate(examples)


async def build(lane: DeviceLane, *, family: str) -> None:
    """Build a network on the meta device, as loading a checkpoint does, and ask it."""
    policy = policy_on_host(family)
    with unwatched(), META:
        network = type(policy).build_network(policy.config)
    built = type(policy)(policy.config, network, policy.tokenizer)
    seen = [observation(family, number) for number in range(2)]
    await lane.run(lambda: built.features(built.prepare(seen)))


async def embed(lane: DeviceLane, *, encoder: Any) -> None:
    """Embed trajectories by the policy's tower, or by V-JEPA 2."""
    video = VJepa2Config(folder="none")
    if encoder == "vjepa2":
        video = VJepa2Config(
            folder=vjepa2_folder(), num_frames=8, image_size=32, precision="float32"
        )
    config = EmbeddingConfig(encoder=encoder, image_key="image", vjepa2=video)
    policy = policy_on_meta("oft tokens")
    await trajectory_encoder(config, policy, lane).embed(
        [trajectory("oft tokens", number) for number in range(2)]
    )
