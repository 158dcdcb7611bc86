"""Losses that drop tokens outside a trust region, against numbers worked out by hand."""

import math

import pytest
import torch
from small_batches import (
    batch_of,
    loss_of,
    probabilities,
    row,
)

from vla_rl.algorithms.losses import PolicyLossConfig


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
