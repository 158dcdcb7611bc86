"""Check IPO against numbers worked out by hand."""

import math

import pytest
import torch
from loss_batches import (
    loss_of,
    probabilities,
    row,
)

from vla_rl.algorithms.losses import PolicyLossConfig


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


def test_ipo_teaches_where_every_advantage_is_zero_as_long_as_it_pulls() -> None:
    assert PolicyLossConfig(name="ipo").has_terms_without_advantage
    assert not PolicyLossConfig(name="ipo", penalty_coef=0.0).has_terms_without_advantage
