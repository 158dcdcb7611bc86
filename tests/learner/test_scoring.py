"""Log-probs besides those of the update: proximal ones, those of a reference, and what losses make of them."""

import asyncio
from functools import partial

import msgspec
import numpy as np
import pytest
import torch
from small_episodes import mlp, walk
from torch import Tensor

from vla_rl.algorithms import CorrectionConfig, KlLossConfig, PolicyLossConfig
from vla_rl.engines import DeviceLane
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig, Reference
from vla_rl.learner.decisions import flatten_trajectories
from vla_rl.learner.ranks import OneRank
from vla_rl.learner.scoring import Proximal, ScoringRank, score_decisions
from vla_rl.models.mlp import MlpPolicy

ADVANTAGES = (1.0, -0.5, 0.25)


def parameters(policy: MlpPolicy) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in policy.network.parameters()])


def proximal_of(policy: MlpPolicy, lane: DeviceLane, settings: LearnerConfig) -> Proximal:
    ranks = OneRank(ScoringRank(policy, lane), lane)
    return Proximal(partial(score_decisions, ranks, size=settings.micro_batch_size), settings)


def config(loss: PolicyLossConfig, **changes: object) -> LearnerConfig:
    base = LearnerConfig(optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), loss=loss)
    return msgspec.structs.replace(base, **changes)


async def test_proximal_log_probs_are_those_of_the_weights_before_the_update(
    lane: DeviceLane,
) -> None:
    acted, policy = mlp(seed=1), mlp(seed=2)
    trajectories = [walk(acted, 1, 3), walk(acted, 2, 2)]
    decisions = flatten_trajectories(trajectories, [1.0, 1.0])
    proximal = proximal_of(
        policy, lane, config(PolicyLossConfig(name="decoupled_ppo"), micro_batch=2)
    )
    async with asyncio.timeout(30):
        found = (await proximal.before_update(decisions)).proximal_log_prob
    for index, step in enumerate(step for trajectory in trajectories for step in trajectory.steps):
        expected, _ = policy.log_probs(
            policy.prepare([step.observation]),
            torch.from_numpy(step.chunk.tokens)[None],
            torch.ones(1),
        )
        assert found is not None
        torch.testing.assert_close(found[index], expected[0].detach())
    gap = (found - decisions.behavior_log_prob).abs().mean()
    assert proximal.metrics["mismatch/log_prob_gap_mean"] == pytest.approx(float(gap), rel=1e-5)


async def test_a_loss_that_needs_no_proximal_log_probs_costs_no_forward_pass(
    lane: DeviceLane,
) -> None:
    policy = mlp()
    decisions = flatten_trajectories([walk(policy, 1, 3)], [1.0])
    async with asyncio.timeout(30):
        assert (
            await proximal_of(policy, lane, config(PolicyLossConfig())).before_update(decisions)
            is decisions
        )
    assert lane.busy_seconds() == {}


LOSSES = [
    *(
        PolicyLossConfig(name=name)
        for name in ("gspo", "gmpo", "opsm", "ppo", "decoupled_ppo", "cispo", "cpgd")
    ),
    PolicyLossConfig(
        name="clip_cov", covariance_share=0.3, covariance_low=-10.0, covariance_high=10.0
    ),
    PolicyLossConfig(name="kl_cov", covariance_share=0.3),
    PolicyLossConfig(name="m2po", max_second_moment=1e-4),
    PolicyLossConfig(
        name="m2po", max_second_moment=1e-4, correction=CorrectionConfig(truncate="token")
    ),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
async def test_updates_of_several_steps_do_not_depend_on_the_micro_batches(
    lane: DeviceLane, loss: PolicyLossConfig
) -> None:
    """Two epochs, so that the second has ratios other than 1.

    Trajectories are cut apart by micro-batches of one and two.
    """
    trajectories = [walk(mlp(), seed, num_steps) for seed, num_steps in ((1, 1), (2, 4), (3, 2))]
    weights = []
    async with asyncio.timeout(60):
        for micro_batch in (100, 1, 2):
            policy = mlp()
            learner = Learner(policy, lane, config(loss, micro_batch=micro_batch, epochs=3))
            await learner.update(trajectories, ADVANTAGES)
            weights.append(parameters(policy))
    assert not torch.equal(weights[0], parameters(mlp()))
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], atol=2e-6, rtol=1e-4)


STALE = [
    PolicyLossConfig(name="decoupled_ppo", behavior_weight_cap=1.1),
    PolicyLossConfig(name="decoupled_ppo", level="sequence", behavior_weight_cap=1.1),
    PolicyLossConfig(name="opsm", max_sequence_kl=0.01),
    PolicyLossConfig(
        name="opsm",
        level="sequence",
        max_sequence_kl=0.01,
        correction=CorrectionConfig(mask="token", mask_high=1.1),
    ),
    PolicyLossConfig(name="gspo", correction=CorrectionConfig(mask="token", mask_high=1.1)),
]


@pytest.mark.parametrize("loss", STALE, ids=lambda loss: f"{loss.name}-{loss.level}")
async def test_neither_do_updates_on_data_of_other_weights_of_which_some_is_dropped(
    lane: DeviceLane, loss: PolicyLossConfig
) -> None:
    acted = mlp(seed=1)
    with torch.no_grad():
        acted.network.head.bias.add_(
            0.5 * torch.randn(acted.network.head.bias.shape, generator=torch.manual_seed(0))
        )
    trajectories = [walk(acted, seed, num_steps) for seed, num_steps in ((1, 1), (2, 4), (3, 2))]
    found = []
    async with asyncio.timeout(60):
        for micro_batch in (100, 1, 2):
            learner = Learner(
                mlp(seed=1),
                lane,
                config(loss, micro_batch=micro_batch, epochs=2, max_mismatch=10.0),
            )
            found.append((await learner.update(trajectories, [-1.0, -0.5, 0.25])).metrics)
    assert (
        found[0]["update/dropped_fraction"]
        + found[0].get("update/correction_dropped_fraction", 0.0)
        > 0.0
    )
    for metrics in found[1:]:
        # Adam's steps hardly depend on the size of a gradient, its norm does
        for name in ("update/grad_norm", "update/loss", "update/dropped_fraction"):
            assert metrics[name] == pytest.approx(found[0][name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    "loss",
    [
        PolicyLossConfig(name="decoupled_ppo", level="sequence", behavior_weight_cap=1.0),
        PolicyLossConfig(
            name="opsm", level="sequence", correction=CorrectionConfig(mask="token", mask_high=1.0)
        ),
    ],
    ids=lambda loss: loss.name,
)
async def test_a_trajectorys_ratio_weight_and_drift_are_means_over_all_its_decisions(
    lane: DeviceLane, loss: PolicyLossConfig
) -> None:
    acted, policy = mlp(seed=1), mlp(seed=2)
    trajectories = [walk(acted, 1, 5), walk(acted, 2, 4)]
    async with asyncio.timeout(30):
        proximal = proximal_of(policy, lane, config(loss))
        before = await proximal.before_update(flatten_trajectories(trajectories, [1.0, 1.0]))
        with torch.no_grad():
            policy.network.head.bias.add_(
                torch.randn(policy.network.head.bias.shape, generator=torch.manual_seed(0))
            )
        step = await proximal.before_step(before, is_first=False)
        now = await Reference(policy, lane, micro_batch=8).log_probs(trajectories)
    columns = (step.proximal_log_prob, step.correction_weight, step.sequence_log_ratio)
    for rows, current in ((slice(0, 5), now[0]), (slice(5, 9), now[1])):
        trainers, weight, ratio = (column[rows] for column in columns if column is not None)
        kappa, log_prob = (
            (trainers - step.behavior_log_prob[rows]).exp(),
            torch.from_numpy(np.stack(current)),
        )
        kept = weight > 0.0
        assert 0 < int(kept.sum()) < kept.numel()
        assert float(kappa[kept].max()) <= 1.0
        torch.testing.assert_close(ratio, (log_prob - trainers)[kept].mean().expand_as(ratio))
        if loss.name == "decoupled_ppo":
            torch.testing.assert_close(weight, torch.where(kept, kappa[kept].mean(), 0.0))
        else:
            assert step.sequence_drift is not None
            drift = (step.behavior_log_prob[rows] - log_prob).mean()
            torch.testing.assert_close(step.sequence_drift[rows], drift.expand_as(ratio))


async def test_truncated_importance_sampling_weighs_by_the_trainer_over_the_engine(
    lane: DeviceLane,
) -> None:
    policy = mlp()
    trajectory = walk(policy, 1, 1)
    step = trajectory.steps[0]
    # the engine reports half the probability of the first token: kappa = 2, truncated to 1.5; of
    # the second, the truth
    lied = step.chunk.log_probs + np.log([0.5, 1.0]).astype(np.float32)
    chunk = msgspec.structs.replace(step.chunk, log_probs=lied)
    told = msgspec.structs.replace(trajectory, steps=(msgspec.structs.replace(step, chunk=chunk),))
    loss = PolicyLossConfig(correction=CorrectionConfig(truncate="token", truncate_at=1.5))
    async with asyncio.timeout(30):
        learner = Learner(policy, lane, config(loss, max_mismatch=10.0))
        metrics = (await learner.update([told], [1.0])).metrics
    # ratios against the trainer's own log-probs are 1, so the loss is -(1.5 + 1) / 2
    assert metrics["update/loss"] == pytest.approx(-1.25, abs=1e-5)
    assert metrics["update/correction_weight_mean"] == pytest.approx(1.25, abs=1e-5)


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
