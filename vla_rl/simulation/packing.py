"""Where a simulator writes its observations: into a block for each message, or into its rows of a batch that is shared."""

import mmap
import os
from typing import Any, Protocol, cast

import numpy as np

from vla_rl.actors.blocks import new_block
from vla_rl.simulation.layout import ObservationLayout, Packed


class Packer(Protocol):
    """Makes what travels of an observation that was checked."""

    def pack(self, observation: Any) -> Packed:
        """The arrays are written before this returns."""
        ...


class BlockPacker:
    """Each observation in a block of its own, read in place for as long as somebody refers to it."""

    def __init__(self, layout: ObservationLayout) -> None:
        self._layout = layout
        self._places: dict[object, list[np.ndarray]] = {}

    def pack(self, observation: Any) -> Packed:
        """See `Packer`."""
        block = new_block(self._layout.num_bytes)
        places = self._places.get(block)
        if places is None:
            places = self._layout.places(block.array)
            if block.is_shared:  # the same few come again and again
                self._places[block] = places
        others = self._layout.write(observation, places)
        return cast(np.ndarray, block), others  # arrives as an array


class RowPacker:
    """All observations in the same rows of a batch, whose owner reads them before it asks for the next ones.

    Args:
        path: of the batch's memory, as `SharedBatch.path` says.
        index, num_rows: our rows, and how many there are.
    """

    def __init__(self, layout: ObservationLayout, path: str, index: int, num_rows: int) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self._layout = layout
        self._rows = [array[index, ...] for array in layout.places(self._memory, num_rows)]

    def pack(self, observation: Any) -> Packed:
        """See `Packer`."""
        return None, self._layout.write(observation, self._rows)
