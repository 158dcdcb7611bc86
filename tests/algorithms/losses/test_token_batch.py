"""Ratios of tokens, control steps and sequences; sums over sequences of several rows; what losses report."""

import math

import pytest
import torch
from loss_batches import (
    batch_of,
    gradient,
    loss_of,
    row,
)

from vla_rl.algorithms.losses import (
    PolicyLossConfig,
    TokenBatch,
    policy_loss,
)
from vla_rl.algorithms.losses.token_batch import SequencesOfRows


def test_ratios_of_sequences_and_control_steps_are_bounded_however_far_the_policy_went() -> None:
    far = TokenBatch(
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
        torch.testing.assert_close(policy_loss(config)(far)[0], row(expected, expected))
        assert not gradient(policy_loss(config), far).any()


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
