"""Values over bins, and guidance. Numbers by hand and finite differences."""

import math

import pytest
import torch
from small_batches import finite_differences

from vla_rl.algorithms import off_policy


def test_a_return_is_divided_between_its_two_nearest_bins() -> None:
    returns = torch.tensor([-1.0, -0.8, -0.5, 0.0, -7.0, 3.0])
    spread = off_policy.spread_over_bins(returns, 3, low=-1.0, high=0.0)
    expected = [[1, 0, 0], [0.6, 0.4, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1]]
    torch.testing.assert_close(spread, torch.tensor(expected, dtype=torch.float32))


def test_the_mean_over_bins_gives_the_return_back() -> None:
    returns = torch.linspace(-1.0, 0.0, 37, dtype=torch.float64)
    spread = off_policy.spread_over_bins(returns, 11, low=-1.0, high=0.0)
    found = off_policy.expected_values(spread.clamp(min=1e-30).log(), low=-1.0, high=0.0)
    torch.testing.assert_close(found, returns)


def test_the_loss_is_a_cross_entropy_with_its_gradient() -> None:
    targets = off_policy.spread_over_bins(torch.tensor([-0.8, 0.0]), 3, low=-1.0, high=0.0)
    assert off_policy.bin_loss(torch.zeros(2, 3), targets).item() == pytest.approx(math.log(3.0))
    flat = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return off_policy.bin_loss(logits.reshape(2, 3), targets.double())

    leaf = flat.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(gradient, finite_differences(loss, flat), rtol=1e-6, atol=1e-8)
    expected = (torch.softmax(flat.reshape(2, 3), dim=1) - targets) / 2
    torch.testing.assert_close(gradient.reshape(2, 3), expected)


def test_guidance_goes_beyond_the_conditioned_prediction() -> None:
    conditioned, plain = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0])
    for weight, expected in ((0.0, [0.0, 2.0]), (1.0, [1.0, 2.0]), (2.5, [2.5, 2.0])):
        assert off_policy.guide(conditioned, plain, weight).tolist() == expected


def test_one_bin_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1 bins from -1\.0 to 0\.0; expected at least 2"):
        off_policy.spread_over_bins(torch.zeros(1), 1, low=-1.0, high=0.0)
