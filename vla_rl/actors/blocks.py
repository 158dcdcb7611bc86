"""Memory that the receiver reads directly: a large result is sent without a copy.

    block = new_block(num_bytes)          # inside a method
    block.array[:] = ...
    return block                          # arrives as a uint8 array [num_bytes]

A block serves one message, the next one that this process sends. In a process without shared
memory, or while no slot is free, it is ordinary memory and is sent like any array.
"""

import numpy as np

from vla_rl.actors.slots import SharedBlock, SlotWriter

_writers: list[SlotWriter] = []


class PlainBlock:
    """A block in ordinary memory of this process."""

    is_shared = False

    def __init__(self, num_bytes: int) -> None:
        self.array = np.empty(num_bytes, np.uint8)


def new_block(num_bytes: int) -> SharedBlock | PlainBlock:
    """Return a block whose `array` (uint8 [num_bytes], not cleared) is to be filled and sent."""
    if _writers and num_bytes > 0:
        block = _writers[0].take_block(num_bytes)
        if block is not None:
            return block
    return PlainBlock(num_bytes)


def use_for_blocks(writer: SlotWriter) -> None:
    """Allocate the blocks of this process in the slots of its one connection."""
    _writers[:] = [writer]
