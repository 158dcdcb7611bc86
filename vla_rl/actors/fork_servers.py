"""The fork servers of one runtime, or of several that follow each other.

One is started with the first child that names it, and replaced when it dies.
"""

import asyncio
from typing import Self

import msgspec

from vla_rl.actors.forking import ForkServerProcess
from vla_rl.actors.interpreter import check_interpreter
from vla_rl.actors.observer import ProcessObserver
from vla_rl.actors.placement import ChildProcess
from vla_rl.actors.spawned_process import SpawnedProcess, StartProcess
from vla_rl.errors import ActorDied


class ForkServers:
    """One server for each interpreter and preparation."""

    def __init__(self, name: str, observer: ProcessObserver) -> None:
        self._name, self._observer = name, observer
        self._servers: dict[bytes, ForkServerProcess] = {}
        self._is_closed = False

    def of(self, placement: ChildProcess) -> ForkServerProcess:
        """Return the server of this placement; start one if none is running.

        Raises: OSError if it cannot be started; ActorDied after `close`.
        """
        assert placement.fork_from is not None
        name = f"fork server of {self._name}"
        if self._is_closed:  # a spawn that began before `close` arrives here
            raise ActorDied(name, 0, "not started, since its runtime or its servers were closed")
        key = msgspec.json.encode((placement.python, placement.fork_from), order="deterministic")
        server = self._servers.get(key)
        if server is None or not server.is_alive():
            server = self._servers[key] = ForkServerProcess(name, placement, self._observer)
        return server

    async def prepare(self, placement: ChildProcess) -> None:
        """Check the interpreter of a placement, and wait until its server is ready.

        Raises: ConfigError for an unusable interpreter; what a prepare hook raises; ActorFrozen
            naming a hook that did not end in time; ActorDied if the server dies.
        """
        if placement.python is not None:
            await check_interpreter(placement.python)
        if placement.fork_from is not None:
            await self.of(placement).until_ready()

    def starter(self, placement: ChildProcess) -> StartProcess:
        """Return what starts such a process: a fork of its server, or a fresh interpreter."""
        return self.of(placement).start if placement.fork_from is not None else SpawnedProcess

    async def close(self) -> None:
        """End all servers and start no more. Their children have ended before."""
        self._is_closed = True
        for server in self._servers.values():
            server.close()
        try:
            await asyncio.gather(*(server.until_gone() for server in self._servers.values()))
        except BaseException:  # a second cancellation: no time is left
            for server in self._servers.values():
                server.kill()
            raise


class LastingForkServers(ForkServers):
    """Fork servers that outlive the runtimes that are given them, so that the next one need not wait
    for its imports and hooks again.

    `async with LastingForkServers(name) as servers:` ends them on the way out.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, ProcessObserver(name))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.close()
        finally:
            self._observer.close()
