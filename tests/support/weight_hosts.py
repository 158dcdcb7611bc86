"""The hosts' side of a publication in this loop, and what a learner's side reports of it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_rl.actors import Runtime
from vla_rl.actors.remote.peer_sockets import SocketAddress
from vla_rl.engines.weight_shards import WeightShard
from vla_rl.errors import ActorDied
from vla_rl.remote_rollout.flat_weights import HeldVersion, WeightHeading
from vla_rl.remote_rollout.host_recipe import HostStatus
from vla_rl.remote_rollout.weight_links import ReceivedBytes, WeightRows
from vla_rl.remote_rollout.weight_publication import HostWeights
from vla_rl.remote_rollout.weight_sources import WeightHost
from vla_rl.remote_rollout.weight_store import WeightStore
from vla_rl.types import SOLE_MEMBER, AgentNames

RUNTIMES: list[Runtime] = []


@asynccontextmanager
async def hosts_runtime() -> AsyncIterator[None]:
    """Owns the actors of which the hosts of a test give handles to each other."""
    async with Runtime("hosts") as runtime:
        RUNTIMES.append(runtime)
        yield
        RUNTIMES.clear()


class Host:
    """The side of a host, in this loop, with real links; it fails in one call, if wanted."""

    def __init__(
        self,
        name: str,
        log: list[str],
        fails_in: str = "",
        shape: tuple[int, int] = (3, 2),
        network: Any = None,
    ) -> None:
        self.name, self.log, self._fails_in = name, log, fails_in
        torch.manual_seed(1)
        self.network = nn.Linear(*shape) if network is None else network
        self.cache = WeightStore({SOLE_MEMBER: self.network})
        self.version, self.digest, self.num_put = 0, "", 0
        self.reached_at = ""
        self._rows: WeightRows | None = None
        self.num_received = called(self.received)
        self.share_weights = called(self.cache.memory)
        self.open_weights = called(self.cache.open)

    async def begin_weights(self, heading: WeightHeading) -> None:
        self._note("begin")
        self.cache.begin(heading)

    async def put_weights(self, member: str, start: int, piece: np.ndarray) -> None:
        self.num_put += len(piece)
        await self.cache.put(member, start, piece)

    async def share_rows(self) -> WeightRows:
        (runtime,) = RUNTIMES
        if self._rows is None:
            self._rows = await runtime.spawn(WeightRows, self.cache)
        return await runtime.share(self._rows, self.reached_at)

    async def receive_weights(self, member: str, rows: WeightRows) -> ReceivedBytes:
        self._note("take")
        return await self.cache.receive(member, rows)

    async def open_sockets(self, member: str, keys: list[str]) -> list[SocketAddress]:
        self._note("open sockets")
        return self.cache.open_sockets(member, keys)

    async def receive_shards(self, member: str, shards: list[WeightShard]) -> str:
        self._note("take shards")
        return await self.cache.receive_shards(member, shards)

    def received(self, member: str) -> int:
        return self.cache.num_received(member)

    async def check_weights(self, member: str, digest: str) -> None:
        self._note("check")
        await self.cache.check(member, digest)

    async def apply_weights(self, member: str) -> None:
        self._note("apply")
        newest = self.cache.to_apply(member)
        newest.write_to_network()
        self.version, self.digest = newest.heading.version, newest.digest

    async def renew_weights(self, member: str, version: int) -> None:
        self._note("renew")
        self.version = version

    def _note(self, call: str) -> None:
        if call == self._fails_in:
            self.die()
            raise self.death()
        self.log.append(f"{call} {self.name}")

    def die(self) -> None:
        """Close what the end of a process closes."""
        self.cache.close()
        if self._rows is not None:
            self._killing = asyncio.ensure_future(RUNTIMES[0].kill(self._rows))

    def death(self) -> ActorDied:
        return ActorDied(self.name, 1, "SIGKILL")


def called(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what a handle has of a method: a coroutine function."""

    async def call(*args: Any) -> Any:
        return function(*args)

    return call


def status_of(host: Host) -> HostStatus:
    held = {SOLE_MEMBER: HeldVersion(version=host.version, digest=host.digest)}
    return HostStatus(num_slots=1, held=held)


def reached(host: Host) -> WeightHost:
    return WeightHost(host, "127.0.0.1")  # type: ignore[arg-type]


class Site:
    """Hosts, the learner's network, and what was reported."""

    def __init__(self, *hosts: Host, shape: tuple[int, int] = (3, 2)) -> None:
        self.learner = nn.Linear(*shape)
        self.lost: list[str] = []
        self.versions: list[int] = []
        self.coming: list[int] = []
        self._started: list[asyncio.Task[None]] = []
        self.weights = HostWeights(
            AgentNames([SOLE_MEMBER]),
            0,
            lambda name, _: self.lost.append(name),
            self.coming.append,
            self.versions.append,
        )
        self.sink = self.weights.sinks[SOLE_MEMBER]
        self.weights.hosts.update({host.name: reached(host) for host in hosts})

    def open(self) -> None:
        self.weights.open(self._start)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        self._started.append(asyncio.create_task(work, name=name))
        return self._started[-1]

    async def begin_to_publish(self, version: int) -> None:
        await asyncio.to_thread(self.sink.apply_weights, self.learner, version)

    async def wait_applied(self) -> None:
        await self.weights.wait_applied()
        for task in self._started:
            task.result()

    async def publish(self, version: int) -> None:
        await self.begin_to_publish(version)
        await self.wait_applied()

    async def join(self, host: Host) -> int:
        admitted: list[HostStatus] = []
        await self.weights.join(
            host.name, reached(host), status_of(host), is_new=False, admit=admitted.append
        )
        return admitted[0].weight_version

    async def catch_up(self, host: Host, *, is_new: bool = False) -> int:
        status = status_of(host)
        found = await self.weights.catch_up(host.name, reached(host), status, is_new=is_new)
        return found[SOLE_MEMBER].version

    def have(self, hosts: Sequence[Host]) -> list[bool]:
        return [torch.equal(host.network.weight, self.learner.weight) for host in hosts]
