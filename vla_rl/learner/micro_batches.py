"""Grouping of rows into the forward passes of the network."""

from bisect import bisect_left

import torch
from torch import Tensor

from vla_rl.learner.config import MicroBatchSize
from vla_rl.learner.lines import Lines


def micro_batches(num_read: Tensor, size: MicroBatchSize) -> list[Tensor]:
    """Return the row indices of each micro-batch, int64 [M], M >= 1; every row is in exactly one.

    Without a token limit, rows stay in order. With one, the longest rows come first. The lines of a
    micro-batch are as wide as its longest row, there are as many as the limit allows, and shorter
    rows share lines (`vla_rl.learner.lines`). A row that exceeds the limit is a micro-batch of its
    own.

    Args:
        num_read: int64 [N], number of tokens that a forward pass reads for each row.
        size: maximum number of rows, and of tokens.
    """
    if size.tokens is None:
        return list(torch.split(torch.arange(len(num_read)), size.rows))
    # longest first: the longest row sets the width of all lines, and shorter ones fill what is left
    order = torch.argsort(num_read, descending=True, stable=True)
    lengths = num_read[order].tolist()
    rising = [-length for length in lengths]
    left, parts = _Left(len(lengths)), []
    while (row := left.first_left(0)) < len(lengths):
        width = max(lengths[row], 1)
        lines = Lines(width, min(max(1, size.tokens // width), size.rows, len(lengths)))
        chosen: list[int] = []
        while row < len(lengths) and len(chosen) < size.rows:
            lines.place(lengths[row])
            left.take(row)
            chosen.append(row)
            # rows before the first that fits the largest free space are too long
            row = left.first_left(max(row, bisect_left(rising, -lines.most_room)))
        parts.append(order[torch.tensor(chosen)])
    return parts


class _Left:
    """Rows that were not taken yet; skipping those that were taken costs almost nothing."""

    def __init__(self, num_rows: int) -> None:
        self._next = list(range(num_rows + 1))

    def take(self, row: int) -> None:
        self._next[row] = row + 1

    def first_left(self, row: int) -> int:
        """Return the first row, from this one on, that is left; the number of rows if none is."""
        while self._next[row] != row:
            # path halving: walking over every taken row again would be quadratic in their number
            self._next[row] = self._next[self._next[row]]
            row = self._next[row]
        return row
