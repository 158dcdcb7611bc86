"""Losses of critics: TD error, CQL's gap, IQL's expectile. Numbers by hand and finite differences."""

import math

import pytest
import torch
from small_batches import finite_differences

from vla_rl.algorithms import off_policy


def test_the_td_loss_is_a_mean_over_critics_and_rows() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 2.0]], requires_grad=True)
    loss = off_policy.td_loss(values, torch.tensor([1.0, 0.0]))
    assert loss.item() == (0.0 + 4.0 + 4.0 + 4.0) / 4
    loss.backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, 1.0], [1.0, 1.0]]))


def test_targets_with_an_axis_too_many_are_refused_instead_of_broadcast() -> None:
    with pytest.raises(ValueError, match=r"targets is \[2, 1\], expected \[B\] = \[2\]"):
        off_policy.td_loss(torch.zeros(2, 2), torch.zeros(2, 1))


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="the batch has no row"):
        off_policy.td_loss(torch.zeros(2, 0), torch.zeros(0))


def test_the_conservative_gap_is_zero_where_all_actions_are_worth_the_same() -> None:
    # uniform samples of density 1/4 on S = 2: log(2 * exp(1 + log 4)) - 1 = log 8
    gaps = off_policy.conservative_gaps(
        torch.ones(1, 3, 2), torch.full((3, 2), -math.log(4.0)), torch.ones(1, 3)
    )
    assert gaps.tolist() == pytest.approx([math.log(8.0)])


def test_the_conservative_gap_pushes_high_samples_down_and_the_data_up() -> None:
    torch.manual_seed(0)
    sampled, densities, data = torch.randn(2, 3, 4), torch.randn(3, 4), torch.randn(2, 3)
    values = torch.cat([sampled.flatten(), data.flatten()]).double()

    def penalty(flat: torch.Tensor) -> torch.Tensor:
        return off_policy.conservative_gaps(
            flat[:24].reshape(2, 3, 4), densities.double(), flat[24:].reshape(2, 3)
        ).mean()

    leaf = values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(penalty(leaf), leaf)
    torch.testing.assert_close(gradient, finite_differences(penalty, values))
    assert (gradient[:24] > 0).all()
    torch.testing.assert_close(gradient[24:], torch.full((6,), -1 / 6).double())


def test_the_conservative_weight_grows_while_the_gap_is_above_its_threshold() -> None:
    for gaps, sign in ((torch.tensor([6.0, 8.0]), -1.0), (torch.tensor([1.0, 2.0]), 1.0)):
        log_multiplier = torch.tensor(math.log(2.0), requires_grad=True)
        off_policy.conservative_multiplier_loss(log_multiplier, gaps, threshold=5.0).backward()
        assert log_multiplier.grad is not None
        assert log_multiplier.grad.item() == pytest.approx(-2.0 * (gaps.mean().item() - 5.0))
        assert math.copysign(1.0, log_multiplier.grad.item()) == sign


def test_an_expectile_weighs_values_that_are_too_low_more() -> None:
    values = torch.tensor([0.0, 2.0], requires_grad=True)
    loss = off_policy.expectile_loss(values, torch.tensor([1.0, 1.0]), expectile=0.9)
    assert loss.item() == pytest.approx((0.9 * 1.0 + 0.1 * 1.0) / 2)
    loss.backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([-0.9, 0.1]))


def test_an_expectile_of_a_half_is_the_mean_and_a_high_one_the_best() -> None:
    actions = torch.tensor([0.0, 0.0, 0.0, 1.0])
    grid = torch.linspace(0.0, 1.0, 1001)

    def fitted(expectile: float) -> float:
        losses = [
            off_policy.expectile_loss(value.expand(4), actions, expectile=expectile)
            for value in grid
        ]
        return float(grid[torch.stack(losses).argmin()])

    assert fitted(0.5) == pytest.approx(0.25, abs=2e-3)
    assert fitted(0.99) == pytest.approx(0.99 / (0.99 + 0.03), abs=2e-3)


@pytest.mark.parametrize("expectile", [0.0, 1.0, -0.5])
def test_an_expectile_out_of_range_is_refused(expectile: float) -> None:
    with pytest.raises(ValueError, match="expected a number between 0 and 1"):
        off_policy.expectile_loss(torch.zeros(1), torch.zeros(1), expectile=expectile)
