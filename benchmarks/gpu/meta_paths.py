"""Every path that computes, run with its network on the meta device.

    batch on the CPU ─► the product's own engine, learner, critic, ... ─► shapes, and what it asked for

A path passes if it needs no number of the device but at the places of `allowed_places`.

Keys of the last line:
    meta_paths      number of paths, over all families; each is a test of its own in tests/devices
    meta_failures   paths that fail, or wait at a place that is not allowed; goal 0
"""

import asyncio
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias
from unittest.mock import patch

import numpy as np
from torch import nn

from benchmarks.gpu.allowed_places import ALLOWED
from benchmarks.gpu.crossings import (
    META,
    Crossings,
    described,
    fused_optimizers_on_meta,
    unwatched,
    watching,
)
from benchmarks.gpu.tiny_policies import (
    FAMILIES,
    demonstrated,
    observation,
    policy_on_host,
    policy_on_meta,
    trajectories,
    trajectory,
    vjepa2_folder,
)
from vla_rl.algorithms import EmbeddingConfig, VJepa2Config
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.algorithms.losses.policy import LOSSES
from vla_rl.algorithms.losses.term_configs import CorrectionConfig, KlLossConfig
from vla_rl.engines import DeviceLane, EngineConfig, make_torch_engine
from vla_rl.learning import Critic, CriticConfig, ImitationConfig, Learner, LearnerConfig
from vla_rl.learning.imitation import Demonstration, Imitator
from vla_rl.learning.scoring import Reference
from vla_rl.models.openvla_oft import continuous
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.models.trajectory_encoders import trajectory_encoder
from vla_rl.models.vjepa2 import encoder as vjepa2_encoder
from vla_rl.models.vjepa2 import load_encoder
from vla_rl.types import ReplyOptions, Sampling
from vla_rl.types.reply_options import ANY_REPLY, JsonFormat

Path: TypeAlias = Callable[["WatchedLane"], Awaitable[object]]


class WatchedLane(DeviceLane):
    """A device lane that watches all work, in both of its threads."""

    def __init__(self, crossings: Crossings) -> None:
        super().__init__(num_threads=1)
        self._crossings = crossings

    async def run(  # type: ignore[override]
        self, fn: Any, *args: Any, work: str = "other"
    ) -> Any:
        """Run work on the device thread, watched."""
        return await super().run(watching(self._crossings, fn), *args, work=work)

    async def prepare(self, fn: Any, *args: Any) -> Any:  # type: ignore[override]
        """Run work on the host thread, watched."""
        return await super().prepare(watching(self._crossings, fn), *args)

    def prepared_ahead(self, fn: Any, inputs: Sequence[Any]) -> AsyncGenerator[Any, None]:
        """Prepare inputs on the host thread, watched."""
        return super().prepared_ahead(watching(self._crossings, fn), inputs)


def cross(path: Path) -> Crossings:
    """Run a path and return its crossings. Raises what the path raises."""
    crossings = Crossings()

    async def run() -> None:
        async with asyncio.timeout(60), WatchedLane(crossings) as lane:
            await path(lane)

    with (
        fused_optimizers_on_meta(),
        patch.object(continuous, "NUM_DENOISING_STEPS", 2),  # 50 are as much work, and no other
        patch.object(vjepa2_encoder, "load_encoder", _load_unwatched),
        crossings.watched(),
    ):
        asyncio.run(run())
    return crossings


def _load_unwatched(config: VJepa2Config) -> nn.Module:
    with unwatched():
        return load_encoder(config)


async def act(lane: DeviceLane, *, family: str) -> None:
    """Decide for five episodes at once, sampled and greedy."""
    engine = make_torch_engine(policy_on_meta(family), lane, EngineConfig())
    samplings = [Sampling(seed=number, greedy=number == 0) for number in range(5)]
    async with engine:
        await asyncio.gather(
            *(engine.act(observation(family, each.seed), each) for each in samplings)
        )


async def talk(lane: DeviceLane, *, options: ReplyOptions = ANY_REPLY, max_tokens: int = 3) -> None:
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
    updates: int = 1,
    **fields: Any,
) -> None:
    """Update a policy; the optimizer has a state in the second update only."""
    with unwatched():
        policy = change(policy_on_meta(family))
    config = LearnerConfig(**{"micro_batch": 4, "entropy_coef": 0.01, **fields})
    learner, episodes = Learner(policy, lane, config), trajectories(family)
    reference = None
    if config.loss.kl.coef:
        reference = await Reference(policy, lane, 4).log_probs(episodes)
    for _ in range(updates):
        await learner.update(episodes, [1.0, -1.0, 0.5], reference)


async def judge(lane: DeviceLane, *, family: str, trunk: Any) -> None:
    """Compute a critic's values and fit them."""
    config = CriticConfig(trunk=trunk, micro_batch=4, epochs=1)
    with unwatched():
        critic = Critic(policy_on_meta(family), lane, config, seed=0)
    episodes = trajectories(family)
    judged = await critic.values(episodes)
    returns = [np.ones(len(each.steps), np.float32) for each in episodes]
    await critic.update(episodes, judged, returns)


async def imitate(lane: DeviceLane, *, family: str) -> None:
    """Fine-tune on demonstrations, and evaluate if the family can."""
    imitator = Imitator(policy_on_meta(family), lane, ImitationConfig(micro_batch=2))
    shown = demonstrated(family)
    examples = [
        Demonstration(observation=observation(family, each), actions=shown, num_valid=len(shown))
        for each in range(3)
    ]
    await imitator.update(examples)
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


def _recomputed(policy: Any) -> Any:
    policy.recompute_activations()
    return policy


def _in_bfloat16(policy: Any) -> Any:
    policy.network.bfloat16()
    return policy


def _loss_paths() -> dict[str, Path]:
    """Return an update by every loss, with rows in one and in several micro-batches."""
    losses = {name: PolicyLossConfig(name=name) for name in LOSSES}
    for level in ("action", "chunk", "sequence"):
        losses[f"ppo by {level}"] = PolicyLossConfig(name="ppo", level=level)
    losses["ppo corrected"] = PolicyLossConfig(
        correction=CorrectionConfig(truncate="token", mask="geometric")
    )
    losses["ppo with kl"] = PolicyLossConfig(kl=KlLossConfig(coef=0.1))
    paths: dict[str, Path] = {}
    for name, loss in losses.items():
        for size in (4, 16):
            paths[f"update by {name} in micro-batches of {size}"] = partial(
                learn, family="mlp", loss=loss, micro_batch=size
            )
    return paths


def _paths() -> dict[str, Path]:
    paths: dict[str, Path] = {}
    images = [family for family in FAMILIES if family.startswith("o")]
    for family in FAMILIES:
        if family != "language":
            paths[f"act: {family}"] = partial(act, family=family)
        if family != "oft diffusion":  # it has no likelihood
            paths[f"update: {family}"] = partial(learn, family=family)
        if family not in ("oft diffusion", "oft film"):
            for trunk in ("own", "shared"):
                paths[f"critic: {family}, {trunk}"] = partial(judge, family=family, trunk=trunk)
        paths[f"imitation: {family}"] = partial(imitate, family=family)
    for family in images:
        if family != "oft diffusion":
            paths[f"build: {family}"] = partial(build, family=family)
    for family in ("openvla", "oft tokens", "oft l1"):
        for name, change in {
            "recomputed": _recomputed,
            "in bfloat16": _in_bfloat16,
            "adapted": lambda policy: policy.adapted(LoraConfig(rank=2), seed=0),
            "merged": lambda policy: policy.adapted(LoraConfig(rank=2), seed=0).merged(),
        }.items():
            paths[f"update: {family}, {name}"] = partial(learn, family=family, change=change)
    paths["update: oft tokens, twice"] = partial(learn, family="oft tokens", updates=2)
    paths["update: language, packed"] = partial(
        learn, family="language", micro_batch=16, micro_batch_tokens=64
    )
    paths["talk"] = talk
    # one token, because the token that the watch answers is in no grammar
    json = ReplyOptions(format=JsonFormat())
    paths["talk: json"] = partial(talk, options=json, max_tokens=1)
    paths["talk: with alternatives"] = partial(talk, options=ReplyOptions(top_log_probs=2))
    for encoder in ("policy", "vjepa2"):
        paths[f"embed: {encoder}"] = partial(embed, encoder=encoder)
    return paths | _loss_paths()


PATHS: Final = _paths()
"""Paths by name."""


def not_allowed(crossings: Crossings) -> str:
    """Describe the crossings whose places are not allowed."""
    return described([each for each in crossings.found if each.place not in ALLOWED])


def figures() -> dict[str, float]:
    """Run all paths; print what fails."""
    num_failures = 0
    for name, path in PATHS.items():
        try:
            problem = not_allowed(cross(path))
        except Exception:
            problem = traceback.format_exc()
        if problem:
            num_failures += 1
            print(f"{name} fails:\n{problem}")
    return {"meta_paths": len(PATHS), "meta_failures": num_failures}
