"""Arrays of observations that lie in memory of another process, and what stands for them.

    observation["image"]   np.ndarray      it is here
                           ShelvedArray    it is beside the process that will read it

A process of the same host reads one by its path. The memory ends with the process that holds it.
"""

import math
import os
from typing import Final

import msgspec
import numpy as np

from vla_rl.util.arrays import parse_dtype

KEY_BYTES: Final = 8
"""Bytes at the beginning of each memory, which say whose arrays it has."""


class ShelvedArray(msgspec.Struct, frozen=True, array_like=True):
    """An array in memory of another process; in an observation it stands for that array."""

    host: str
    """Name of the host that has it; empty for the one that controls the run."""

    path: str
    """Path of the memory there."""

    key: int
    """Key of the memory. A path is used again after its memory was dropped."""

    start: int
    """Place of its first byte."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * parse_dtype(self.dtype).itemsize

    def read(self) -> np.ndarray:
        """Copy the array, on its host. Raises: OSError if the memory is gone."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"the pictures at {self.path} are gone: the process that held them has ended, or has "
                "dropped them"
            ) from None
        try:
            key, num_read = int.from_bytes(os.pread(descriptor, KEY_BYTES, 0), "little"), 0
            # looked up before any memory is taken: the size is what another process has said
            if self.start + self.num_bytes <= os.fstat(descriptor).st_size:
                array = np.empty(self.shape, parse_dtype(self.dtype))
                content = array.reshape(-1).view(np.uint8).data
                num_read = os.preadv(descriptor, [content], self.start)
        finally:
            os.close(descriptor)
        if key != self.key or num_read != self.num_bytes:
            raise OSError(
                f"{self.path} has {num_read} bytes of {key} at {self.start}, expected "
                f"{self.num_bytes} of {self.key}: the process that held them has dropped them"
            )
        return array


class Shelved(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a trajectory's large observations on the host whose ranks will read them."""

    host: str
    """Name of the host, as in `ShelvedArray`."""

    key: int
    num_bytes: int
