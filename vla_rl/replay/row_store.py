"""Rows in memory: one array, and who has which of its slots.

A batch is one `numpy.take` over the array, whatever the number of segments.
"""

import numpy as np

from vla_rl.errors import ConfigError
from vla_rl.replay.transitions import TransitionLayout


class RowStore:
    """An array of rows with a list of free slots; it grows if it is full.

    Args:
        layout: type of the rows.
        capacity: rows for which address space is reserved. The system gives memory only to rows that
            are written.

    Raises: ConfigError if the system refuses that much.
    """

    def __init__(self, layout: TransitionLayout, capacity: int) -> None:
        self._dtype = layout.row_dtype
        try:
            # bytes and not rows: copies then include the padding, and rows stay equal byte by byte
            self._bytes = np.empty((capacity, self._dtype.itemsize), np.uint8)
        except MemoryError as error:
            raise ConfigError(
                f"the replay buffer's capacity is {capacity} rows of {self._dtype.itemsize} bytes, more than "
                "this machine has memory for; choose a smaller one, or float16 features"
            ) from error
        self._free = np.arange(capacity - 1, -1, -1)

    def add_rows(self, rows: np.ndarray) -> np.ndarray:
        """Copy rows in; return their slots, int64 [n]."""
        if len(rows) > len(self._free):
            self._grow(len(rows) - len(self._free))
        slots = self._free[len(self._free) - len(rows) :][::-1].copy()
        self._free = self._free[: len(self._free) - len(rows)]
        self._bytes[slots] = rows.view(np.uint8).reshape(len(rows), -1)
        return slots

    def remove_rows(self, slots: np.ndarray) -> None:
        """Free slots of rows that are dropped."""
        self._free = np.concatenate([self._free, slots[::-1]])

    def take_rows(self, slots: np.ndarray) -> np.ndarray:
        """Return a copy of the rows in these slots."""
        taken = np.take(self._bytes, slots, axis=0)
        rows: np.ndarray = taken.view(self._dtype)[:, 0]
        return rows

    def _grow(self, needed: int) -> None:
        old = len(self._bytes)
        # by a half at least: a data set that is imported episode by episode would copy all each time
        new = old + max(needed, old // 2)
        grown = np.empty((new, self._dtype.itemsize), np.uint8)
        grown[:old] = self._bytes
        self._bytes = grown
        self._free = np.concatenate([np.arange(new - 1, old - 1, -1), self._free])
