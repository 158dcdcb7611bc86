"""Check which rows of an update share a micro-batch, and which of them a line."""

import time

import numpy as np
import pytest
import torch

from vla_rl.learner.config import MicroBatchSize
from vla_rl.learner.plan import micro_batches


def test_micro_batches_hold_rows_of_like_length_up_to_their_padded_tokens() -> None:
    lengths = torch.tensor([3, 10, 4, 9, 2])
    parts = micro_batches(lengths, MicroBatchSize(rows=8, tokens=20))
    assert [part.tolist() for part in parts] == [[1, 3], [2, 0, 4]]
    assert [part.tolist() for part in micro_batches(lengths, MicroBatchSize(rows=2))] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert [part.tolist() for part in micro_batches(lengths, MicroBatchSize(rows=8, tokens=5))] == [
        [1],
        [3],
        [2],
        [0],
        [4],
    ]


def test_short_rows_share_the_lines_that_longer_ones_leave_free() -> None:
    lengths = torch.tensor([3, 10, 4, 5, 2])
    parts = micro_batches(lengths, MicroBatchSize(rows=8, tokens=20))
    assert [part.tolist() for part in parts] == [[1, 3, 2], [0, 4]]  # 10 | 5 and 4; then 3 | 2
    assert [
        part.tolist() for part in micro_batches(lengths, MicroBatchSize(rows=2, tokens=20))
    ] == [
        [1, 3],
        [2, 0],
        [4],
    ]


def first_fit(lengths: list[int], size: MicroBatchSize) -> list[list[int]]:
    """What `micro_batches` promises, one row after the other."""
    assert size.tokens is not None
    parts, left = [], sorted(range(len(lengths)), key=lambda row: -lengths[row])
    while left:
        width = max(lengths[left[0]], 1)
        part: list[int] = []
        lines: list[int] = []
        for row in left:
            line = next(
                (number for number, end in enumerate(lines) if end + lengths[row] <= width),
                len(lines),
            )
            if len(part) == size.rows or line >= max(1, size.tokens // width):
                continue
            lines += [0] * (line == len(lines))
            lines[line] += lengths[row]
            part.append(row)
        parts.append(part)
        left = [row for row in left if row not in part]
    return parts


@pytest.mark.parametrize(
    "size", [MicroBatchSize(5, 60), MicroBatchSize(100, 300), MicroBatchSize(1, 40)]
)
@pytest.mark.parametrize("longest", [6, 50])
def test_every_row_goes_to_the_first_line_with_room(size: MicroBatchSize, longest: int) -> None:
    lengths = np.random.default_rng(longest).integers(0, longest, 80).tolist()
    assert [part.tolist() for part in micro_batches(torch.tensor(lengths), size)] == first_fit(
        lengths, size
    )


def test_many_rows_are_put_together_in_a_time_that_grows_with_their_number() -> None:
    lengths = torch.from_numpy(np.random.default_rng(0).integers(50, 4000, 20_000))
    began = time.process_time()
    parts = micro_batches(lengths, MicroBatchSize(32, 16_384))
    assert time.process_time() - began < 5.0  # looking at all rows for every part took minutes
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(20_000))
