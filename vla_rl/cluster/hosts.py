"""The hosts of a run: what each has, how to reach it, and which ones come and go."""

import os
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol, Self

import msgspec

from vla_rl.actors import RemoteHost


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of a host."""

    name: str
    memory_bytes: int
    device: str = ""
    """Its entry for CUDA_VISIBLE_DEVICES on its host; empty: its index there."""


class HostResources(msgspec.Struct, frozen=True, kw_only=True):
    """Cores, memory and GPUs that a run may use on one host."""

    num_cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of a run."""

    name: str
    """Unique among the hosts of a run."""

    resources: HostResources
    placement: RemoteHost | None = None
    """How actors are started there; None for the host of the control process."""


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """A host became part of the run."""

    host: Host


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """A host is no longer part of the run."""

    host: Host
    cause: str


HostChange = Joined | Left


class Hosts(Protocol):
    """Knows the hosts of a run while its `async with` block is open."""

    async def __aenter__(self) -> Self:
        """Find the hosts. Raises: ConfigError naming a host that cannot be used, and why."""
        ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the hosts; what was started there ends."""
        ...

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts that are there now, the control process's own first."""
        ...

    def changes(self) -> AsyncIterator[HostChange]:
        """Yield each host that joins or leaves, until the block ends."""
        ...


class ThisHost:
    """The default: one host, which never changes. Opens no socket and starts no process."""

    def __init__(self, resources: HostResources | None = None) -> None:
        self._host = Host(name="this host", resources=resources or resources_of_this_host())

    async def __aenter__(self) -> Self:
        """Do nothing: this host is there."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing."""

    def hosts(self) -> tuple[Host, ...]:
        """Return this host alone."""
        return (self._host,)

    async def changes(self) -> AsyncIterator[HostChange]:
        """Yield nothing: this host neither joins nor leaves."""
        nothing: tuple[HostChange, ...] = ()
        for change in nothing:
            yield change


def resources_of_this_host() -> HostResources:
    """Return the cores and memory that this process may use; GPUs are not looked for.

    Asking for GPUs takes torch, which this room does not import.
    """
    return HostResources(
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
