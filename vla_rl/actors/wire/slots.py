"""Shared-memory slots: one process writes a large array, another reads it in place.

An arena is an anonymous memory file (memfd) that the parent creates, the child inherits: it has
no name, so nothing is left behind whichever process dies first. The first page holds one state byte
for each slot. Only the writer allocates, only the reader gives back, by clearing the byte; so
neither needs a lock or a message. Address space is reserved at once, pages only when they are
touched. A slot is given back when the last view of its array is gone.

A large result is sent without a copy from a block, memory that the receiver reads directly:

    block = new_block(num_bytes)          # inside a method
    block.array[:] = ...
    return block                          # arrives as a uint8 array [num_bytes]

A block serves one message, the next one that this process sends. In a process without shared
memory, or while no slot is free, it is ordinary memory, sent like any array.
"""

import mmap
import os
from typing import Any

import numpy as np

from vla_rl.actors.wire.envelope import MalformedMessage
from vla_rl.util.processes import make_memory_file

_STATE_BYTES = 4096
_SMALLEST_SLOT = 1 << 14
_FREE, _TAKEN = 0, 1


def create_arena(num_bytes: int) -> int:
    """Return the file descriptor of a new arena with room for `num_bytes` of arrays."""
    return make_memory_file("vla_rl-arena", _STATE_BYTES + num_bytes)


class SlotLease(np.ndarray):
    """Protects one slot from being overwritten.

    It is the base of the received array, over the same memory.
    """

    __slots__ = ("_slot", "_states")
    _states: mmap.mmap | None
    _slot: int

    def release(self) -> None:
        """Give the slot back now; a view that is still read shows whatever is written next."""
        states = getattr(self, "_states", None)  # a view of a lease is not a lease
        if states is not None:
            self._states = None
            states[self._slot] = _FREE

    __del__ = release


class SlotArray:
    """Place of an array in the reader's arena, leased with each message that refers to it."""

    __slots__ = ("_array", "_states", "slot")

    def __init__(self, slot: int, array: SlotLease, states: mmap.mmap) -> None:
        self.slot, self._array, self._states = slot, array, states

    def lease_array(self) -> np.ndarray:
        """Return the array, read-only and in place.

        The slot is given back when its last view is gone.
        """
        # A view keeps the type and the shape that were parsed once for this slot.
        lease = self._array.view()
        lease._slot, lease._states = self.slot, self._states
        return lease.view(np.ndarray)


def release(array: np.ndarray) -> bool:
    """Give back the slot under a received array before its last view is gone.

    Return False if it has none.

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
    """One slot as plain memory, to be written before its message is sent.

    The same object each time the slot is taken.
    """

    __slots__ = ("_states", "array", "offset", "slot")
    is_shared = True

    def __init__(self, slot: int, offset: int, memory: mmap.mmap, num_bytes: int) -> None:
        self.slot, self.offset, self._states = slot, offset, memory
        self.array: np.ndarray = np.ndarray(num_bytes, np.uint8, memory, offset)

    def retake(self) -> bool:
        """Take the slot for another message; return False if it is not free."""
        if self._states[self.slot] != _FREE:
            return False
        self._states[self.slot] = _TAKEN
        return True


class SlotWriter:
    """The writing end of an arena.

    Slot sizes are powers of two; a slot is used again for arrays of its size.
    """

    def __init__(self, fd: int) -> None:
        self._size = os.fstat(fd).st_size
        # its first bytes are the states: the cheapest access to one of them
        self._memory = mmap.mmap(fd, self._size)
        self._offsets: list[int] = []
        self._by_size: dict[int, list[int]] = {}
        self._blocks: dict[int, SharedBlock] = {}
        self._end = _STATE_BYTES

    def write_array(self, array: np.ndarray) -> tuple[int, int] | None:
        """Copy `array` in C order into a free slot.

        Return `(slot, offset)`, or None if no slot is free.
        """
        slot = self._take(array.nbytes)
        if slot is None:
            return None
        offset = self._offsets[slot]
        np.ndarray(array.shape, array.dtype, self._memory, offset)[...] = array
        return slot, offset

    def take_block(self, num_bytes: int) -> SharedBlock | None:
        """Return a free slot as memory to write to, or None.

        If it is not sent, give it back with `give_back`.
        """
        slot = self._take(num_bytes)
        if slot is None:
            return None
        # The same objects again: weights of the same sizes are sent over and over.
        block = self._blocks.get(slot)
        if block is None or len(block.array) != num_bytes:
            block = self._blocks[slot] = SharedBlock(
                slot, self._offsets[slot], self._memory, num_bytes
            )
        return block

    def give_back(self, slot: int) -> None:
        """Free a slot whose message was never sent."""
        self._memory[slot] = _FREE

    @property
    def num_taken(self) -> int:
        """Number of slots that are being read or sent."""
        return self._memory[: len(self._offsets)].count(_TAKEN)

    def _take(self, num_bytes: int) -> int | None:
        """Return the first free slot of that size.

        Little memory then stays in use, and it stays in the caches.
        """
        size = max(_SMALLEST_SLOT, 1 << (num_bytes - 1).bit_length())
        states = self._memory
        same_size = self._by_size.get(size)
        if same_size is None:
            same_size = self._by_size[size] = []
        for slot in same_size:
            if states[slot] == _FREE:
                states[slot] = _TAKEN
                return slot
        # no lock: this end alone takes slots, and the other end alone frees what was sent, a byte each
        if self._end + size > self._size or len(self._offsets) == _STATE_BYTES:
            return None
        slot = len(self._offsets)
        self._offsets.append(self._end)
        self._end += size
        same_size.append(slot)
        states[slot] = _TAKEN
        return slot


class SlotReader:
    """The reading end of an arena: it may write only the states."""

    def __init__(self, fd: int) -> None:
        self._size = os.fstat(fd).st_size
        self._states = mmap.mmap(fd, _STATE_BYTES)
        # A reader that writes by mistake gets an error here, and not the writer a wrong number there.
        self._memory = mmap.mmap(fd, self._size, prot=mmap.PROT_READ)

    def find_array(
        self, slot: int, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], num_bytes: int
    ) -> SlotArray:
        """Return such an array in the arena.

        Raises: MalformedMessage if it would be outside the arena.
        """
        # The numbers come from another process: an array outside would read, or end, our own.
        if not (
            0 <= slot < _STATE_BYTES and _STATE_BYTES <= offset <= offset + num_bytes <= self._size
        ):
            raise MalformedMessage(
                f"slot {slot} at {offset} with {num_bytes} bytes is outside the shared memory."
            )
        return SlotArray(slot, SlotLease(shape, dtype, self._memory, offset), self._states)


_block_writers: list[SlotWriter] = []


class PlainBlock:
    """A block in ordinary memory of this process."""

    is_shared = False

    def __init__(self, num_bytes: int) -> None:
        self.array = np.empty(num_bytes, np.uint8)


def new_block(num_bytes: int) -> SharedBlock | PlainBlock:
    """Return a block whose `array` (uint8 [num_bytes], not cleared) is to be filled and sent."""
    if _block_writers and num_bytes > 0:
        block = _block_writers[0].take_block(num_bytes)
        if block is not None:
            return block
    return PlainBlock(num_bytes)


def set_block_writer(writer: SlotWriter) -> None:
    """Allocate the blocks of this process in the slots of its one connection."""
    _block_writers[:] = [writer]
