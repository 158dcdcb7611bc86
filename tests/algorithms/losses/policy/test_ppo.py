"""Losses that clip as PPO does, around the weights that acted or the trainer's own, against numbers worked out by hand;
batches that do not fit."""

import dataclasses
import math

import pytest
import torch
from small_batches import (
    batch_of,
    finite_differences,
    gradient,
    loss_of,
    random_batch,
    ratios_of,
    row,
)

from vla_rl.algorithms import aggregation, count_denominators
from vla_rl.algorithms.losses import (
    CorrectionConfig,
    PolicyLossConfig,
    TokenBatch,
    behavior_weights,
    clipped_surrogate,
    decoupled_surrogate,
    policy_loss,
    sequence_drift,
    sequence_log_ratio,
)
from vla_rl.algorithms.losses.policy.ppo import DecoupledPpoLossConfig, PpoLossConfig


def clipped(batch: TokenBatch, **changes):
    return clipped_surrogate(batch, PpoLossConfig(**changes))


def test_each_side_is_clipped_only_where_it_would_profit() -> None:
    losses, diagnostics = clipped(
        batch_of((1.5, 0.5, 1.1, 1.5, 0.5, 1.0), (1.0, 1.0, 1.0, -1.0, -1.0, 2.0))
    )
    # A > 0: -min(rho, 1.28);  A < 0: max(rho, 0.8)
    torch.testing.assert_close(losses, row(-1.28, -0.5, -1.1, 1.5, 0.8, -2.0))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(2 / 6)


def test_a_clipped_token_has_no_gradient_and_the_others_have_the_ratio_times_the_advantage() -> (
    None
):
    batch = batch_of((1.5, 0.5, 1.5, 0.5), (1.0, 1.0, -1.0, -1.0))
    torch.testing.assert_close(gradient(clipped, batch), row(0.0, -0.5, 1.5, 0.0))


def test_dual_clip_leaves_a_slightly_good_token_as_it_is() -> None:
    losses, _ = clipped(batch_of((1.0, 0.9), (0.5, 0.01)), dual_clip=3.0)
    torch.testing.assert_close(losses, row(-0.5, -0.009))


def test_the_diagnostics_by_hand() -> None:
    # log-ratios log 2 and -log 4; the third token does not count
    mask = torch.tensor([[True, True, False]])
    _, told = clipped(batch_of((2.0, 0.25, 9.0), (1.0, 1.0, 1.0), mask=mask))
    k1 = (-math.log(2.0) + math.log(4.0)) / 2
    assert told.metrics() == pytest.approx(
        {
            "ratio_mean": 1.125,
            "ratio_max": 2.0,
            "kl_k1": k1,
            "kl_k3": (2.25 - 2.0) / 2 + k1,
            "clip_fraction": 0.5,
            "dropped_fraction": 0.0,
        }
    )


def test_dual_clip_bounds_only_the_loss_of_bad_tokens() -> None:
    losses, diagnostics = clipped(batch_of((10.0, 2.0, 10.0), (-1.0, -1.0, 1.0)), dual_clip=3.0)
    torch.testing.assert_close(losses, row(3.0, 2.0, -1.28))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(2 / 3)


def test_diagnostics_are_means_over_unmasked_tokens_only() -> None:
    mask = torch.tensor([[True, True, False]])
    metrics = clipped(batch_of((2.0, 0.5, 1000.0), (0.0, 0.0, 0.0), mask=mask))[1].metrics()
    assert metrics["ratio_mean"] == pytest.approx(1.25)
    assert metrics["ratio_max"] == pytest.approx(2.0)
    assert metrics["kl_k1"] == pytest.approx(0.0, abs=1e-7)  # -(log 2 + log 0.5) / 2
    assert metrics["kl_k3"] == pytest.approx(0.25)  # ((2 - 1) + (0.5 - 1) - 0) / 2
    assert metrics["clip_fraction"] == 0.0
    assert metrics["dropped_fraction"] == 0.0


def test_a_huge_log_ratio_is_clamped_before_it_overflows() -> None:
    batch = dataclasses.replace(batch_of((1.0,), (-1.0,)), log_prob=row(500.0).requires_grad_())
    losses, diagnostics = clipped(batch)
    assert losses.item() == pytest.approx(math.exp(20.0))
    assert gradient(clipped, batch).item() == 0.0
    assert math.isfinite(diagnostics.metrics()["ratio_max"])


def test_the_ratio_of_a_control_step_is_the_product_over_its_tokens_and_its_loss_is_shared() -> (
    None
):
    # two control steps of two tokens: ratios 1.2 * 1.2 = 1.44 (clipped at 1.28) and 1.1 * 1.0 = 1.1
    batch = batch_of((1.2, 1.2, 1.1, 1.0), (1.0, 1.0, 1.0, 1.0), action_tokens=2)
    losses, diagnostics = clipped(batch, level="action")
    torch.testing.assert_close(losses, row(-0.64, -0.64, -0.55, -0.55))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(0.5)
    assert diagnostics.metrics()["ratio_mean"] == pytest.approx((1.44 + 1.1) / 2)
    torch.testing.assert_close(
        gradient(lambda b: clipped(b, level="action"), batch), row(0.0, 0.0, -1.1, -1.1)
    )


def test_a_masked_token_takes_no_part_in_the_ratio_of_its_control_step() -> None:
    mask = torch.tensor([[True, False]])
    losses, _ = clipped(
        batch_of((1.1, 7.0), (1.0, 1.0), action_tokens=2, mask=mask), level="action"
    )
    torch.testing.assert_close(losses, row(-1.1, 0.0))


def test_the_ratio_of_a_chunk_is_the_product_over_its_row() -> None:
    losses, _ = clipped(batch_of((1.1, 1.1, 1.0), (2.0, 2.0, 2.0)), level="chunk")
    torch.testing.assert_close(losses, row(*[-2.0 * 1.21 / 3] * 3))


def test_the_level_action_needs_to_know_how_many_tokens_a_control_step_has() -> None:
    with pytest.raises(ValueError, match=r"ratio level 'action' needs TokenBatch\.action_tokens"):
        clipped(batch_of((1.0, 1.0), (1.0, 1.0)), level="action")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_prob": torch.zeros(2, 4)}, r"log_prob is \[2, 4\], expected \[2, 3\]"),
        ({"behavior_log_prob": torch.zeros(3)}, r"behavior_log_prob is \[3\]"),
        ({"advantage": torch.zeros(2)}, r"advantage is \[2\], expected \[2, 3\] or \[2, 1\]"),
        ({"mask": torch.ones(2, 3)}, "mask is torch.float32"),
        ({"mask": torch.ones(3).bool()}, r"mask is torch.bool \[3\], expected torch.bool \[B, T\]"),
        ({"proximal_log_prob": torch.zeros(2, 1)}, r"proximal_log_prob is \[2, 1\]"),
        ({"reference_log_prob": torch.zeros(2, 1)}, r"reference_log_prob is \[2, 1\]"),
        ({"sequence_log_ratio": torch.zeros(2)}, r"sequence_log_ratio is \[2\], expected \[2, 1\]"),
        ({"correction_weight": torch.zeros(2)}, r"correction_weight is \[2\]"),
        ({"action_tokens": 2}, "a row has 3 tokens and action_tokens is 2"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_name(change, message) -> None:
    fields = {
        "log_prob": torch.zeros(2, 3),
        "behavior_log_prob": torch.zeros(2, 3),
        "advantage": torch.zeros(2, 3),
        "mask": torch.ones(2, 3).bool(),
    }
    with pytest.raises(ValueError, match=message):
        TokenBatch(**(fields | change))


def test_gspo_clips_the_geometric_mean_of_the_ratios() -> None:
    # ratios 1.21 and 1.0: geometric mean 1.1, for both tokens
    losses, diagnostics = loss_of("gspo", clip_low=0.2, clip_high=0.28)(
        batch_of((1.21, 1.0), (1.0, -1.0))
    )
    torch.testing.assert_close(losses, row(-1.1, 1.1))
    assert diagnostics.metrics()["ratio_mean"] == pytest.approx(1.1)
    clipped, _ = loss_of("gspo")(batch_of((1.21, 1.0), (1.0, -1.0)))  # default range 3e-4, 4e-4
    torch.testing.assert_close(clipped, row(-1.0004, 1.1))


def test_gspo_takes_the_ratio_of_the_whole_sequence_where_it_spans_rows() -> None:
    loss = loss_of("gspo", clip_low=0.5, clip_high=0.5)
    told = torch.full((1, 1), math.log(1.3), dtype=torch.float64)
    losses, _ = loss(batch_of((1.21, 1.0), (1.0, 1.0), sequence_log_ratio=told))
    torch.testing.assert_close(losses, row(-1.3, -1.3))


def test_gspo_is_ppo_at_the_level_of_the_sequence() -> None:
    batch = batch_of((1.3, 0.9, 1.1), (1.0, -1.0, 2.0))
    numbers = {"clip_low": 0.01, "clip_high": 0.02}
    ppo = loss_of("ppo", level="sequence", **numbers)
    torch.testing.assert_close(loss_of("gspo", **numbers)(batch)[0], ppo(batch)[0])


def test_opsm_drops_bad_sequences_that_the_policy_has_left() -> None:
    # mean of behavior - current log-prob: row 0: log 2 / 2 > 0.1, row 1: -log 2 / 2
    batch = TokenBatch(
        log_prob=torch.cat(
            [ratios_of(0.5, 1.0), ratios_of(2.0, 1.0), ratios_of(0.5, 1.0)]
        ).requires_grad_(),
        behavior_log_prob=torch.zeros(3, 2, dtype=torch.float64),
        advantage=torch.tensor([[-1.0], [-1.0], [1.0]], dtype=torch.float64),
        mask=torch.ones(3, 2, dtype=torch.bool),
    )
    losses, diagnostics = loss_of("opsm", max_sequence_kl=0.1)(batch)
    torch.testing.assert_close(losses, torch.cat([row(0.0, 0.0), row(2.0, 1.0), row(-0.5, -1.0)]))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(1 / 3)


def test_opsm_keeps_good_sequences_and_those_at_the_bound() -> None:
    # the policy has halved every probability: a drift of log 2
    for advantage in (0.5, 0.0):
        losses, told = loss_of("opsm", max_sequence_kl=0.1)(
            batch_of((0.5, 0.5), (advantage, advantage))
        )
        torch.testing.assert_close(losses, row(*[-advantage * 0.5] * 2))
        assert told.metrics()["dropped_fraction"] == 0.0
    batch = batch_of((0.5, 0.5), (-1.0, -1.0))
    assert loss_of("opsm", max_sequence_kl=sequence_drift(batch).item())(batch)[0].all()
    # a token that the sampler found certain and the policy impossible counts as 20 nats
    distant = TokenBatch(
        row(-50.0, -1.0), row(0.0, -1.0), row(1.0, 1.0), torch.ones(1, 2, dtype=torch.bool)
    )
    assert sequence_drift(distant).item() == 10.0


def drifted(sampler: float, proximal: float) -> TokenBatch:
    """One bad sequence of two tokens, each of log-prob -1 now."""
    return TokenBatch(
        log_prob=row(-1.0, -1.0).requires_grad_(),
        behavior_log_prob=row(sampler, sampler),
        advantage=row(-1.0, -1.0),
        mask=torch.ones(1, 2, dtype=torch.bool),
        proximal_log_prob=row(proximal, proximal),
    )


def test_opsm_measures_the_drift_from_the_policy_that_sampled_also_under_a_correction() -> None:
    corrected = loss_of("opsm", max_sequence_kl=0.5, correction=CorrectionConfig(truncate="token"))
    drifted_from_engine, drifted_from_trainer = drifted(-0.3, -1.0), drifted(-1.0, -0.3)
    assert not corrected(drifted_from_engine)[0].any()
    assert corrected(drifted_from_trainer)[0].all()
    # the ratio of the surrogate is against the trainer's own log-probs, the rest is the weight
    # exp(-0.7)
    near = loss_of("opsm", max_sequence_kl=0.8, correction=CorrectionConfig(truncate="token"))
    torch.testing.assert_close(near(drifted_from_engine)[0], row(*[math.exp(-0.7)] * 2))


def test_by_default_opsm_drops_nothing_that_is_only_rounding_and_what_has_lost_a_tenth() -> None:
    noise = 0.03 * torch.randn(
        1000, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    behavior = torch.full((1000, 7), -1.0, dtype=torch.float64)
    mask = torch.ones(1000, 7, dtype=torch.bool)
    bad = -torch.ones(1000, 1, dtype=torch.float64)
    _, told = loss_of("opsm")(TokenBatch(behavior + noise, behavior, bad, mask))
    assert told.metrics()["dropped_fraction"] == 0.0
    _, told = loss_of("opsm")(TokenBatch(behavior - 0.11, behavior, bad, mask))
    assert told.metrics()["dropped_fraction"] == 1.0


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
