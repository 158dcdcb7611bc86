"""The columns of a token batch are declared once; rows, batches and losses follow from it."""

from dataclasses import fields

import numpy as np
import torch

from vla_rl.algorithms.losses import TokenBatch
from vla_rl.learner.rows import BY_ROW, RECORDED, Row, TokenColumns, narrowed


def test_every_input_of_a_loss_is_a_column() -> None:
    computed_by_the_loss = {"log_prob", "sampler_log_prob"}
    inputs = {each.name for each in fields(TokenBatch)} - computed_by_the_loss
    assert inputs <= {each.name for each in fields(TokenColumns)}


def test_tokens_without_numbers_get_the_fill_value_of_every_column() -> None:
    row = Row({}, sequence=0, temperature=1.0)
    row.add(np.array([7, 8]))
    assert {name: row.parts[name][0].tolist() for name in RECORDED} == {
        name: [7, 8] if name == "tokens" else [column.fill] * 2 for name, column in RECORDED.items()
    }
    assert all(hasattr(row, name) for name in BY_ROW)


def test_a_column_with_one_number_for_the_chosen_tokens_of_each_row_is_kept_narrow() -> None:
    mask = torch.tensor([[True, True, False], [False, True, True]])
    column = torch.tensor([[3.0, 3.0, 9.0], [9.0, -1.0, -1.0]])
    assert narrowed(column, mask).tolist() == [[3.0], [-1.0]]
    assert narrowed(column, torch.ones_like(mask)) is column
    assert narrowed(column.long(), mask).tolist() == [[3], [-1]]
