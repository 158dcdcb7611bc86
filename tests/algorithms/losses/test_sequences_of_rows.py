"""Check sums and means over sequences whose tokens are in several rows."""

import pytest
import torch

from vla_rl.algorithms.losses.token_batch import SequencesOfRows

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
