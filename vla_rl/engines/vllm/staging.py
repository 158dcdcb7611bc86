"""Weights in memory that engine processes open: written once, read by every engine.

There are two buffers: the next version can be written while a starting engine still reads the
current one.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.engines.shared_places import SharedPlaces, places_of_trained
from vla_rl.engines.vllm.config import WeightRoute
from vla_rl.engines.vllm.weight_memory import (
    Buffer,
    GpuBuffer,
    HostBuffer,
    HostMemory,
    WeightMemory,
    opened,
)
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.util.dtypes import torch_dtype

# any dtype may be viewed at such an offset, and no two tensors share a cache line
ALIGNMENT: Final = 64


class TensorPlace(msgspec.Struct, frozen=True):
    """Position of one tensor in a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class StagedWeights(msgspec.Struct, frozen=True):
    """One version of the weights, as described to engine processes."""

    memory: WeightMemory
    version: int
    places: tuple[TensorPlace, ...]


class Stage:
    """The writing side. Call its methods from one thread at a time.

    Args:
        tensors: examples of the tensors to be written, which keep their names, shapes, dtypes and
            device.
        route: memory that they are written to.

    Raises: ConfigError if the route is `gpu` and the tensors are not on a GPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor], route: WeightRoute = "auto") -> None:
        offset, places = 0, []
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            places.append(TensorPlace(name, dtype, tuple(tensor.shape), offset))
            offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self._places = tuple(places)
        make = _buffers_of(tensors, route)
        self._buffers = [make(max(offset, 1)) for _ in range(2)]
        self._written: list[StagedWeights | None] = [None, None]
        self._last = 0

    def write(
        self, tensors: Mapping[str, Tensor], version: int, current: StagedWeights | None = None
    ) -> StagedWeights:
        """Copy a version into the buffer that does not hold `current`.

        Raises: CheckpointError; then nothing was written.
        """
        return self._write(tensors, frozenset(), version, current)

    def share(
        self,
        network: nn.Module,
        tensors: Mapping[str, Tensor],
        version: int,
        current: StagedWeights | None,
    ) -> tuple[StagedWeights, SharedPlaces] | None:
        """Do the same as `write`, but leave the trained parameters of `network` to other processes.

        Return also where they write them; None if they cannot. Raises: CheckpointError.
        """
        offsets = {place.name: place.offset for place in self._places}
        begins = places_of_trained(network, tensors, offsets)
        if begins is None or not isinstance(self._buffers[0], HostBuffer):
            return None
        others = frozenset(offset for found in begins.values() for offset in found)
        staged = self._write(tensors, others, version, current)
        assert isinstance(staged.memory, HostMemory)
        return staged, SharedPlaces(staged.memory.path, begins)

    def _write(
        self,
        tensors: Mapping[str, Tensor],
        left_out: frozenset[int],
        version: int,
        current: StagedWeights | None,
    ) -> StagedWeights:
        """Copy a version, but for the tensors at some offsets."""
        self._require_fit(tensors)
        # an engine that starts at this moment may still be reading `current`
        self._last = 1 if self._written[0] is current else 0
        buffer = self._buffers[self._last]
        views = dict(tensors_of(buffer.whole, self._places))
        with torch.no_grad():
            for place in self._places:
                if place.offset not in left_out:
                    views[place.name].copy_(tensors[place.name])
        staged = self._written[self._last] = StagedWeights(buffer.shared(), version, self._places)
        return staged

    def checksum(self) -> int:
        """Return the CRC-32 of the bytes that were written last."""
        return checksum_of(self._buffers[self._last].whole)

    def close(self) -> None:
        """Free the memory."""
        for buffer in self._buffers:
            buffer.close()

    def _require_fit(self, tensors: Mapping[str, Tensor]) -> None:
        expected = {place.name: place for place in self._places}
        missing, unknown = (
            sorted(expected.keys() - tensors.keys()),
            sorted(tensors.keys() - expected.keys()),
        )
        wrong = [
            f"{name} is {tensor.dtype} {list(tensor.shape)}, expected {expected[name].dtype} "
            f"{list(expected[name].shape)}"
            for name, tensor in tensors.items()
            if name in expected
            and (
                tuple(tensor.shape) != expected[name].shape
                or str(tensor.dtype) != f"torch.{expected[name].dtype}"
            )
        ]
        if missing or unknown or wrong:
            raise CheckpointError(
                f"the weights do not fit the engine, and none was applied: {len(missing)} missing "
                f"{missing[:4]}, {len(unknown)} unknown {unknown[:4]}, {len(wrong)} of another "
                f"shape or dtype {wrong[:4]}; expected every tensor of the policy that the engine "
                "was opened with"
            )


def _buffers_of(tensors: Mapping[str, Tensor], route: WeightRoute) -> Callable[[int], Buffer]:
    """Return a function that makes a buffer of a given number of bytes."""
    devices = {tensor.device for tensor in tensors.values()}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    if device.type == "cuda" and route != "host":
        return lambda num_bytes: GpuBuffer(num_bytes, device)
    if route == "gpu":
        raise ConfigError(
            "VllmConfig.weights_through is 'gpu', but the learner's weights are on "
            f"{device.type}; expected 'host' or 'auto'"
        )
    return HostBuffer


class MappedWeights:
    """The reading side, in an engine process.

    Raises: CheckpointError if the memory cannot be opened, or is smaller than expected.
    """

    def __init__(self, staged: StagedWeights) -> None:
        self._whole = opened(staged.memory)
        self.version, self._places = staged.version, staged.places

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor; the tensors are views and must not be written to."""
        return tensors_of(self._whole, self._places)

    def checksum(self) -> int:
        """Return the CRC-32 of the bytes."""
        return checksum_of(self._whole)


def checksum_of(whole: Tensor) -> int:
    """Return the CRC-32 of the bytes of a uint8 [N]."""
    return zlib.crc32(whole.cpu().numpy().data)


def tensors_of(whole: Tensor, places: tuple[TensorPlace, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and view of each tensor in a buffer, uint8 [N]."""
    for place in places:
        dtype = torch_dtype(place.dtype)
        num_bytes = int(np.prod(place.shape, dtype=np.int64)) * dtype.itemsize
        yield (
            place.name,
            whole[place.offset : place.offset + num_bytes].view(dtype).view(place.shape),
        )
