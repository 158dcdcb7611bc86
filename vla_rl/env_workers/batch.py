"""Observations of several environments in one batch, in memory that their processes write into."""

import mmap
import os
from collections import deque
from typing import Any

import numpy as np
from gymnasium import spaces

from vla_rl.env_workers.layout import ObservationLayout, Others
from vla_rl.util.shared_memory import memory_file

NUM_BATCHES = 4
"""Batches that can be in use or written at the same time before one has to be copied."""


class SharedBatch:
    """Row i is the newest observation of environment i, in the layout of gymnasium's `batch_space`.

    Arrays of one shape are in memory that the simulators open by `path` and write row by row; all
    other values arrive by `put`. Whole numbers are stacked, texts become a tuple. The memory has
    room for several batches; the simulators write into batch number `current`.

    Args:
        layout: layout of one environment's observation.
        num_envs: number of rows.
    """

    def __init__(self, layout: ObservationLayout, num_envs: int) -> None:
        self._layout, self._num_envs = layout, num_envs
        self._num_bytes = max(1, layout.batch_bytes(num_envs))
        self._fd = memory_file("vla_rl-batch", NUM_BATCHES * self._num_bytes)
        self._memory = mmap.mmap(self._fd, 0)
        self._batches = [self._batch_view(number) for number in range(NUM_BATCHES)]
        self._arrays = layout.places(self._batches[0], num_envs)
        self._others: list[Others] = [[None for _ in layout.others] for _ in range(num_envs)]
        self._free = deque(range(1, NUM_BATCHES))
        self.current = self._last_given = 0
        """Number of the batch being written, and of the one given last; batch 0 is never given
        away."""

    @property
    def path(self) -> str:
        """Path by which a process of this user opens the memory, until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """Let no further process open the memory.

        It exists as long as a process or an array uses it.
        """
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def put(self, index: int, others: Others) -> None:
        """Store the values of one environment that are not arrays."""
        if others:
            self._others[index] = others

    def row(self, index: int) -> Any:
        """Return a copy of one environment's observation."""
        arrays = self._layout.places(self._batches[self.current], self._num_envs)
        return self._layout.assemble(
            [array[index, ...].copy() for array in arrays], self._others[index]
        )

    def get(self) -> Any:
        """Return batch 0, valid until `turn_page`; later rows are written into its arrays."""
        return self._layout.assemble(self._arrays, self._columns())

    def turn_page(self) -> None:
        """Have later rows written into a batch that `give` can give away, if one is free."""
        if self.current == 0 and self._free:
            self.current = self._free.pop()

    def keep_rows(self) -> None:
        """Keep the rows of the last batch, except those that are written from now on."""
        if self.current != 0:  # its content was never given away
            self._free.append(self.current)
            self.current = 0
        if self._last_given != 0:
            np.copyto(self._batches[0], self._batches[self._last_given])

    def give(self) -> Any:
        """Return the batch, owned by its receiver.

        Its memory is written again only when its last array is gone.
        """
        number, self.current = self.current, 0
        self._last_given = number
        if number == 0:
            content = self._batches[0].copy()
        else:
            content = _Lease(self._num_bytes, np.uint8, self._memory, number * self._num_bytes)
            content._number, content._free = number, self._free
        return self._layout.assemble(self._layout.places(content, self._num_envs), self._columns())

    def _batch_view(self, number: int) -> np.ndarray:
        return np.ndarray(self._num_bytes, np.uint8, self._memory, number * self._num_bytes)

    def _columns(self) -> list[Any]:
        if not self._layout.others:
            return []
        columns = zip(*self._others, strict=True)
        return [
            np.array(column, part.dtype) if isinstance(part, spaces.Discrete) else column
            for part, column in zip(self._layout.others, columns, strict=True)
        ]


class _Lease(np.ndarray):
    """The base of the arrays of a batch that was given away.

    When the last of them is gone, the batch is free again.
    """

    _number: int
    _free: deque[int]

    def __del__(self) -> None:
        free = getattr(self, "_free", None)  # a view of a lease is not a lease
        if free is not None:
            free.append(self._number)
