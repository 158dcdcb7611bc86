"""Memory that engine processes open, on the host or on a GPU, and its description.

HostBuffer ─► HostMemory ─┐                    a path to our file descriptor; no named file is needed
                          ├─ msgpack ─► opened ─► uint8 [num_bytes]
GpuBuffer  ─► GpuMemory  ─┘                    a CUDA IPC handle: plain bytes, and the GPU that they are for
"""

import mmap
import os
import weakref
from functools import lru_cache
from typing import Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from vla_rl.errors import CheckpointError
from vla_rl.util.shared_memory import memory_file


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
        descriptor = memory_file("vla_rl_weights", num_bytes)
        # by path, not by a descriptor sent along: vLLM starts its processes itself, and its RPC takes
        # bytes only
        self._memory = HostMemory(f"/proc/{os.getpid()}/fd/{descriptor}", num_bytes)
        self._release = weakref.finalize(self, os.close, descriptor)
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


def opened(memory: WeightMemory) -> Tensor:
    """Open memory and return its bytes, uint8 [num_bytes], which must not be written to.

    Raises: CheckpointError if the memory cannot be opened, or is smaller than expected.
    """
    return _opened_on_host(memory) if isinstance(memory, HostMemory) else _opened_on_gpu(memory)


def _opened_on_host(memory: HostMemory) -> Tensor:
    try:
        descriptor = os.open(memory.path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(
            f"the staged weights at {memory.path} cannot be opened: {error.strerror}"
        ) from error
    try:
        size = os.fstat(descriptor).st_size
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
def _opened_on_gpu(memory: GpuMemory) -> Tensor:
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
    place = (found[memory.gpu], memory.handle, memory.storage_bytes, memory.storage_offset)
    counted = (memory.counter, memory.counter_offset, memory.event, memory.has_event)
    try:
        whole: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            Tensor,
            (memory.num_bytes,),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            *place,
            False,
            *counted,
        )
    except RuntimeError as error:
        raise CheckpointError(
            f"the staged weights on GPU {memory.gpu} cannot be opened ({error}); set "
            "weights_through to 'host'"
        ) from error
    return whole
