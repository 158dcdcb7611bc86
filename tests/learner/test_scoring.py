"""The reference keeps the first weights, and a KL term pulls the policy back to them."""

import asyncio

import msgspec
import numpy as np
import pytest
import torch
from small_worlds import mlp, walk

from vla_rl.algorithms import KlLossConfig, PolicyLossConfig
from vla_rl.engines import DeviceLane
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig, Reference

ADVANTAGES = (1.0, -0.5, 0.25)


def config(loss: PolicyLossConfig, **changes: object) -> LearnerConfig:
    base = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), loss=loss)
    return msgspec.structs.replace(base, **changes)


async def test_the_reference_stays_while_the_policy_moves(lane: DeviceLane) -> None:
    policy = mlp()
    trajectories = [walk(policy, seed, 2) for seed in (1, 2, 3)]
    async with asyncio.timeout(30):
        reference = Reference(policy, lane, micro_batch=2)
        before = await reference.log_probs(trajectories)
        await Learner(policy, lane, config(PolicyLossConfig())).update(trajectories, ADVANTAGES)
        after = await reference.log_probs(trajectories)
    for trajectory, one, other in zip(trajectories, before, after, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_allclose(
            one, [step.chunk.log_probs for step in trajectory.steps], atol=1e-6
        )


async def test_a_kl_term_pulls_the_policy_back_to_the_reference(lane: DeviceLane) -> None:
    anchor, policy = mlp(seed=1), mlp(seed=1)
    with torch.no_grad():
        policy.network.head.bias.add_(
            torch.randn(policy.network.head.bias.shape, generator=torch.manual_seed(0))
        )
    loss = PolicyLossConfig(kl=KlLossConfig(coef=1.0, estimator="k2"))
    distances = []
    async with asyncio.timeout(60):
        reference = Reference(anchor, lane, micro_batch=64)
        learner = Learner(
            policy, lane, config(loss, optimizer=OptimizerConfig(lr=5e-2, warmup_steps=0))
        )
        for update in range(40):
            trajectories = [
                walk(
                    policy,
                    100 * update + seed,
                    8,
                )
                for seed in range(4)
            ]
            references = await reference.log_probs(trajectories)
            metrics = (await learner.update(trajectories, [0.0] * 4, references)).metrics
            distances.append(metrics["update/reference_kl"])
    assert distances[0] > 0.1
    assert np.mean(distances[-5:]) < 0.1 * distances[0]


async def test_a_loss_with_a_kl_term_asks_for_the_reference(lane: DeviceLane) -> None:
    loss = PolicyLossConfig(kl=KlLossConfig(coef=0.1))
    async with asyncio.timeout(30):
        with pytest.raises(ValueError, match="reference_log_prob"):
            await Learner(mlp(), lane, config(loss)).update([walk(mlp(), 1, 2)], [1.0])
