"""The hosts of a run: what each has, how to reach it, which ones come or go.

GPUs are read from `nvidia-smi`, without torch, whose import takes seconds. A monitor on each host
reports what it has; by its death it shows that the host has left.
"""

import asyncio
import os
import platform
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Final, Protocol, Self

import msgspec
from msgspec.structs import replace

import vla_rl
from vla_rl.actors import Actor, RemoteHost, actor_method
from vla_rl.errors import ConfigError
from vla_rl.util.processes import query_gpus


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
    """One machine of a run.

    Example:
        Host(name="gpu2", resources=HostResources(num_cores=64, memory_bytes=512 << 30, gpus=(...,) * 8),
             placement=RemoteHost(address="tcp://10.0.0.12:7070", ...))
    """

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
        self._host = Host(name="this host", resources=resources or get_own_resources())

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


def get_own_resources() -> HostResources:
    """Return the cores and memory that this process may use; GPUs are not looked for.

    Asking for GPUs takes torch, which this room does not import.
    """
    # What this process may use, not what the machine has: in a container the two differ.
    return HostResources(
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


_MIB: Final = 2**20


def list_own_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that programs of this process's environment may use; empty without NVIDIA's.

    Waits for `nvidia-smi`.
    """
    lines = query_gpus("index,uuid,name,memory.total")
    return parse_visible_gpus(lines, os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_visible_gpus(listed: str, visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs of `nvidia-smi`'s lines that CUDA shows, in CUDA's order.

    Args:
        listed: lines of index, UUID, name and MiB.
        visible: CUDA_VISIBLE_DEVICES: indices or beginnings of UUIDs; None for all.
    """
    found: list[tuple[str, str, Gpu]] = []
    for line in listed.splitlines():
        index, uuid, name, mib = (word.strip() for word in line.split(",", 3))
        # A card in trouble has `[N/A]` here; the run does without it.
        if mib.isdecimal():
            gpu = Gpu(name=name, memory_bytes=int(mib) * _MIB, device=index)
            found.append((index, uuid, gpu))
    if visible is None:
        return tuple(gpu for _, _, gpu in found)
    chosen: list[Gpu] = []
    for word in filter(None, map(str.strip, visible.split(","))):
        match = [gpu for index, uuid, gpu in found if word == index or uuid.startswith(word)]
        if not match:  # as CUDA does: an entry that is not there hides those after it
            break
        chosen.append(match[0])
    return tuple(chosen)


class OpenHosts:
    """Open hosts of another owner. Entering and leaving the block does not touch them.

    Args:
        hosts: their owner's, whose block is open. Nothing else may read its changes.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._there: set[str] = set()

    async def __aenter__(self) -> Self:
        """Take the hosts that are there now; `changes` goes on from them."""
        self._there = {host.name for host in self.hosts()}
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Do nothing: their owner leaves them."""

    def hosts(self) -> tuple[Host, ...]:
        """Return the hosts that are there now, the control process's own first."""
        return self._hosts.hosts()

    async def changes(self) -> AsyncIterator[HostChange]:
        """Yield each host that joins or leaves after the block was entered."""
        async for change in self._hosts.changes():
            name = change.host.name
            # a change from before the block, which `hosts` showed already
            if (name in self._there) == isinstance(change, Joined):
                continue
            self._there ^= {name}
            yield change


COMPARED: Final = ("vla_rl", "torch", "python")
"""Versions that must be equal on all hosts. Weights, observations and log-probs of one host are
used on another, so that a difference would bias what is learnt, and show nowhere."""


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """Versions and resources of one host."""

    versions: dict[str, str]
    """Versions of `COMPARED`, such as `{"torch": "2.13.0+cpu"}`; `none` if it is not installed."""

    resources: HostResources
    node: str
    """Name of the machine."""


class HostMonitor(Actor):
    """An actor that does nothing but be there, in a process of its own on each host."""

    async def report(self) -> HostReport:
        """Return the versions and resources of this host, with its GPUs."""
        report = make_own_report()
        gpus = await asyncio.to_thread(list_own_gpus)
        return replace(report, resources=replace(report.resources, gpus=gpus))

    @actor_method(concurrent=True)
    async def wait_until_gone(self) -> None:
        """Never return: the call fails once this process, its host or the cable is gone."""
        # Its end is the news: whatever ends the process also ends this call, without a look at intervals.
        await asyncio.get_running_loop().create_future()


def make_own_report() -> HostReport:
    """Return the versions and resources of this host, without GPUs."""
    return HostReport(
        versions={
            "vla_rl": vla_rl.__version__,
            "torch": _get_version("torch"),
            "python": ".".join(platform.python_version_tuple()[:2]),
        },
        resources=get_own_resources(),
        node=platform.node(),
    )


def require_same_versions(host: str, there: HostReport, local: HostReport) -> None:
    """Raise ConfigError that names each version in which a host differs from this one."""
    different = [
        f"{name} {there.versions.get(name)} (here {local.versions[name]})"
        for name in COMPARED
        if there.versions.get(name) != local.versions[name]
    ]
    if different:
        raise ConfigError(
            f"host {host!r} has {', '.join(different)}; expected the same versions on all hosts. "
            f"Install them there, and start `vla-rl host` again"
        )


def _get_version(package: str) -> str:
    # not imported: torch takes two seconds, and the monitor's process would hold it for ever
    try:
        # without the build, such as +cpu: hosts with and without a GPU act for one learner
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "none"
