"""Ratios and sums over sequences, what losses report, and the critic's loss by hand."""

import math

import pytest
import torch
from small_batches import (
    batch_of,
    finite_differences,
    gradient,
    loss_of,
    row,
)

from vla_rl.algorithms.losses import (
    PolicyLossConfig,
    TokenBatch,
    ValueLossConfig,
    clipped_value_loss,
    policy_loss,
    value_loss,
)
from vla_rl.algorithms.losses.token_batch import SequencesOfRows


def test_ratios_of_sequences_and_control_steps_are_bounded_however_far_the_policy_went() -> None:
    distant = TokenBatch(
        log_prob=row(0.0, 0.0).requires_grad_(),
        behavior_log_prob=row(-15.0, -15.0),
        advantage=row(-1.0, -1.0),
        mask=torch.ones(1, 2, dtype=torch.bool),
    )
    # a mean of 15 is cut at 10, a product of 30 at 20; what is cut has no gradient
    for config, expected in (
        (PolicyLossConfig(name="gspo"), math.exp(10.0)),
        (PolicyLossConfig(name="gmpo", clip_high=100.0), math.exp(10.0)),
        (PolicyLossConfig(level="chunk"), math.exp(20.0) / 2),
    ):
        torch.testing.assert_close(policy_loss(config)(distant)[0], row(expected, expected))
        assert not gradient(policy_loss(config), distant).any()


MASK = torch.ones(3, 2, dtype=torch.bool)
VALUES = torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])


def test_rows_of_one_id_are_one_sequence_wherever_they_stand() -> None:
    sequences = SequencesOfRows(MASK, torch.tensor([7, 3, 7]))
    assert sequences.size == 2
    assert sequences.by_sequence(VALUES).tolist() == [30.0, 303.0]
    assert sequences.sums(VALUES).tolist() == [303.0, 30.0, 303.0]


def test_without_ids_every_row_is_a_sequence() -> None:
    sequences = SequencesOfRows(MASK, None)
    assert sequences.size == 3
    assert sequences.sums(VALUES).tolist() == [3.0, 30.0, 300.0]


def test_a_mean_is_over_the_counted_tokens_of_all_rows() -> None:
    counted = torch.tensor([[True, False], [True, True], [True, True]])
    found = SequencesOfRows(MASK, torch.tensor([7, 3, 7])).means(VALUES, counted)
    torch.testing.assert_close(found, torch.tensor([[301.0 / 3], [15.0], [301.0 / 3]]))


def test_what_is_not_counted_may_hold_anything() -> None:
    values = torch.tensor([[1.0, torch.nan], [torch.inf, 3.0]])
    counted = torch.tensor([[True, False], [False, True]])
    assert SequencesOfRows(counted, None).means(values, counted).tolist() == [[1.0], [3.0]]


def test_a_sequence_without_a_counted_token_has_the_mean_zero() -> None:
    nothing = torch.zeros_like(MASK)
    assert SequencesOfRows(MASK, None).means(VALUES, nothing).tolist() == [[0.0]] * 3


def test_ids_that_are_not_one_for_each_row_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sequence is \[2\], expected \[3\]: one id per row"):
        SequencesOfRows(MASK, torch.tensor([7, 3]))


@pytest.mark.parametrize(("name", "bound"), [("gmpo", 2.0), ("cispo", 6.0), ("cpgd", 2.0)])
def test_the_clip_fraction_counts_the_tokens_that_were_bounded(name: str, bound: float) -> None:
    _, told = loss_of(name)(batch_of((bound, 1.1, 0.9), (1.0, 1.0, 1.0)))
    assert told.metrics()["clip_fraction"] == pytest.approx(1 / 3)


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
