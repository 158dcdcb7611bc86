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


class SlotLease(np.ndarray):
    """Keeps one slot from being written again: the base of the array that was received, and over the same memory."""

    __slots__ = ("_slot", "_states")
    _states: mmap.mmap | None
    _slot: int

    def release(self) -> None:
        """Give the slot back now; whoever still reads the array sees whatever is written next."""
        states = getattr(self, "_states", None)  # a view of a lease is none
        if states is not None:
            self._states = None
            states[self._slot] = _FREE

    __del__ = release


class SlotPlace:
    """Where an array lies in an arena that is read: made once, leased with each message that speaks of it."""

    __slots__ = ("_array", "_states", "slot")

    def __init__(self, slot: int, array: SlotLease, states: mmap.mmap) -> None:
        self.slot, self._array, self._states = slot, array, states

    def lease(self) -> np.ndarray:
        """The array, read-only and in place; the slot is given back when its last view is gone."""
        lease = self._array.view()
        lease._slot, lease._states = self.slot, self._states
        return lease.view(np.ndarray)


def release(array: np.ndarray) -> bool:
    """Give back the slot under a received array before its last view is gone; False where it has none.

    The array must not be read afterwards. Rarely needed: dropping the array does the same.
    """
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base, SlotLease):
        base = base.base
    if not isinstance(base, SlotLease):
        return False
    base.release()
    return True


class SharedBlock:
    """One slot as plain memory, to be written before its message is sent. The same object each time the slot is taken."""

    __slots__ = ("_states", "array", "offset", "slot")
    is_shared = True

    def __init__(self, slot: int, offset: int, memory: mmap.mmap, num_bytes: int) -> None:
        self.slot, self.offset, self._states = slot, offset, memory
        self.array: np.ndarray = np.ndarray(num_bytes, np.uint8, memory, offset)

    def take_again(self) -> bool:
        """Take the slot for another message, where it is free."""
        if self._states[self.slot] != _FREE:
            return False
        self._states[self.slot] = _TAKEN
        return True


class SlotWriter:
    """The writing end of an arena. Slots grow in powers of two and are used again for arrays of like size."""

    def __init__(self, fd: int) -> None:
        self._size = os.fstat(fd).st_size
        self._memory = mmap.mmap(fd, self._size)  # its first bytes are the states: the cheapest way to one of them
        self._offsets: list[int] = []
        self._by_size: dict[int, list[int]] = {}
        self._blocks: dict[int, SharedBlock] = {}
        self._end = _STATE_BYTES

    def write(self, array: np.ndarray) -> tuple[int, int] | None:
        """Copy a C-ordered image of `array` into a free slot: `(slot, offset)`; None where no slot is free."""
        slot = self._take(array.nbytes)
        if slot is None:
            return None
        offset = self._offsets[slot]
        np.ndarray(array.shape, array.dtype, self._memory, offset)[...] = array
        return slot, offset

    def take_block(self, num_bytes: int) -> SharedBlock | None:
        """A free slot as memory to be written; None where no slot is free. Whoever does not send it gives it back."""
        slot = self._take(num_bytes)
        if slot is None:
            return None
        block = self._blocks.get(slot)
        if block is None or len(block.array) != num_bytes:
            block = self._blocks[slot] = SharedBlock(slot, self._offsets[slot], self._memory, num_bytes)
        return block

    def give_back(self, slot: int) -> None:
        """Free a slot whose message was never sent."""
        self._memory[slot] = _FREE

    @property
    def num_taken(self) -> int:
        """Slots that are being read, or on their way."""
        return self._memory[: len(self._offsets)].count(_TAKEN)

    def _take(self, num_bytes: int) -> int | None:
        """The first free slot of that size, so that as little memory as possible stays in use, and in the caches."""
        size = max(_SMALLEST_SLOT, 1 << (num_bytes - 1).bit_length())
        states = self._memory
        same_size = self._by_size.get(size)
        if same_size is None:
            same_size = self._by_size[size] = []
        for slot in same_size:
            if states[slot] == _FREE:
                states[slot] = _TAKEN
                return slot
        if self._end + size > self._size or len(self._offsets) == _STATE_BYTES:
            return None
        slot = len(self._offsets)
        self._offsets.append(self._end)
        self._end += size
        same_size.append(slot)
        states[slot] = _TAKEN
        return slot


class SlotReader:
    """The reading end of an arena: it may write the states, and nothing else."""

    def __init__(self, fd: int) -> None:
        self._size = os.fstat(fd).st_size
        self._states = mmap.mmap(fd, _STATE_BYTES)
        self._memory = mmap.mmap(fd, self._size, prot=mmap.PROT_READ)

    def place(self, slot: int, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], num_bytes: int) -> SlotPlace:
        """Where such an array lies. Raises: MalformedMessage where that would be outside the arena."""
        if not (0 <= slot < _STATE_BYTES and _STATE_BYTES <= offset <= offset + num_bytes <= self._size):
            raise MalformedMessage(f"slot {slot} at {offset} with {num_bytes} bytes is outside the shared memory.")
        return SlotPlace(slot, SlotLease(shape, dtype, self._memory, offset), self._states)
