"""Check DPPO against numbers worked out by hand."""

import math

import pytest
import torch
from loss_batches import (
    loss_of,
    probabilities,
    row,
)


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
