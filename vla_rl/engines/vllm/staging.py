"""Weights in memory that engine processes open: written once, read by every engine.

    HostBuffer ─► HostMemory ─┐                         a path to our file descriptor; no named file is needed
                              ├─ msgpack ─► open_memory ─► uint8 [num_bytes]
    GpuBuffer  ─► GpuMemory  ─┘                         a CUDA IPC handle: plain bytes, and the GPU that they are for

There are two buffers: the next version can be written while a starting engine still reads the
current one.
"""

import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Final, Protocol, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from vla_rl.engines.config import WeightRoute
from vla_rl.engines.weight_shards import SharedParameters, find_trained_offsets
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.util.arrays import torch_dtype
from vla_rl.util.processes import make_memory_file


class HostMemory(msgspec.Struct, frozen=True, tag="host"):
    """Memory behind a file descriptor of another process."""

    path: str
    num_bytes: int


class GpuMemory(msgspec.Struct, frozen=True, tag="gpu"):
    """Memory that another process allocated on a GPU.

    `gpu` is the GPU's UUID; CUDA and torch need the rest to open the memory.
    """

    gpu: str
    num_bytes: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    has_event: bool


WeightMemory: TypeAlias = HostMemory | GpuMemory


class Buffer(Protocol):
    """Memory of this process that other processes may open.

    Attributes:
        whole: all of it, uint8 [num_bytes].
    """

    whole: Tensor

    def shared(self) -> WeightMemory:
        """Return the description to open it with, after all earlier writes have finished."""
        ...

    def close(self) -> None:
        """Free the memory."""
        ...


class HostBuffer:
    """Memory of the host, freed with this process: a kill leaves nothing behind. See `Buffer`."""

    def __init__(self, num_bytes: int) -> None:
        descriptor = make_memory_file("vla_rl_weights", num_bytes)
        # by path, not by a descriptor sent along: vLLM starts its processes itself, and its RPC takes
        # bytes only
        self._memory = HostMemory(f"/proc/{os.getpid()}/fd/{descriptor}", num_bytes)
        self._release = weakref.finalize(self, os.close, descriptor)
        # Mapped once and kept: engines map the same pages, and no byte is copied on its way.
        self.whole = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    def shared(self) -> HostMemory:
        """Return the path to the file descriptor."""
        return self._memory

    def close(self) -> None:
        """Close the descriptor."""
        self._release()


class GpuBuffer:
    """Memory of a GPU, which engines on the same host open through CUDA IPC. See `Buffer`.

    torch counts the processes that have opened it in a small file of shared memory; a killed
    learner can leave that file behind.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.whole = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        _, args = reduce_tensor(self.whole)  # type: ignore[no-untyped-call]
        (
            _,
            _,
            _,
            _,
            _,
            _,
            _,
            handle,
            storage_bytes,
            offset,
            _,
            counter,
            counter_offset,
            event,
            has_event,
        ) = args
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        self._memory = GpuMemory(
            gpu, num_bytes, handle, storage_bytes, offset, counter, counter_offset, event, has_event
        )

    def shared(self) -> GpuMemory:
        """Return its handle, the same each time."""
        torch.cuda.synchronize(self.whole.device)
        return self._memory

    def close(self) -> None:
        """Free the memory, whether or not killed engines had released it."""
        if len(self.whole):
            memory = self._memory
            torch.UntypedStorage._release_ipc_counter_cuda(memory.counter, memory.counter_offset)
            self.whole = self.whole.new_empty(0)


def open_memory(memory: WeightMemory) -> Tensor:
    """Open memory and return its bytes, uint8 [num_bytes], which must not be written to.

    Raises: CheckpointError if the memory cannot be opened, or is smaller than expected.
    """
    return _open_on_host(memory) if isinstance(memory, HostMemory) else _open_on_gpu(memory)


def _open_on_host(memory: HostMemory) -> Tensor:
    try:
        descriptor = os.open(memory.path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(
            f"the staged weights at {memory.path} cannot be opened: {error.strerror}"
        ) from error
    try:
        size = os.fstat(descriptor).st_size
        # A read past the end of the file would end the engine with SIGBUS.
        if size < memory.num_bytes:
            raise CheckpointError(
                f"the staged weights have {size} bytes, expected {memory.num_bytes}"
            )
        # private and writable, because torch does not accept read-only memory; it is never written
        # to
        mapped = mmap.mmap(
            descriptor,
            memory.num_bytes,
            flags=mmap.MAP_PRIVATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8)


@lru_cache(maxsize=2)  # one entry for each of the sender's two buffers
def _open_on_gpu(memory: GpuMemory) -> Tensor:
    found = {
        str(torch.cuda.get_device_properties(index).uuid): index
        for index in range(torch.cuda.device_count())
    }
    if memory.gpu not in found:
        raise CheckpointError(
            f"the staged weights lie on GPU {memory.gpu}, expected one that this engine sees "
            f"({', '.join(found) or 'none'});"
            " set weights_through to 'host', or make that GPU visible to it"
        )
    location = (found[memory.gpu], memory.handle, memory.storage_bytes, memory.storage_offset)
    counted = (memory.counter, memory.counter_offset, memory.event, memory.has_event)
    try:
        whole: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            Tensor,
            (memory.num_bytes,),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            *location,
            False,
            *counted,
        )
    except RuntimeError as error:
        raise CheckpointError(
            f"the staged weights on GPU {memory.gpu} cannot be opened ({error}); set "
            "weights_through to 'host'"
        ) from error
    return whole


# any dtype may be viewed at such an offset, and no two tensors share a cache line
ALIGNMENT: Final = 64


class TensorOffset(msgspec.Struct, frozen=True):
    """Position of one tensor in a buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class StagedWeights(msgspec.Struct, frozen=True):
    """One version of the weights, as described to engine processes.

    Example:
        StagedWeights(HostMemory("/proc/4711/fd/23", 17_825_792), version=7,
                      places=(TensorOffset("lm_head.weight", "float32", (32_064, 64), 0), ...))
    """

    memory: WeightMemory
    version: int
    offsets: tuple[TensorOffset, ...]


class Stage:
    """The writing side. Call its methods from one thread at a time.

    Args:
        tensors: examples of the tensors to be written, which keep their names, shapes, dtypes and
            device.
        route: memory that they are written to.

    Raises: ConfigError if the route is `gpu` and the tensors are not on a GPU.
    """

    def __init__(self, tensors: Mapping[str, Tensor], route: WeightRoute = "auto") -> None:
        offset, offsets = 0, []
        for name, tensor in tensors.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            offsets.append(TensorOffset(name, dtype, tuple(tensor.shape), offset))
            offset += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
        self._offsets = tuple(offsets)
        make = _choose_buffer(tensors, route)
        self._buffers = [make(max(offset, 1)) for _ in range(2)]
        self._written: list[StagedWeights | None] = [None, None]
        self._last = 0

    def write_version(
        self, tensors: Mapping[str, Tensor], version: int, current: StagedWeights | None = None
    ) -> StagedWeights:
        """Copy a version into the buffer that does not hold `current`.

        Raises: CheckpointError; then nothing was written.
        """
        return self._write(tensors, frozenset(), version, current)

    def write_shared(
        self,
        network: nn.Module,
        tensors: Mapping[str, Tensor],
        version: int,
        current: StagedWeights | None,
    ) -> tuple[StagedWeights, SharedParameters] | None:
        """Do the same as `write_version`, but leave the trained parameters of `network` to other processes.

        Return also where they write them; None if they cannot. Raises: CheckpointError.
        """
        offsets = {location.name: location.offset for location in self._offsets}
        begins = find_trained_offsets(network, tensors, offsets)
        if begins is None or not isinstance(self._buffers[0], HostBuffer):
            return None
        others = frozenset(offset for found in begins.values() for offset in found)
        staged = self._write(tensors, others, version, current)
        assert isinstance(staged.memory, HostMemory)
        return staged, SharedParameters(staged.memory.path, begins)

    def _write(
        self,
        tensors: Mapping[str, Tensor],
        left_out: frozenset[int],
        version: int,
        current: StagedWeights | None,
    ) -> StagedWeights:
        """Copy a version, but for the tensors at some offsets."""
        # Before the first byte: a version that was half written could no longer be refused.
        self._require_fit(tensors)
        # an engine that starts at this moment may still be reading `current`
        self._last = 1 if self._written[0] is current else 0
        buffer = self._buffers[self._last]
        views = dict(view_tensors(buffer.whole, self._offsets))
        with torch.no_grad():
            for location in self._offsets:
                if location.offset not in left_out:
                    views[location.name].copy_(tensors[location.name])
        staged = self._written[self._last] = StagedWeights(buffer.shared(), version, self._offsets)
        return staged

    def checksum(self) -> int:
        """Return the CRC-32 of the bytes that were written last."""
        return compute_checksum(self._buffers[self._last].whole)

    def free_buffers(self) -> None:
        """Free the memory."""
        for buffer in self._buffers:
            buffer.close()

    def _require_fit(self, tensors: Mapping[str, Tensor]) -> None:
        expected = {location.name: location for location in self._offsets}
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


def _choose_buffer(tensors: Mapping[str, Tensor], route: WeightRoute) -> Callable[[int], Buffer]:
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
        self._whole = open_memory(staged.memory)
        self.version, self._offsets = staged.version, staged.offsets

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor; the tensors are views and must not be written to."""
        return view_tensors(self._whole, self._offsets)

    def checksum(self) -> int:
        """Return the CRC-32 of the bytes."""
        return compute_checksum(self._whole)


def compute_checksum(whole: Tensor) -> int:
    """Return the CRC-32 of the bytes of a uint8 [N]."""
    return zlib.crc32(whole.cpu().numpy().data)


def view_tensors(whole: Tensor, offsets: tuple[TensorOffset, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield name and view of each tensor in a buffer, uint8 [N]."""
    for location in offsets:
        dtype = torch_dtype(location.dtype)
        num_bytes = int(np.prod(location.shape, dtype=np.int64)) * dtype.itemsize
        yield (
            location.name,
            whole[location.offset : location.offset + num_bytes].view(dtype).view(location.shape),
        )
