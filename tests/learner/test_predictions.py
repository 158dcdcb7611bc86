"""Losses of predictions: the learner gives them what a flow policy predicts."""

from typing import Any

import numpy as np
import pytest
import torch
from drawing_policy import DrawingPolicy, make_drawing_policy, run_episodes
from small_episodes import mlp

from vla_rl.algorithms import KlLossConfig, PolicyLossConfig
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig, Reference

ADVANTAGES = [1.0, -1.0, 0.5]
NFT = PolicyLossConfig(name="nft")
EXACT = PolicyLossConfig(kl=KlLossConfig(coef=0.1, estimator="exact"))


def settings(loss: PolicyLossConfig, **fields: Any) -> LearnerConfig:
    optimizer = OptimizerConfig(lr=0.01, warmup_steps=0)
    return LearnerConfig(loss=loss, optimizer=optimizer, aggregation="token_mean", **fields)


@pytest.fixture
def policy() -> DrawingPolicy:
    return make_drawing_policy()


def weights(policy: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in policy.network.parameters()])


async def test_good_decisions_come_nearer_and_bad_ones_go_away(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episodes = await run_episodes(policy, lane)
    learner = Learner(policy, lane, settings(NFT, epochs=3))
    before = await Reference(policy, lane, micro_batch=8).log_probs(episodes)
    report = await learner.update(episodes, [1.0, -1.0, 0.0])
    after = await Reference(policy, lane, micro_batch=8).log_probs(episodes)
    moved = [np.mean(now) - np.mean(old) for now, old in zip(after, before, strict=True)]
    assert moved[0] > 0.0 > moved[1]
    assert report.metrics["update/steps"] == 3.0
    assert report.metrics["update/behavior_kl"] > 0.0


async def test_the_first_step_begins_at_the_weights_that_acted(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episodes = await run_episodes(policy, lane)
    report = await Learner(policy, lane, settings(NFT)).update(episodes, ADVANTAGES)
    assert report.metrics["update/behavior_kl"] < 1e-12
    # softplus(0), spread over the four tokens of two decisions
    assert report.metrics["update/loss"] == pytest.approx(np.log(2.0) / 2.0, rel=1e-6)


async def test_the_exact_divergence_is_that_of_the_means(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episodes = await run_episodes(policy, lane)
    reference = Reference(policy, lane, micro_batch=8, kl=EXACT.kl)
    means = await reference.log_probs(episodes)
    for episode, found in zip(episodes, means, strict=True):
        for step, mean in zip(episode.steps, found, strict=True):
            assert step.chunk.drawn is not None
            np.testing.assert_allclose(mean, step.chunk.drawn["mean"], atol=1e-6)
    displaced = [[mean + 0.2 for mean in found] for found in means]
    report = await Learner(policy, lane, settings(EXACT)).update(episodes, ADVANTAGES, displaced)
    # (0.2)^2 / 2 with a deviation of 1
    assert report.metrics["update/reference_kl"] == pytest.approx(0.02, rel=1e-4)


async def test_an_update_stops_before_it_is_too_far(
    policy: DrawingPolicy, lane: DeviceLane
) -> None:
    episodes = await run_episodes(policy, lane)
    free, bound = policy.copy(), policy.copy()
    plain = PolicyLossConfig()
    all_steps = await Learner(free, lane, settings(plain, epochs=10)).update(episodes, ADVANTAGES)
    stopping = Learner(bound, lane, settings(plain, epochs=10, stop_kl=1e-3))
    stopped = await stopping.update(episodes, ADVANTAGES)
    assert all_steps.metrics["update/steps"] == 10.0
    assert 1.0 <= stopped.metrics["update/steps"] < 10.0
    assert stopped.weight_version == stopping.weight_version == 1
    start = weights(policy)
    assert (weights(bound) - start).norm() < (weights(free) - start).norm()
    # a gradient that was computed and not taken is not left for the next update
    assert (await stopping.update(episodes, ADVANTAGES)).weight_version == 2


async def test_a_policy_without_predictions_is_refused(lane: DeviceLane) -> None:
    with pytest.raises(ConfigError, match=r"the loss is 'nft', .* but MlpPolicy has none"):
        Learner(mlp(), lane, settings(NFT))
    with pytest.raises(ConfigError, match=r"kl\.estimator is 'exact'"):
        Learner(mlp(), lane, settings(EXACT))


async def test_a_ratio_of_decisions_without_noise_is_refused(
    policy: DrawingPolicy, lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DrawingPolicy, "has_likelihood", False, raising=False)
    with pytest.raises(ConfigError, match="its noise level is 0"):
        Learner(policy, lane, LearnerConfig())
    Learner(policy, lane, settings(NFT))


def test_the_exact_divergence_of_actions_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected next_state"):
        PolicyLossConfig(name="nft", predicts="actions", kl=EXACT.kl)
    with pytest.raises(ConfigError, match="negative_weight"):
        PolicyLossConfig(name="nft", form="dpo", negative_weight=0.2)
