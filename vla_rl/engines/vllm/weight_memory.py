"""Memory that engine processes open, and how they are told of it: the host's, or that of a GPU.

HostBuffer ─► HostMemory ─┐                    a path to a descriptor of ours, which needs no name in any folder
                          ├─ msgpack ─► opened ─► uint8 [num_bytes]
GpuBuffer  ─► GpuMemory  ─┘                    a CUDA IPC handle: plain bytes, and the GPU they belong to
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


class HostMemory(msgspec.Struct, frozen=True, tag="host"):
    """Bytes behind a file descriptor of another process."""

    path: str
    num_bytes: int


class GpuMemory(msgspec.Struct, frozen=True, tag="gpu"):
    """Bytes that another process allocated on a GPU. `gpu` is its UUID, the rest what CUDA and torch need to open them."""

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
    """Memory of this process that others may open.

    Attributes:
        whole: all of it, uint8 [num_bytes].
    """

    whole: Tensor

    def shared(self) -> WeightMemory:
        """What others open it by, once what was written before is there."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class HostBuffer:
    """Memory of the host, gone with this process: a kill leaves nothing behind. See `Buffer`."""

    def __init__(self, num_bytes: int) -> None:
        descriptor = os.memfd_create("vla_rl_weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, num_bytes)
        self._memory = HostMemory(f"/proc/{os.getpid()}/fd/{descriptor}", num_bytes)
        self._release = weakref.finalize(self, os.close, descriptor)
        self.whole = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    def shared(self) -> HostMemory:
        """The path to our descriptor."""
        return self._memory

    def close(self) -> None:
        """Let go of the descriptor."""
        self._release()


class GpuBuffer:
    """Memory of a GPU, which engines on the same host open by CUDA IPC. See `Buffer`.

    torch counts who has opened it in a small file of shared memory; a killed learner can leave that file behind.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.whole = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        _, args = reduce_tensor(self.whole)  # type: ignore[no-untyped-call]
        _, _, _, _, _, _, _, handle, storage_bytes, offset, _, counter, counter_offset, event, has_event = args
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        self._memory = GpuMemory(
            gpu, num_bytes, handle, storage_bytes, offset, counter, counter_offset, event, has_event
        )

    def shared(self) -> GpuMemory:
        """A handle of it, the same each time."""
        torch.cuda.synchronize(self.whole.device)
        return self._memory

    def close(self) -> None:
        """Give the memory back, whether or not engines that were killed had let go of it."""
        if len(self.whole):
            memory = self._memory
            torch.UntypedStorage._release_ipc_counter_cuda(memory.counter, memory.counter_offset)
            self.whole = self.whole.new_empty(0)


def opened(memory: WeightMemory) -> Tensor:
    """The bytes, uint8 [num_bytes]; they must not be written to.

    Raises: CheckpointError where they cannot be opened, or are fewer than they should be.
    """
    return _opened_on_host(memory) if isinstance(memory, HostMemory) else _opened_on_gpu(memory)


def _opened_on_host(memory: HostMemory) -> Tensor:
    try:
        descriptor = os.open(memory.path, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"the staged weights at {memory.path} cannot be opened: {error.strerror}") from error
    try:
        size = os.fstat(descriptor).st_size
        if size < memory.num_bytes:
            raise CheckpointError(f"the staged weights have {size} bytes, expected {memory.num_bytes}")
        # private and writable, because torch takes no read-only memory; nobody writes
        mapped = mmap.mmap(descriptor, memory.num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8)


@lru_cache(maxsize=2)  # the sender's two buffers
def _opened_on_gpu(memory: GpuMemory) -> Tensor:
    found = {str(torch.cuda.get_device_properties(index).uuid): index for index in range(torch.cuda.device_count())}
    if memory.gpu not in found:
        raise CheckpointError(
            f"the staged weights lie on GPU {memory.gpu}, expected one that this engine sees ({', '.join(found) or 'none'});"
            " set weights_through to 'host', or show it that GPU"
        )
    place = (found[memory.gpu], memory.handle, memory.storage_bytes, memory.storage_offset)
    counted = (memory.counter, memory.counter_offset, memory.event, memory.has_event)
    try:
        whole: Tensor = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            Tensor, (memory.num_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8, *place, False, *counted
        )
    except RuntimeError as error:
        raise CheckpointError(
            f"the staged weights on GPU {memory.gpu} cannot be opened ({error}); set weights_through to 'host'"
        ) from error
    return whole
