"""GPG, CISPO, SAPO, CPGD and GMPO against numbers worked out by hand."""

import math

import pytest
import torch
from small_batches import (
    batch_of,
    gradient,
    loss_of,
    row,
)


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
