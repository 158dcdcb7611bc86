"""PPO around the trainer's own weights, weighed by how those differ from the ones that acted.

Numbers by hand.
"""

import dataclasses
import math

import pytest
import torch
from small_batches import batch_of, finite_differences, gradient, random_batch, ratios_of, row

from vla_rl.algorithms import aggregation, count_denominators
from vla_rl.algorithms.losses import (
    PolicyLossConfig,
    TokenBatch,
    behavior_weights,
    clipped_surrogate,
    decoupled_surrogate,
    policy_loss,
    sequence_log_ratio,
)
from vla_rl.algorithms.losses.policy.ppo import DecoupledPpoLossConfig, PpoLossConfig


def test_decoupled_ppo_weighs_by_proximal_to_behavior_and_clips_around_the_proximal() -> None:
    # behavior 0, proximal log 2, current log 3: w = 2, u = 1.5 -> clipped at 1.28
    batch = batch_of((3.0, 2.2), (1.0, 1.0), proximal_log_prob=ratios_of(2.0, 2.0))
    losses, diagnostics = decoupled_surrogate(batch, DecoupledPpoLossConfig())
    torch.testing.assert_close(losses, row(-2.0 * 1.28, -2.0 * 1.1))
    assert diagnostics.metrics()["behavior_weight_mean"] == pytest.approx(2.0)
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(0.5)


def test_decoupled_ppo_drops_tokens_whose_behavior_weight_is_beyond_the_cap() -> None:
    batch = batch_of((6.0, 2.0), (1.0, 1.0), proximal_log_prob=ratios_of(6.0, 2.0))
    losses, diagnostics = decoupled_surrogate(
        batch, DecoupledPpoLossConfig(behavior_weight_cap=5.0)
    )
    torch.testing.assert_close(losses, row(0.0, -2.0))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(0.5)


def test_a_weight_at_the_cap_is_kept_and_padding_may_hold_anything() -> None:
    mask = torch.tensor([[True, True, False]])
    batch = batch_of(
        (4.0, 4.5, 1.0), (1.0,) * 3, proximal_log_prob=ratios_of(4.0, 4.5, 1.0), mask=mask
    )
    at_the_cap = (batch.proximal_log_prob - batch.behavior_log_prob)[0, 0].exp().item()
    losses, _ = decoupled_surrogate(batch, DecoupledPpoLossConfig(behavior_weight_cap=at_the_cap))
    torch.testing.assert_close(losses, row(-4.0, 0.0, 0.0))
    given = dataclasses.replace(batch, correction_weight=row(2.0, 0.0, float("nan")))
    losses, diagnostics = decoupled_surrogate(given, DecoupledPpoLossConfig())
    torch.testing.assert_close(losses, row(-2.0, 0.0, 0.0))
    assert diagnostics.metrics()["behavior_weight_mean"] == pytest.approx(1.0)
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(0.5)


def test_decoupled_ppo_is_ppo_where_the_proximal_policy_is_the_one_that_acted() -> None:
    batch = batch_of((1.5, 0.7), (1.0, -2.0), proximal_log_prob=row(0.0, 0.0))
    torch.testing.assert_close(
        decoupled_surrogate(batch, DecoupledPpoLossConfig())[0],
        clipped_surrogate(batch, PpoLossConfig())[0],
    )


def test_decoupled_ppo_without_proximal_log_probs_says_what_is_missing() -> None:
    loss = policy_loss(PolicyLossConfig(name="decoupled_ppo"))
    with pytest.raises(
        ValueError, match=r"decoupled_ppo needs TokenBatch\.proximal_log_prob, but it is None"
    ):
        loss(batch_of((1.0,), (1.0,)))


def test_a_ratio_that_tokens_share_has_one_weight_for_all_of_them() -> None:
    # kappa 2, 1, 4, 0.5; one control step is two tokens
    batch = batch_of(
        (2.2, 1.0, 4.0, 0.5),
        (1.0,) * 4,
        proximal_log_prob=ratios_of(2.0, 1.0, 4.0, 0.5),
        action_tokens=2,
    )
    weights = {
        level: behavior_weights(batch, behavior_weight_cap=10.0, level=level)
        for level in ("token", "action", "chunk", "sequence")
    }
    torch.testing.assert_close(weights["token"], row(2.0, 1.0, 4.0, 0.5))
    torch.testing.assert_close(weights["action"], row(2.0, 2.0, 2.0, 2.0))
    torch.testing.assert_close(weights["chunk"], row(4.0, 4.0, 4.0, 4.0))
    torch.testing.assert_close(weights["sequence"], row(*[7.5 / 4] * 4))
    losses, _ = decoupled_surrogate(
        batch, DecoupledPpoLossConfig(clip_low=0.5, clip_high=0.5, level="action")
    )
    torch.testing.assert_close(losses, row(*[-2.0 * 1.1 / 2] * 2, *[-2.0 * 1.0 / 2] * 2))


def test_a_control_step_is_dropped_as_a_whole_and_a_sequence_goes_on_without_its_dropped_tokens() -> (
    None
):
    # kappa 3, 2, 1, 1: a product of 6 is above the cap of 5, no token is
    batch = batch_of(
        (3.0, 2.0, 1.0, 1.0),
        (1.0,) * 4,
        proximal_log_prob=ratios_of(3.0, 2.0, 1.0, 1.0),
        action_tokens=2,
    )
    losses, diagnostics = decoupled_surrogate(batch, DecoupledPpoLossConfig(level="action"))
    torch.testing.assert_close(losses, row(0.0, 0.0, -0.5, -0.5))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(0.5)
    # kappa 8 is dropped; the ratio and the weight are means over the other three: log 1.1 / 3, (1 +
    # 2 + 3) / 3
    batch = batch_of(
        (8.8, 1.1, 2.0, 3.0), (1.0,) * 4, proximal_log_prob=ratios_of(8.0, 1.0, 2.0, 3.0)
    )
    losses, _ = decoupled_surrogate(batch, DecoupledPpoLossConfig(level="sequence"))
    expected = -2.0 * 1.1 ** (1 / 3)
    torch.testing.assert_close(losses, row(0.0, expected, expected, expected))


def test_at_the_level_of_the_sequence_the_gradient_is_that_of_the_weighted_sequence_objective() -> (
    None
):
    """Finite differences of  sum over sequences of sum_t w_t * PPO(s) / tokens,  s the geometric
    mean over kept tokens.
    """
    batch = random_batch(rows=6, seed=5, spread=0.8)
    advantage = batch.advantage[:, :1]
    batch = dataclasses.replace(batch, advantage=advantage)
    assert batch.proximal_log_prob is not None
    proximal = batch.proximal_log_prob
    weight = (proximal - batch.behavior_log_prob).exp()
    kept = batch.mask & (weight <= 1.5)
    assert (kept != batch.mask).any()

    def objective(log_prob):
        log_ratio = torch.where(kept, log_prob - proximal, 0.0)
        ratio = (log_ratio.sum(1, keepdim=True) / kept.sum(1, keepdim=True).clamp(min=1)).exp()
        surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        return torch.where(kept, weight * surrogate, 0.0).sum() / batch.mask.sum()

    loss = policy_loss(
        PolicyLossConfig(name="decoupled_ppo", level="sequence", behavior_weight_cap=1.5)
    )
    reduced = aggregation("token_mean")(loss(batch)[0], batch.mask, count_denominators(batch.mask))
    (found,) = torch.autograd.grad(reduced, batch.log_prob)
    torch.testing.assert_close(reduced.detach(), objective(batch.log_prob).detach())
    torch.testing.assert_close(
        found, finite_differences(objective, batch.log_prob), rtol=1e-6, atol=1e-8
    )


def test_weights_made_over_the_whole_update_are_those_of_sequences_cut_into_rows() -> None:
    whole = batch_of(
        (1.3, 0.8, 1.1, 9.0), (1.0,) * 4, proximal_log_prob=ratios_of(1.0, 2.0, 0.5, 9.0)
    )
    rows = TokenBatch(
        log_prob=whole.log_prob.detach().reshape(2, 2).requires_grad_(),
        behavior_log_prob=torch.zeros(2, 2, dtype=torch.float64),
        advantage=torch.ones(2, 2, dtype=torch.float64),
        mask=torch.ones(2, 2, dtype=torch.bool),
        proximal_log_prob=ratios_of(1.0, 2.0, 0.5, 9.0).reshape(2, 2),
    )
    config, sequence = (
        PolicyLossConfig(name="decoupled_ppo", level="sequence"),
        torch.tensor([4, 4]),
    )
    weight = behavior_weights(rows, behavior_weight_cap=5.0, level="sequence", sequence=sequence)
    mean = 3.5 / 3
    torch.testing.assert_close(weight, torch.cat([row(mean, mean), row(mean, 0.0)]))
    rows = dataclasses.replace(rows, correction_weight=weight)
    rows = dataclasses.replace(rows, sequence_log_ratio=sequence_log_ratio(config, rows, sequence))
    loss = policy_loss(config)
    torch.testing.assert_close(gradient(loss, rows).reshape(1, 4), gradient(loss, whole))
    assert math.isclose(loss(rows)[0].sum().item(), loss(whole)[0].sum().item())
