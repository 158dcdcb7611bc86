"""Shared-memory slots: large arrays are written once by one process and read in place by one other.

An arena is an anonymous memory file (memfd) that the parent creates and the child inherits: it has no name, so nothing can
be left behind whoever dies first. The first page holds one state byte for each slot; the writer alone allocates, the
reader alone gives back by clearing the byte, so neither needs a lock or a message. Address space is reserved at once,
pages only as they are touched. A slot is given back when the last view of its array is gone.
"""

import mmap
import os
from typing import Any

import numpy as np

from vla_rl.actors.wire import MalformedMessage

_STATE_BYTES = 4096
_SMALLEST_SLOT = 1 << 14
_FREE, _TAKEN = 0, 1


def create_arena(num_bytes: int) -> int:
    """File descriptor of a new arena with room for `num_bytes` of arrays."""
    fd = os.memfd_create("vla_rl-arena", os.MFD_CLOEXEC)
    os.ftruncate(fd, _STATE_BYTES + num_bytes)
    return fd


class _Arena:
    """One mapping, shared by its owner and by every lease on it; unmapped when the last of them is gone."""

    def __init__(self, fd: int) -> None:
        self.size = os.fstat(fd).st_size
        self.memory = mmap.mmap(fd, self.size)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.states = self.memory  # item access on an mmap is the cheapest way to one byte
        self.address: int = self.bytes.ctypes.data


class SlotLease:
    """Keeps one slot from being written again; NumPy holds it as the base of the array that was received."""

    __slots__ = ("__array_interface__", "_arena", "_slot")

    def __init__(self, arena: _Arena, slot: int, interface: dict[str, Any]) -> None:
        self._arena: _Arena | None = arena
        self._slot = slot
        self.__array_interface__ = interface

    def release(self) -> None:
        """Give the slot back now; whoever still reads the array sees whatever is written next."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.states[self._slot] = _FREE

    def __del__(self) -> None:
        self.release()


def release(array: np.ndarray) -> bool:
    """Give back the slot under a received array before its last view is gone; False where it has none.

    The array must not be read afterwards. Rarely needed: dropping the array does the same.
    """
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if not isinstance(base, SlotLease):
        return False
    base.release()
    return True


class SlotWriter:
    """The writing end of an arena. Slots grow in powers of two and are used again for arrays of like size."""

    def __init__(self, fd: int) -> None:
        self._arena = _Arena(fd)
        self._slots: list[tuple[int, int]] = []
        self._by_size: dict[int, list[int]] = {}
        self._end = _STATE_BYTES

    def write(self, array: np.ndarray) -> tuple[int, int] | None:
        """Copy a C-ordered image of `array` into a free slot: `(slot, offset)`; None where no slot is free."""
        slot = self._take(array.nbytes)
        if slot is None:
            return None
        offset = self._slots[slot][0]
        region = self._arena.bytes[offset : offset + array.nbytes]
        np.copyto(region.view(array.dtype).reshape(array.shape), array)
        return slot, offset

    def give_back(self, slot: int) -> None:
        """Free a slot whose message was never sent."""
        self._arena.states[slot] = _FREE

    @property
    def num_taken(self) -> int:
        """Slots that are being read, or on their way."""
        states = self._arena.states
        return sum(states[slot] == _TAKEN for slot in range(len(self._slots)))

    def _take(self, num_bytes: int) -> int | None:
        size = max(_SMALLEST_SLOT, 1 << (num_bytes - 1).bit_length())
        states = self._arena.states
        same_size = self._by_size.setdefault(size, [])
        for position, slot in enumerate(same_size):
            if states[slot] == _FREE:
                states[slot] = _TAKEN
                if position:  # the next search begins behind this one
                    same_size.append(same_size.pop(position))
                return slot
        if self._end + size > self._arena.size or len(self._slots) == _STATE_BYTES:
            return None
        slot = len(self._slots)
        self._slots.append((self._end, size))
        self._end += size
        same_size.append(slot)
        states[slot] = _TAKEN
        return slot


class SlotReader:
    """The reading end of an arena."""

    def __init__(self, fd: int) -> None:
        self._arena = _Arena(fd)

    def read(self, slot: int, offset: int, dtype: str, shape: tuple[int, ...], num_bytes: int) -> np.ndarray:
        """A read-only array in place. Raises: MalformedMessage where it would lie outside the arena."""
        if not (0 <= slot < _STATE_BYTES and _STATE_BYTES <= offset <= offset + num_bytes <= self._arena.size):
            raise MalformedMessage(f"slot {slot} at {offset} with {num_bytes} bytes is outside the shared memory.")
        interface = {
            "shape": shape,
            "typestr": dtype,
            "data": (self._arena.address + offset, True),
            "version": 3,
        }
        return np.asarray(SlotLease(self._arena, slot, interface))
