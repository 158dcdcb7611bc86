"""Losses that weigh or drop single tokens (GPG, CISPO, SAPO, CPGD, GMPO, trust regions, covariances) against numbers
worked out by hand."""

import dataclasses
import math

import pytest
import torch
from small_batches import (
    batch_of,
    covariance_batch,
    gradient,
    loss_of,
    probabilities,
    row,
)

from vla_rl.algorithms.losses import (
    PolicyLossConfig,
    TokenBatch,
    chosen_tokens,
)
from vla_rl.algorithms.losses.policy.covariance import token_covariance


def test_gpg_is_the_log_prob_times_the_advantage() -> None:
    batch = batch_of((2.0, 0.5), (3.0, -1.0))
    torch.testing.assert_close(loss_of("gpg")(batch)[0], row(-3.0 * math.log(2), math.log(0.5)))
    torch.testing.assert_close(gradient(loss_of("gpg"), batch), row(-3.0, 1.0))


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    batch = batch_of((8.0, 0.1), (1.0, -2.0))
    losses, diagnostics = loss_of("cispo")(batch)
    torch.testing.assert_close(losses, row(-5.0 * math.log(8.0), 0.1 * 2.0 * math.log(0.1)))
    torch.testing.assert_close(gradient(loss_of("cispo"), batch), row(-5.0, 0.2))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(0.5)


def test_sapo_is_a_soft_gate_that_is_steeper_for_bad_tokens() -> None:
    losses, _ = loss_of("sapo")(batch_of((2.0, 2.0, 1.0), (1.0, -1.0, 3.0)))
    good = 4.0 / (1.0 + math.exp(-1.0))
    bad = 4.0 / 1.05 / (1.0 + math.exp(-1.05))
    torch.testing.assert_close(losses, row(-good, bad, -3.0 * 2.0))  # sigmoid(0) * 4 / 1 = 2


def test_cpgd_bounds_the_log_ratio_and_weighs_no_gradient() -> None:
    batch = batch_of((2.0, 0.5, 2.0, 0.5), (1.0, 1.0, -1.0, -1.0))
    loss = loss_of("cpgd", drift_coef=0.0)
    bounded = [
        min(math.log(2), math.log(1.2)),
        math.log(0.5),
        -math.log(2),
        -max(math.log(0.5), math.log(0.8)),
    ]
    torch.testing.assert_close(loss(batch)[0], -row(*bounded))
    torch.testing.assert_close(gradient(loss, batch), row(0.0, -1.0, 1.0, 0.0))
    assert loss(batch)[1].metrics()["clip_fraction"] == pytest.approx(0.5)


def test_cpgd_with_a_lower_bound_of_one_has_no_lower_bound() -> None:
    losses, _ = loss_of("cpgd", clip_low=1.0, drift_coef=0.0)(batch_of((0.01,), (-1.0,)))
    torch.testing.assert_close(losses, row(math.log(0.01)))


def test_cpgd_drift_pulls_back_with_the_ratio_minus_one_but_never_harder_than_two() -> None:
    loss = loss_of("cpgd", drift_coef=0.5)
    torch.testing.assert_close(
        gradient(loss, batch_of((2.0, 0.5, 9.0), (0.0, 0.0, 0.0))), row(0.5, -0.25, 1.0)
    )


@pytest.mark.parametrize("name", ["cpgd", "gmpo", "ppo"])
def test_a_token_without_an_advantage_is_not_counted_as_clipped(name: str) -> None:
    _, diagnostics = loss_of(name)(batch_of((2.0, 0.5), (0.0, 0.0)))
    assert diagnostics.metrics()["clip_fraction"] == 0.0


def test_gmpo_clips_each_ratio_before_the_geometric_mean() -> None:
    # A > 0: log-ratios min(log 2, 0.4) = 0.4 and min(log 0.5, 0.4) = log 0.5
    losses, diagnostics = loss_of("gmpo")(batch_of((2.0, 0.5), (1.0, 1.0)))
    expected = -math.exp((0.4 + math.log(0.5)) / 2)
    torch.testing.assert_close(losses, row(expected, expected))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(0.5)
    # A < 0: max(log 2, -0.4) = log 2 and max(log 0.5, -0.4) = -0.4
    losses, _ = loss_of("gmpo")(batch_of((2.0, 0.5), (-1.0, -1.0)))
    expected = math.exp((math.log(2.0) - 0.4) / 2)
    torch.testing.assert_close(losses, row(expected, expected))


def test_dppo_drops_tokens_whose_probability_moved_too_far_the_wrong_way() -> None:
    # p - q = 0.3, 0.3, -0.3, -0.3 with A = +, -, +, -; wrong way: up and good, down and bad
    batch = probabilities((0.8, 0.8, 0.2, 0.2), (0.5, 0.5, 0.5, 0.5), (1.0, -1.0, 1.0, -1.0))
    losses, diagnostics = loss_of("dppo", penalty_coef=0.0)(batch)
    torch.testing.assert_close(losses, row(0.0, 1.6, -0.4, 0.0))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(0.5)
    held, _ = loss_of("dppo", penalty_coef=0.1)(batch)
    torch.testing.assert_close(held[0, 0].item(), 0.1 * math.log(1.6) ** 2)


def test_a_rare_token_may_double_its_ratio_under_dppo_but_not_under_ppo() -> None:
    batch = probabilities((0.002,), (0.001,), (1.0,))
    assert loss_of("dppo", penalty_coef=0.0)(batch)[0].item() == pytest.approx(-2.0)
    assert loss_of("ppo")(batch)[0].item() == pytest.approx(-1.28)


def test_ipo_drops_on_both_sides_whatever_the_advantage_and_pulls_every_token_back() -> None:
    # p - q = 0.12, -0.12, 0.08; prime-rl's threshold is 0.1
    batch = probabilities((0.62, 0.38, 0.58), (0.5, 0.5, 0.5), (-1.0, 1.0, 1.0))
    losses, diagnostics = loss_of("ipo", penalty_coef=0.1)(batch)
    pulls = [0.1 * math.log(ratio) ** 2 for ratio in (1.24, 0.76, 1.16)]
    torch.testing.assert_close(losses, row(pulls[0], pulls[1], -1.16 + pulls[2]))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(2 / 3)


def test_ipo_takes_other_thresholds_and_does_without_the_pull() -> None:
    batch = probabilities((0.8, 0.2, 0.62), (0.5, 0.5, 0.5), (-1.0, 1.0, 1.0))
    wide = loss_of("ipo", probability_low=0.2, probability_high=0.2, penalty_coef=0.0)
    torch.testing.assert_close(wide(batch)[0], row(0.0, 0.0, -1.24))
    uneven = loss_of("ipo", probability_low=0.1, probability_high=0.4, penalty_coef=0.0)
    torch.testing.assert_close(uneven(batch)[0], row(1.6, 0.0, -1.24))


def test_ipo_trains_where_every_advantage_is_zero_as_long_as_it_pulls() -> None:
    assert PolicyLossConfig(name="ipo").has_terms_without_advantage
    assert not PolicyLossConfig(name="ipo", penalty_coef=0.0).has_terms_without_advantage


def test_icepop_is_zero_outside_of_its_interval_of_ratios() -> None:
    losses, _ = loss_of("icepop")(batch_of((0.4, 0.6, 4.0, 6.0), (1.0, 1.0, -1.0, -1.0)))
    torch.testing.assert_close(losses, row(0.0, -0.6, 4.0, 0.0))


def test_m2po_drops_the_farthest_tokens_until_the_second_moment_is_small() -> None:
    # squared log-ratios 0.01, 0.04, 0.25: means 0.01, 0.025, 0.1
    batch = batch_of((math.exp(0.5), math.exp(-0.1), math.exp(0.2)), (1.0, 1.0, 1.0))
    losses, diagnostics = loss_of("m2po", max_second_moment=0.03)(batch)
    torch.testing.assert_close(losses, row(0.0, -math.exp(-0.1), -math.exp(0.2)))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(1 / 3)
    kept, _ = loss_of("m2po", max_second_moment=0.11)(batch)
    assert (kept != 0.0).all()


def test_a_token_at_the_bound_of_a_trust_region_is_kept() -> None:
    batch = probabilities((0.75, 0.25), (0.5, 0.5), (1.0, -1.0))
    up, down = (batch.log_prob.detach().exp() - batch.behavior_log_prob.exp())[0].tolist()
    for name in ("dppo", "ipo"):
        at_the_bound = {"probability_high": up, "probability_low": -down, "penalty_coef": 0.0}
        torch.testing.assert_close(loss_of(name, **at_the_bound)(batch)[0], row(-1.5, 0.5))
        within = {
            "probability_high": 0.99 * up,
            "probability_low": -0.99 * down,
            "penalty_coef": 0.0,
        }
        assert not loss_of(name, **within)(batch)[0].any()
    high, low = (batch.log_prob.detach() - batch.behavior_log_prob)[0].exp().tolist()
    torch.testing.assert_close(
        loss_of("icepop", weight_low=low, weight_high=high)(batch)[0], row(-1.5, 0.5)
    )
    # squared log-ratios a < b: their mean is the bound
    squares = (batch.log_prob.detach() - batch.behavior_log_prob).square()[0].sort().values
    moment = float(squares.cumsum(0)[1] / 2)
    assert loss_of("m2po", max_second_moment=moment)(batch)[0].all()


def test_the_share_of_tokens_that_is_chosen_is_of_those_that_are_not_padding() -> None:
    # 4 tokens and 4 of padding: a share of 0.5 is 2 tokens
    short = covariance_batch()
    padded = TokenBatch(
        log_prob=torch.nn.functional.pad(short.log_prob, (0, 4), value=-9.0),
        behavior_log_prob=torch.nn.functional.pad(short.behavior_log_prob, (0, 4), value=-9.0),
        advantage=torch.nn.functional.pad(short.advantage, (0, 4), value=-9.0),
        mask=torch.nn.functional.pad(short.mask, (0, 4)),
    )
    for config in (
        PolicyLossConfig(name="clip_cov", covariance_share=0.5, covariance_low=-5.0),
        PolicyLossConfig(name="kl_cov", covariance_share=0.5),
    ):
        chosen = chosen_tokens(config, padded)
        assert int(chosen.sum()) == 2
        assert torch.equal(chosen[:, :4], chosen_tokens(config, short))
        assert not chosen[:, 4:].any()


def test_a_share_of_nothing_chooses_nothing_and_any_other_at_least_one_token() -> None:
    for share, chosen in ((0.0, 0), (1e-9, 1)):
        for config in (
            PolicyLossConfig(name="clip_cov", covariance_share=share, covariance_low=-5.0),
            PolicyLossConfig(name="kl_cov", covariance_share=share),
        ):
            assert int(chosen_tokens(config, covariance_batch()).sum()) == chosen


def test_padding_has_no_covariance_and_is_not_penalised_where_that_of_every_token_is_lower() -> (
    None
):
    # means -1.5 and 2: covariances -0.5 and -0.5; of the padding it would be (0 - 2) * (0 + 1.5)
    batch = TokenBatch(
        log_prob=row(-2.0, -1.0, -7.0),
        behavior_log_prob=row(-2.0, -1.0, -7.0),
        advantage=row(3.0, 1.0, 9.0),
        mask=torch.tensor([[True, True, False]]),
    )
    torch.testing.assert_close(token_covariance(batch), row(-0.5, -0.5, 0.0))
    config = PolicyLossConfig(name="kl_cov", covariance_share=0.5)
    # of equal ones the last
    assert chosen_tokens(config, batch).tolist() == [[False, True, False]]
    for name in ("kl_cov", "clip_cov"):
        assert loss_of(name)(batch)[1].metrics()["covariance"] == pytest.approx(-0.5)
    alone = dataclasses.replace(batch, mask=torch.tensor([[True, False, False]]))
    torch.testing.assert_close(token_covariance(alone), row(0.0, 0.0, 0.0))


def test_clip_cov_drops_a_share_of_the_tokens_of_high_covariance() -> None:
    loss = loss_of("clip_cov", covariance_share=0.25, covariance_low=0.5, covariance_high=5.0)
    losses, diagnostics = loss(covariance_batch())
    # one of the two candidates, the first
    torch.testing.assert_close(losses, row(0.0, -1.0, 1.0, -1.0))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(0.25)
    both = loss_of("clip_cov", covariance_share=0.5, covariance_low=0.5, covariance_high=5.0)
    torch.testing.assert_close(both(covariance_batch())[0], row(0.0, 0.0, 1.0, -1.0))


def test_clip_covs_candidates_are_unmasked_unclipped_and_strictly_between_the_bounds() -> None:
    # means over the five unmasked tokens: log-prob -2, advantage 0; covariances 1, 0.5, 0, 1, -2.5
    # and of the masked one 6
    log_prob = row(-3.0, -2.5, -2.0, -1.0, -1.5, 0.0)
    batch = TokenBatch(
        log_prob=log_prob.clone().requires_grad_(),
        # the fourth token's ratio is 1.5, beyond the clip of a good token
        behavior_log_prob=log_prob - row(0.0, 0.0, 0.0, math.log(1.5), 0.0, 0.0),
        advantage=row(-1.0, -1.0, 6.0, 1.0, -5.0, 3.0),
        mask=torch.tensor([[True] * 5 + [False]]),
    )
    covariance = token_covariance(batch)
    torch.testing.assert_close(covariance, row(1.0, 0.5, 0.0, 1.0, -2.5, 0.0))

    def dropped(low: float, high: float) -> list[int]:
        config = PolicyLossConfig(
            name="clip_cov",
            covariance_share=1.0,
            covariance_low=low,
            covariance_high=high,
            clip_high=0.28,
        )
        return chosen_tokens(config, batch)[0].nonzero()[:, 0].tolist()

    assert dropped(-9.0, 9.0) == [0, 1, 2, 4]  # neither the clipped nor the masked token
    assert dropped(0.5, 9.0) == [0]  # a covariance at the bound is no candidate
    assert dropped(0.0, 1.0) == [1]
    assert dropped(-9.0, 0.25) == [2, 4]


def test_candidates_are_taken_evenly_spaced() -> None:
    log_prob = row(*[-1.0] * 8)
    batch = TokenBatch(log_prob, log_prob, row(*[1.0] * 8), torch.ones(1, 8, dtype=torch.bool))
    # 3 of 8 candidates
    config = PolicyLossConfig(name="clip_cov", covariance_share=0.375, covariance_low=-1.0)
    assert chosen_tokens(config, batch)[0].nonzero()[:, 0].tolist() == [0, 2, 5]


def test_clip_cov_without_a_candidate_is_ppo() -> None:
    losses, diagnostics = loss_of("clip_cov", covariance_share=1.0, covariance_low=2.0)(
        covariance_batch()
    )
    torch.testing.assert_close(losses, row(1.0, -1.0, 1.0, -1.0))
    assert diagnostics.metrics()["dropped_fraction"] == 0.0


def test_kl_cov_penalises_the_tokens_of_the_highest_covariance() -> None:
    # means: log-prob 0, advantage 0 -> covariances 2 log 2, -log 2 and 0
    batch = batch_of((2.0, 0.5, 1.0), (2.0, 1.0, -3.0))
    losses, diagnostics = loss_of("kl_cov", covariance_share=0.34, penalty_coef=0.1)(batch)
    torch.testing.assert_close(losses, row(-4.0 + 0.1 * math.log(2), -0.5, 3.0))
    assert diagnostics.metrics()["penalised_fraction"] == pytest.approx(1 / 3)
