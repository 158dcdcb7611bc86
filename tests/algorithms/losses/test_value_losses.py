"""The critic's loss by hand, its gradient, and how much it explains."""

import pytest
import torch
from loss_batches import finite_differences, row

from vla_rl.algorithms.losses import ValueLossConfig, clipped_value_loss, value_loss
from vla_rl.errors import ConfigError

YES = torch.ones(1, 3, dtype=torch.bool)


def test_without_a_clip_it_is_half_the_square() -> None:
    losses, _ = clipped_value_loss(row(1.0, 2.0, 0.0), row(0.0, 0.0, 0.0), row(3.0, 2.0, 1.0), YES)
    torch.testing.assert_close(losses, row(2.0, 0.0, 0.5))


def test_the_worse_of_the_new_value_and_the_held_one_counts() -> None:
    # old 0, clip 0.5: 2 is held at 0.5, so errors are 1 and 2.5; 0.4 is not held; -2 is held at
    # -0.5: errors 3 and 1.5
    losses, diagnostics = clipped_value_loss(
        row(2.0, 0.4, -2.0), row(0.0, 0.0, 0.0), row(3.0, 1.0, 1.0), YES, clip=0.5
    )
    torch.testing.assert_close(losses, row(0.5 * 2.5**2, 0.5 * 0.6**2, 0.5 * 3.0**2))
    assert diagnostics.metrics()["value_clip_fraction"] == pytest.approx(1 / 3)


def test_the_diagnostics_count_what_is_not_masked() -> None:
    # held at old +- 0.5: of the first the held value is worse, of the second the new one, the third
    # is not held
    nan, mask = float("nan"), torch.tensor([[True, True, True, False]])
    values, old, returns = (
        row(2.0, -2.0, 0.4, nan),
        row(0.0, 0.0, 0.0, nan),
        row(3.0, 1.0, 0.0, nan),
    )
    _, diagnostics = clipped_value_loss(values, old, returns, mask, clip=0.5)
    # errors 1, 3, -0.4: variance of the returns 14 / 9
    errors = [1.0, 3.0, -0.4]
    left = sum(error**2 for error in errors) / 3 - (sum(errors) / 3) ** 2
    assert diagnostics.metrics() == pytest.approx(
        {
            "value_mean": 0.4 / 3,
            "return_mean": 4.0 / 3,
            "value_clip_fraction": 1 / 3,
            "explained_variance": 1.0 - left / (14 / 9),
        }
    )
    _, both = clipped_value_loss(
        row(2.0, 3.0), row(0.0, 0.0), row(3.0, 4.0), torch.ones(1, 2).bool(), clip=0.5
    )
    assert both.metrics()["value_clip_fraction"] == 1.0


def test_huber_is_linear_beyond_its_delta() -> None:
    losses, _ = clipped_value_loss(
        row(0.5, 3.0, -3.0), row(0.0, 0.0, 0.0), row(0.0, 0.0, 0.0), YES, huber_delta=1.0
    )
    torch.testing.assert_close(losses, row(0.125, 2.5, 2.5))


@pytest.mark.parametrize(
    ("clip", "huber_delta"), [(None, None), (0.3, None), (None, 0.7), (0.3, 0.7)]
)
def test_the_gradient_is_that_of_finite_differences(clip, huber_delta) -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = (
        torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    mask = torch.rand(4, 5, generator=generator) < 0.8
    loss = value_loss(ValueLossConfig(clip=clip, huber_delta=huber_delta))

    def total(point):
        return loss(point, old, returns, mask)[0].sum()

    (found,) = torch.autograd.grad(total(values.requires_grad_()), values)
    torch.testing.assert_close(found, finite_differences(total, values), rtol=1e-6, atol=1e-7)


def test_padding_changes_nothing() -> None:
    nan, mask = float("nan"), torch.tensor([[True, False]])
    values = row(1.0, nan).requires_grad_()
    losses, diagnostics = clipped_value_loss(values, row(1.0, nan), row(2.0, nan), mask, clip=0.5)
    losses.sum().backward()
    assert losses.tolist() == [[0.5, 0.0]]
    assert values.grad is not None
    assert values.grad.tolist() == [[-1.0, 0.0]]
    assert diagnostics.metrics()["return_mean"] == 2.0


def test_explained_variance_by_hand_and_over_micro_batches() -> None:
    values, returns = row(1.0, 2.0, 4.0), row(1.0, 3.0, 5.0)
    # errors 0, 1, 1: variance 2/9; returns: variance 8/3
    whole = clipped_value_loss(values, values, returns, YES)[1]
    assert whole.metrics()["explained_variance"] == pytest.approx(1 - (2 / 9) / (8 / 3))
    parts = [
        clipped_value_loss(values[:, i], values[:, i], returns[:, i], YES[:, i])[1]
        for i in ([0], [1, 2])
    ]
    assert (parts[0] + parts[1]).metrics() == pytest.approx(whole.metrics())


def test_returns_that_are_all_equal_leave_nothing_to_explain() -> None:
    metrics = clipped_value_loss(row(1.0, 2.0, 3.0), row(0, 0, 0), row(2.0, 2.0, 2.0), YES)[
        1
    ].metrics()
    assert "explained_variance" not in metrics
    assert clipped_value_loss(row(1, 1, 1), row(0, 0, 0), row(0, 0, 0), ~YES)[1].metrics() == {}


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"returns is \[1, 2\], expected \[1, 3\] like values"):
        clipped_value_loss(row(1, 2, 3), row(1, 2, 3), row(1, 2), YES)
    with pytest.raises(ConfigError, match=r"clip is 0.0, expected above 0"):
        ValueLossConfig(clip=0.0)
    with pytest.raises(ConfigError, match=r"huber_delta is -1.0"):
        ValueLossConfig(huber_delta=-1.0)
