"""Weights in memory that engine processes map: written once, read by every engine, gone with this process.

The memory has no name in any folder: engines open it through this process's own descriptors, so that even a kill leaves
nothing behind. Two buffers take turns: while an engine that starts still reads one version, the next can be written.
"""

import mmap
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.errors import CheckpointError

ALIGNMENT: Final = 64


class TensorPlace(msgspec.Struct, frozen=True):
    """Where one tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class StagedWeights(msgspec.Struct, frozen=True):
    """One version in shared memory, as engine processes are told of it."""

    path: str
    num_bytes: int
    version: int
    places: tuple[TensorPlace, ...]


class Stage:
    """The writing side. Its methods are called by one thread at a time.

    Args:
        tensors: like those that will be written; names, shapes and dtypes are the same from then on.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        offset, places = 0, []
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            places.append(TensorPlace(name, dtype, tuple(tensor.shape), offset))
            offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self._places, self._num_bytes = tuple(places), max(offset, 1)
        self._buffers = [_Buffer(self._num_bytes) for _ in range(2)]
        self._turn = 0

    def write(self, tensors: Mapping[str, Tensor], version: int) -> StagedWeights:
        """Copy a version into the buffer that was not written last. Raises: CheckpointError; then nothing was written."""
        self._require_fit(tensors)
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        views = dict(tensors_in(buffer.memory, self._places))
        with torch.no_grad():
            for name, tensor in tensors.items():
                views[name].copy_(tensor)
        return StagedWeights(buffer.path, self._num_bytes, version, self._places)

    def checksum(self) -> int:
        """CRC-32 of the bytes that were written last."""
        return zlib.crc32(self._buffers[self._turn].memory)

    def close(self) -> None:
        """Give the memory back."""
        for buffer in self._buffers:
            buffer.close()

    def _require_fit(self, tensors: Mapping[str, Tensor]) -> None:
        expected = {place.name: place for place in self._places}
        missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
        wrong = [
            f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {expected[name].dtype} {list(expected[name].shape)}"
            for name, tensor in tensors.items()
            if name in expected
            and (tuple(tensor.shape) != expected[name].shape or str(tensor.dtype) != f"torch.{expected[name].dtype}")
        ]
        if missing or unknown or wrong:
            raise CheckpointError(
                f"the weights do not fit the engine, and nothing of them was applied: {len(missing)} missing "
                f"{missing[:4]}, {len(unknown)} unknown {unknown[:4]}, {len(wrong)} of another shape or dtype {wrong[:4]}; "
                "expected every tensor of the policy that the engine was opened with"
            )


class _Buffer:
    def __init__(self, num_bytes: int) -> None:
        self._descriptor = os.memfd_create("vla_rl_weights", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, num_bytes)
        self.memory = mmap.mmap(self._descriptor, num_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        os.close(self._descriptor)


class MappedWeights:
    """The reading side, in an engine process.

    Raises: CheckpointError where the memory cannot be mapped, or is smaller than it should be.
    """

    def __init__(self, staged: StagedWeights) -> None:
        try:
            descriptor = os.open(staged.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"the staged weights at {staged.path} cannot be opened: {error.strerror}") from error
        try:
            size = os.fstat(descriptor).st_size
            if size < staged.num_bytes:
                raise CheckpointError(f"the staged weights have {size} bytes, expected {staged.num_bytes}")
            # private and writable, because torch takes no read-only memory; nobody writes
            self._memory = mmap.mmap(
                descriptor, staged.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
        finally:
            os.close(descriptor)
        self.version, self._places = staged.version, staged.places

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor, as views; they must not be written to."""
        return tensors_in(self._memory, self._places)

    def checksum(self) -> int:
        """CRC-32 of the bytes."""
        return zlib.crc32(self._memory)


def tensors_in(memory: mmap.mmap, places: tuple[TensorPlace, ...]) -> Iterator[tuple[str, Tensor]]:
    """Views of the tensors that lie in a buffer."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    for place in places:
        dtype: torch.dtype = getattr(torch, place.dtype)
        num_bytes = int(np.prod(place.shape, dtype=np.int64)) * dtype.itemsize
        yield place.name, whole[place.offset : place.offset + num_bytes].view(dtype).view(place.shape)
