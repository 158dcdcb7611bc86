"""Write a simulator's observations into a block a message, or into rows of a shared batch."""

import mmap
import os
from typing import Any, Protocol, cast

import numpy as np

from vla_rl.actors.blocks import PlainBlock, new_block
from vla_rl.actors.slots import SharedBlock
from vla_rl.env_workers.batch import NUM_BATCHES
from vla_rl.env_workers.layout import ObservationLayout, Packed


class Packer(Protocol):
    """Converts a checked observation to the form in which it is sent."""

    def pack(self, observation: Any, batch: int = 0) -> Packed:
        """Write the arrays before returning the packed form.

        `batch` is the number of the batch if there are several.
        """
        ...


class BlockPacker:
    """Writes each observation into a block of its own.

    The receiver reads it in place as long as it is referenced.
    """

    def __init__(self, layout: ObservationLayout) -> None:
        self._layout = layout
        self._known: list[tuple[SharedBlock, list[np.ndarray]]] = []
        """Blocks used so far: the same few come again and again."""

    def pack(self, observation: Any, batch: int = 0) -> Packed:
        """Implement `Packer.pack`."""
        block: SharedBlock | PlainBlock
        for known in self._known:
            if known[0].take_again():
                block, places = known
                break
        else:
            block = new_block(self._layout.num_bytes)
            places = self._layout.places(block.array)
            if isinstance(block, SharedBlock):
                self._known.append((block, places))
        # arrives as an array
        return cast(np.ndarray, block), self._layout.write(observation, places)


class RowPacker:
    """Writes all observations into the same rows of a batch.

    Its owner chooses the batch in each request.

    Args:
        path: path of the batch's memory, see `SharedBatch.path`.
        index, num_rows: number of our row, and number of rows.
    """

    def __init__(self, layout: ObservationLayout, path: str, index: int, num_rows: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self._layout = layout
        size = len(self._memory) // NUM_BATCHES
        batches = [
            np.ndarray(size, np.uint8, self._memory, number * size) for number in range(NUM_BATCHES)
        ]
        self._rows = [
            [array[index, ...] for array in layout.places(batch, num_rows)] for batch in batches
        ]

    def pack(self, observation: Any, batch: int = 0) -> Packed:
        """Implement `Packer.pack`."""
        return None, self._layout.write(observation, self._rows[batch])
