"""How a runtime opens the channel of an actor's next incarnation: in this loop, in a child process
or on another host.
"""

from typing import Any

import zmq

from vla_rl.actors.actor import MethodTable
from vla_rl.actors.channel import Channel, OnEnd, OnMessage
from vla_rl.actors.child_process import ChildChannel
from vla_rl.actors.fork_servers import ForkServers
from vla_rl.actors.host_connection import HostConnection
from vla_rl.actors.in_loop import InLoopChannel
from vla_rl.actors.observer import ProcessObserver
from vla_rl.actors.placement import ChildProcess, InLoop, Placement, RemoteHost
from vla_rl.actors.supervision import Launcher
from vla_rl.util.stalls import LoopLag, waiting

_FAR_IO_THREADS = 4
"""Threads that encrypt for other hosts: one of them does about 1 GB/s."""


class Launchers:
    """Owns what the actors of a runtime share: fork servers, sockets, connections to hosts.

    Close it once all actors have ended: the fork servers first, then `close`.

    Args:
        name: name of the runtime, for errors and the wait graph.
        lag: lag sampler of this loop, which actors in it report.
        fork_servers: servers of the caller, which closes them; None for its own.
    """

    def __init__(self, name: str, lag: LoopLag, fork_servers: ForkServers | None = None) -> None:
        self._name, self._lag = name, lag
        self._observer = ProcessObserver(name)
        self._owns_fork_servers = fork_servers is None
        self._fork_servers = fork_servers or ForkServers(name, self._observer)
        self._connections: dict[tuple[str, str, str, float], HostConnection] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._far_context: zmq.Context[zmq.Socket[bytes]] | None = None

    async def prepare(self, placement: Placement, start_timeout_s: float) -> None:
        """Check the interpreter and start the fork server of a placement, if it needs any.

        Raises: what `Runtime.prepare` raises.
        """
        if isinstance(placement, ChildProcess) and placement.needs_preparation:
            with waiting(f"runtime {self._name!r}", on="its fork server"):
                await self._fork_servers.prepare(placement)
        elif isinstance(placement, RemoteHost) and placement.process.needs_preparation:
            with waiting(f"runtime {self._name!r}", on=f"the fork server of {placement.address}"):
                connection = self._connection(placement)
                await connection.prepare(placement.launched_process, start_timeout_s)

    def launcher(
        self,
        name: str,
        table: MethodTable,
        args: tuple[Any, ...],
        placement: Placement,
        mailbox: int,
    ) -> Launcher:
        """Return the function that opens a channel to a new incarnation of an actor."""

        def in_loop(on_message: OnMessage, on_end: OnEnd) -> Channel:
            constructor, actor_class = table.constructor, table.actor_class
            return InLoopChannel(
                name,
                table,
                lambda: constructor.apply(actor_class, args),
                mailbox,
                self._lag,
                on_message,
                on_end,
            )

        def in_child(on_message: OnMessage, on_end: OnEnd) -> Channel:
            assert isinstance(placement, ChildProcess)
            start = self._fork_servers.starter(placement)
            return ChildChannel(
                name, placement, self._context, on_message, on_end, self._observer, start=start
            )

        def elsewhere(on_message: OnMessage, on_end: OnEnd) -> Channel:
            assert isinstance(placement, RemoteHost)
            return self._connection(placement).launch(name, placement, on_message, on_end)

        if isinstance(placement, InLoop):
            return in_loop
        if isinstance(placement, ChildProcess):
            return in_child
        if isinstance(placement, RemoteHost):
            return elsewhere
        raise TypeError(f"placement is {placement!r}, expected InLoop, ChildProcess or RemoteHost.")

    async def close_fork_servers(self) -> None:
        """End the fork servers, except those of the caller."""
        if self._owns_fork_servers:
            await self._fork_servers.close()

    def close(self) -> None:
        """Close the connections and all sockets."""
        self._observer.close()
        for connection in self._connections.values():
            connection.close()
        self._context.destroy(linger=0)
        if self._far_context is not None:
            self._far_context.destroy(linger=0)

    def _connection(self, host: RemoteHost) -> HostConnection:
        if self._far_context is None:
            self._far_context = zmq.Context(io_threads=_FAR_IO_THREADS)
        key = (host.address, host.server_public_key, host.client_keys.public, host.lost_after_s)
        connection = self._connections.get(key)
        if connection is None or connection.is_lost:
            connection = self._connections[key] = HostConnection(self._far_context, host)
        return connection
