"""Observations of several environments side by side, in memory that their processes write into."""

import mmap
import os
from collections import deque
from typing import Any

import numpy as np
from gymnasium import spaces

from vla_rl.simulation.layout import ObservationLayout, Others

_KEPT_COPIES = 2


class SharedBatch:
    """Row i is the newest observation of environment i; laid out as gymnasium's `batch_space` says.

    Arrays of one shape lie in memory that the simulators open by `path` and write row by row; anything else comes by
    `put`. Whole numbers are stacked, texts become a tuple.

    Args:
        layout: of one environment.
        num_envs: rows.
    """

    def __init__(self, layout: ObservationLayout, num_envs: int) -> None:
        self._layout, self._num_envs = layout, num_envs
        self._num_bytes = max(1, layout.batch_bytes(num_envs))
        self._fd = os.memfd_create("vla_rl-batch", os.MFD_CLOEXEC)  # nameless: nothing is left behind
        os.ftruncate(self._fd, self._num_bytes)
        self._memory = mmap.mmap(self._fd, self._num_bytes)
        self._arrays = layout.places(self._memory, num_envs)
        self._bytes: np.ndarray = np.ndarray(self._num_bytes, np.uint8, self._memory)
        self._others: list[Others] = [[None for _ in layout.others] for _ in range(num_envs)]
        self._spare: deque[mmap.mmap] = deque(maxlen=_KEPT_COPIES)

    @property
    def path(self) -> str:
        """By which a process of this user opens the memory, until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        """No further process can open the memory; it lives for as long as somebody reads it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def put(self, index: int, others: Others) -> None:
        """What is no array, of one environment."""
        self._others[index] = others

    def row(self, index: int) -> Any:
        """The observation of one environment, in memory of its own."""
        return self._layout.assemble([array[index, ...].copy() for array in self._arrays], self._others[index])

    def get(self) -> Any:
        """The batch; its arrays are the ones that later rows are written into."""
        return self._layout.assemble(self._arrays, self._columns())

    def copied(self) -> Any:
        """The batch in memory of its own, which is used again when the last array over it is gone."""
        try:
            memory = self._spare.pop()
        except IndexError:
            memory = mmap.mmap(-1, self._num_bytes)
        lease = _Lease(self._num_bytes, np.uint8, memory)
        lease._memory, lease._spare = memory, self._spare
        np.copyto(lease, self._bytes)
        return self._layout.assemble(self._layout.places(lease, self._num_envs), self._columns())

    def _columns(self) -> list[Any]:
        columns = zip(*self._others, strict=True)
        return [
            np.array(column, part.dtype) if isinstance(part, spaces.Discrete) else column
            for part, column in zip(self._layout.others, columns, strict=True)
        ]


class _Lease(np.ndarray):
    """The base of the arrays of one copy: when the last of them is gone, its memory is for the next copy."""

    _memory: mmap.mmap
    _spare: deque[mmap.mmap]

    def __del__(self) -> None:
        memory = getattr(self, "_memory", None)  # a view of a lease is none
        if memory is not None:
            self._spare.append(memory)
