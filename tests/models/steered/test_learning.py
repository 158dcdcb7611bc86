"""Engines act with a head, learners train it alone, and its checkpoints bring it back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from steered_bases import BASES, make_steered

from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import Kind
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.learner import Critic, CriticConfig, Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.example_inputs import example_row
from vla_rl.types import (
    ActionChunk,
    EnvSpec,
    EpisodeSpec,
    Sampling,
    Step,
    StopReason,
    Trajectory,
)

EPISODE = EpisodeSpec(
    episode_id=0, group_id=0, member=0, env=EnvSpec(id="none"), task="none", seed=0, policy_seed=0
)


@pytest.fixture
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(num_threads=1) as lane:
        yield lane


async def run_policy(engine: Any, family: str, number: int) -> Trajectory:
    """Run three decisions of the policy's own."""
    steps = []
    for decision in range(3):
        seen = BASES[family].observe(10 * number + decision)
        chunk = await engine.act(seen, Sampling(seed=10 * number + decision))
        rewards = np.ones(len(chunk.actions), np.float32)
        steps.append(Step(observation=seen, chunk=chunk, rewards=rewards))
    return Trajectory(
        episode=msgspec.structs.replace(EPISODE, episode_id=number, member=number),
        steps=tuple(steps),
        final_observation=BASES[family].observe(99),
        stop_reason=StopReason.TERMINATED,
    )


@pytest.mark.parametrize(
    ("family", "kind"),
    [("oft_tokens", "residual"), ("flow", "residual"), ("flow", "noise"), ("mlp", "tokens")],
)
async def test_an_update_moves_the_head_alone_and_publishes_it(
    family: str, kind: str, lane: DeviceLane
) -> None:
    policy = make_steered(family, kind)
    base = {name: each.clone() for name, each in policy.base.policy.checkpoint_tensors().items()}
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0), max_mismatch=1.0)
    async with (
        asyncio.timeout(100),
        TorchActionEngine(policy.copy(), lane, EngineConfig()) as engine,
    ):
        learner = Learner(policy, lane, config, publish_to=[engine])
        before = (await learner.snapshot()).policy
        trajectories = [await run_policy(engine, family, number) for number in range(2)]
        report = await learner.update(trajectories, [1.0, -1.0])
        after = await learner.snapshot()
        assert report.metrics["update/skipped_steps"] == 0.0
        moved = {name for name in before if not torch.equal(before[name], after.policy[name])}
        assert "steering_head.mean.weight" in moved
        assert "steering_head.is_on" not in moved
        acted = dict(engine.network.named_parameters())
        assert torch.equal(acted["mean.weight"], policy.network.mean.weight)
        # another update, of decisions that the first one's weights made
        await learner.update([await run_policy(engine, family, 3)], [1.0])
        policy.load_checkpoint_tensors(after.policy)
        assert torch.equal(policy.network.mean.weight, after.policy["steering_head.mean.weight"])
    for name, tensor in policy.base.policy.checkpoint_tensors().items():
        assert torch.equal(tensor, base[name])


async def test_a_critic_learns_on_the_heads_features(lane: DeviceLane) -> None:
    policy = make_steered("oft_l1")
    config = CriticConfig(trunk="own", optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), epochs=4)
    async with (
        asyncio.timeout(100),
        TorchActionEngine(policy, lane, EngineConfig()) as engine,
    ):
        trajectory = await run_policy(engine, "oft_l1", 0)
        critic = Critic(policy, lane, config, seed=0)
        (before,) = await critic.values([trajectory])
        await critic.fit_values([trajectory], [before], [np.ones(3, np.float32)])
        (after,) = await critic.values([trajectory])
    assert after.values.min() > before.values.max()


async def test_a_decision_crosses_the_wire_with_all_that_it_has_drawn(lane: DeviceLane) -> None:
    policy = make_steered("mlp")  # it reads no state of its own: an array of no numbers
    async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
        chunk = await engine.act(BASES["mlp"].observe(0), Sampling(seed=1))
    codec = Codec()
    frames = codec.encode(Kind.CALL, 0, 0, 0, chunk, "a decision")
    received = codec.decode(codec.get_decoder(ActionChunk), frames)
    assert received.drawn is not None
    assert chunk.drawn is not None
    assert received.drawn["proprio"].shape == (0,)
    for name, values in chunk.drawn.items():
        np.testing.assert_array_equal(received.drawn[name], values)
    policy.check_drawn(received.drawn)


@pytest.mark.parametrize(("family", "kind"), [("flow", "noise"), ("oft_l1", "residual")])
def test_an_estimate_of_memory_gets_a_row_that_is_scored(family: str, kind: str) -> None:
    policy = make_steered(family, kind)
    row = example_row(policy)
    assert row is not None
    log_prob, _ = policy.log_probs(row.batch, row.tokens, torch.ones(1))
    assert log_prob.isfinite().all()
    acting = {key: value for key, value in policy.example_observation(0).items() if key != "drawn"}
    with torch.inference_mode():
        policy.sample(policy.prepare([acting]), [Sampling()])
