"""Which rows go through the network together."""

from bisect import bisect_left

import torch
from torch import Tensor

from vla_rl.engines.lines import Lines
from vla_rl.learning.config import MicroBatchSize


def micro_batches(num_read: Tensor, size: MicroBatchSize) -> list[Tensor]:
    """Indices of each micro-batch, int64 [M], M >= 1; together every row once.

    Without a limit of tokens, rows stay in order. With one, the longest rows come first; a micro-batch has lines as wide as
    its longest row, as many as the limit allows, and shorter rows share lines (`vla_rl.engines.lines`). A row that is
    longer than the limit goes alone.

    Args:
        num_read: int64 [N], tokens that a forward pass reads for each row.
        size: most rows, and most tokens.
    """
    if size.tokens is None:
        return list(torch.split(torch.arange(len(num_read)), size.rows))
    order = torch.argsort(num_read, descending=True, stable=True)
    lengths = num_read[order].tolist()
    rising = [-length for length in lengths]
    left, parts = _Left(len(lengths)), []
    while (row := left.at_or_after(0)) < len(lengths):
        width = max(lengths[row], 1)
        lines = Lines(width, min(max(1, size.tokens // width), size.rows, len(lengths)))
        chosen: list[int] = []
        while row < len(lengths) and len(chosen) < size.rows:
            lines.place(lengths[row])
            left.take(row)
            chosen.append(row)
            # every row before the first that is short enough for the most room is too long
            row = left.at_or_after(max(row, bisect_left(rising, -lines.most_room)))
        parts.append(order[torch.tensor(chosen)])
    return parts


class _Left:
    """Which of a number of rows were not taken yet; passing over those that were costs next to nothing."""

    def __init__(self, num_rows: int) -> None:
        self._next = list(range(num_rows + 1))

    def take(self, row: int) -> None:
        self._next[row] = row + 1

    def at_or_after(self, row: int) -> int:
        """The first row from here on that is left; their number where there is none."""
        while self._next[row] != row:
            self._next[row] = self._next[self._next[row]]
            row = self._next[row]
        return row
