"""Supervision of one actor: launch, notice its end, restart within its policy, stop.

`Launchers` opens the channel of an incarnation: in this loop, in a child process or on another host.

Invariant: while the runtime is open a supervisor has at most one incarnation; none is left when
`run` has ended.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import zmq

from vla_rl.actors.calls.actor import MethodTable
from vla_rl.actors.calls.client import ActorClient
from vla_rl.actors.calls.pending import ActorState
from vla_rl.actors.placement import (
    ChildProcess,
    InLoop,
    Intensity,
    Placement,
    RemoteHost,
    RestartPolicy,
)
from vla_rl.actors.processes.channels import ActorExit, Channel, ChildChannel, InLoopChannel, OnEnd
from vla_rl.actors.processes.fork_servers import ForkServers
from vla_rl.actors.processes.liveness import ProcessObserver
from vla_rl.actors.remote.host_connection import HostConnection
from vla_rl.actors.wire.envelope import Frames, Kind, OnMessage, SpawnRequest, unpack_envelope
from vla_rl.errors import ActorDied, ActorFrozen
from vla_rl.util.error_reports import ErrorReport, restore_error
from vla_rl.util.stalls import LoopLag, waiting

logger = logging.getLogger(__name__)

GONE_WITHIN_S: Final = 30.0
"""Longest wait for the end of an actor that was killed. The kernel takes milliseconds."""

Launcher = Callable[[OnMessage, OnEnd], Channel]


class Supervisor:
    """Owns the incarnations of one actor.

    Args:
        prepare: awaited before each launch, and not counted as part of the start.
        launch: begins an incarnation; its messages and its end arrive through the two callbacks.
        request, args: what to build, sent to the incarnation after its hello.
        restart: None leaves a dead actor dead.
        start_timeout_s: longest time from launch to ready (s).
    """

    def __init__(
        self,
        client: ActorClient,
        prepare: Callable[[], Awaitable[None]],
        launch: Launcher,
        request: SpawnRequest,
        args: tuple[Any, ...],
        restart: RestartPolicy | None,
        start_timeout_s: float,
    ) -> None:
        self.client, self.num_restarts = client, 0
        self._prepare, self._launch_channel, self._request, self._args = (
            prepare,
            launch,
            request,
            args,
        )
        self._intensity = Intensity(restart) if restart is not None else None
        self._start_timeout_s = start_timeout_s
        self._channel: Channel | None = None
        self._incarnation = 0
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._stopping = False
        self._stderr_tail: tuple[str, ...] = ()
        self._restarting: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is no incarnation and none will come."""
        return self._channel is None and self.client.state in (ActorState.DEAD, ActorState.STOPPED)

    @property
    def is_stopping(self) -> bool:
        """Whether the owner has asked to stop the actor."""
        return self._stopping

    async def start_actor(self) -> None:
        """Launch and wait until the actor is ready.

        Raises: what `prepare`, its constructor or `on_start` raises; ActorDied, also if it is
            stopped meanwhile; TimeoutError.
        """
        await self._prepare()
        if self._stopping:
            raise ActorDied(self.client.name, 0, "stopped by its owner before it was started")
        limit = asyncio.timeout(self._start_timeout_s)
        self._ready = asyncio.get_running_loop().create_future()
        self._ended.clear()
        number = self._incarnation = self._incarnation + 1
        channel = self._channel = self._launch_channel(
            self._on_first_message, lambda death: self._on_end(number, death)
        )
        try:
            async with limit:
                await self._ready
        except BaseException as error:
            unanswered = channel.unanswered
            # gone before this raises: the caller may start the next incarnation at once
            await self._kill(channel)
            if isinstance(error, TimeoutError) and limit.expired():  # else the actor raised it
                raise TimeoutError(self._describe_slow_start(unanswered)) from None
            raise

    def _describe_slow_start(self, unanswered: str) -> str:
        if unanswered:
            return (
                f"actor {self.client.name!r} was not ready within {self._start_timeout_s} s: no "
                f"answer from {unanswered}; expected `python -m vla_rl.actors.host` to serve "
                "there, at an address that this host can reach."
            )
        words = "".join(f"\n    {line}" for line in self._stderr_tail)
        return (
            f"actor {self.client.name!r} was not ready within {self._start_timeout_s} s and was "
            "killed; raise start_timeout_s if its constructor "
            "needs longer" + (f"; the end of its stderr:{words}" if words else ".")
        )

    async def supervise(self) -> None:
        """Restart the actor whenever it ends, until it is stopped.

        Raises: ActorDied past the policy's limit.
        """
        # waits for                       woken by
        # `_ended`, in `supervise`        `_on_end`, `stop_actor`, `kill_actor`
        # `_ready`, in `start_actor`      READY, ERROR of the constructor, the process's end, a timeout
        while True:
            await self._ended.wait()
            if self._stopping or self._intensity is None:
                return
            if not await self._replace(self._intensity):
                return

    async def _replace(self, intensity: Intensity) -> bool:
        """Start the next incarnation.

        Return True once it is ready, False if the actor was stopped meanwhile.
        """
        cause: BaseException | None = None
        # a restart that fails counts like a death: a machine without memory must not be tried for ever
        while not self.is_stopping and intensity.admit_restart(time.monotonic()):
            self.num_restarts += 1
            logger.warning("actor %s: restart %d.", self.client.name, self.num_restarts)
            self._restarting = asyncio.create_task(
                self.start_actor(), name=f"restart {self.client.name}"
            )
            try:
                await self._restarting
            except asyncio.CancelledError:
                if not self._stopping:
                    self._restarting.cancel()
                    raise
                return False
            except Exception as error:  # the policy decides whether to try again
                cause = error
                logger.warning("actor %s could not be restarted: %s", self.client.name, error)
            else:
                return True
            finally:
                self._restarting = None
        if self.is_stopping:
            return False
        limit = self.client.lifecycle.make_final_error(
            "it died more often than its restart policy allows", cause
        )
        self.client.fail_waiters(ActorState.DEAD, limit)
        raise limit from cause

    async def stop_actor(self, grace_s: float) -> None:
        """Let the actor finish its calls and end, for at most `grace_s`; then kill it.

        A repeated call waits for the same end.

        An actor that is not ready yet has no calls and is killed at once: its `start` raises.
        """
        if not self._stopping:
            self._stopping = True
            if self._restarting is not None:
                self._restarting.cancel()
            self.client.ask_to_stop()
        channel = self._channel
        if channel is not None:
            if not self._ready.done():
                channel.kill_incarnation()
            try:
                async with asyncio.timeout(grace_s):
                    await channel.until_gone()
            except TimeoutError:
                logger.warning(
                    "actor %s did not stop within %g s; it is killed.", self.client.name, grace_s
                )
                await self._kill(channel)
        self._ended.set()

    async def kill_actor(self) -> None:
        """End the actor at once and for good."""
        self._stopping = True
        if self._restarting is not None:
            self._restarting.cancel()
        if self._channel is not None:
            await self._kill(self._channel)
        self.client.fail_waiters(
            ActorState.STOPPED, ActorDied(self.client.name, self.client.pid, "killed by its owner")
        )
        self._ended.set()

    async def _kill(self, channel: Channel) -> None:
        """End an incarnation; give up the wait for its end after some time, with one line."""
        # A process that waits for a device ignores SIGKILL: without an end to this wait, one driver would
        # hang the whole runtime.
        number, pid = self._incarnation, channel.pid
        channel.kill_incarnation()
        try:
            async with asyncio.timeout(GONE_WITHIN_S):
                await channel.until_gone()
        except TimeoutError:
            if channel is not self._channel:
                return
            cause = f"it was killed and has not ended within {GONE_WITHIN_S:g} s"
            logger.error(
                "actor %s (pid %d): %s, so nothing waits for it any longer. A process that waits for "
                "a device cannot be killed; a task may refuse its cancellation.",
                self.client.name,
                pid,
                cause,
            )
            self._on_end(number, ActorExit(pid, cause))
            self._incarnation += 1

    def _on_first_message(self, frames: Frames) -> None:
        """Handle messages of an incarnation that is not ready yet."""
        channel = self._channel
        if channel is None or self._ready.done():
            return
        try:
            kind, _, _, _ = unpack_envelope(frames[0])
            if kind == Kind.HELLO:
                self._send_request(channel)
            elif kind == Kind.READY:
                channel.on_message = self.client.on_message
                self.client.attach_channel(channel)
                self._ready.set_result(None)
            elif kind == Kind.ERROR:
                report = channel.codec.decode(channel.codec.get_decoder(ErrorReport), frames)
                self._ready.set_exception(restore_error(report, self.client.name, channel.pid))
        except Exception as error:  # whatever the message does, `start` raises
            self._ready.set_exception(
                ActorDied(
                    self.client.name, channel.pid, f"its first message cannot be read: {error}"
                )
            )

    def _send_request(self, channel: Channel) -> None:
        codec, label = channel.codec, self.client.table.constructor.label
        try:
            request = codec.encode(Kind.SPAWN, 0, channel.actor_id, 0, self._request, label)
            args = codec.encode(Kind.SPAWN, 0, channel.actor_id, 0, self._args, label)
        except TypeError as error:
            self._ready.set_exception(error)
            return
        channel.send_message(request)
        channel.send_message(args)

    def _on_end(self, number: int, death: ActorExit) -> None:
        if number != self._incarnation:
            return  # nothing waits for it any longer
        self._channel, self._stderr_tail = None, death.stderr_tail
        if not self._ready.done():
            cause = "stopped by its owner before it was ready" if self._stopping else death.cause
            kind = ActorFrozen if death.frozen and not self._stopping else ActorDied
            self._ready.set_exception(kind(self.client.name, death.pid, cause, death.stderr_tail))
            return
        if self._stopping:
            self.client.detach_channel(
                ActorExit(death.pid, "stopped by its owner"), ActorState.STOPPED
            )
        elif self._ready.cancelled() or self._ready.exception() is not None:
            return  # `start` raises
        else:
            self.client.detach_channel(
                death, ActorState.DEAD if self._intensity is None else ActorState.RESTARTING
            )
        self._ended.set()


_HOST_IO_THREADS = 4
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
        self._host_context: zmq.Context[zmq.Socket[bytes]] | None = None

    async def prepare_placement(self, placement: Placement, start_timeout_s: float) -> None:
        """Check the interpreter and start the fork server of a placement, if it needs any.

        Raises: what `Runtime.prepare` raises.
        """
        if isinstance(placement, ChildProcess) and placement.needs_preparation:
            with waiting(f"runtime {self._name!r}", on="its fork server"):
                await self._fork_servers.prepare(placement)
        elif isinstance(placement, RemoteHost) and placement.process.needs_preparation:
            with waiting(f"runtime {self._name!r}", on=f"the fork server of {placement.address}"):
                connection = self._connection(placement)
                await connection.prepare_process(placement.launched_process, start_timeout_s)

    def make_launcher(
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
                lambda: constructor.call_function(actor_class, args),
                mailbox,
                self._lag,
                on_message,
                on_end,
            )

        def in_child(on_message: OnMessage, on_end: OnEnd) -> Channel:
            assert isinstance(placement, ChildProcess)
            start = self._fork_servers.get_starter(placement)
            return ChildChannel(
                name, placement, self._context, on_message, on_end, self._observer, start=start
            )

        def on_host(on_message: OnMessage, on_end: OnEnd) -> Channel:
            assert isinstance(placement, RemoteHost)
            return self._connection(placement).launch_process(name, placement, on_message, on_end)

        if isinstance(placement, InLoop):
            return in_loop
        if isinstance(placement, ChildProcess):
            return in_child
        if isinstance(placement, RemoteHost):
            return on_host
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
        if self._host_context is not None:
            self._host_context.destroy(linger=0)

    def _connection(self, host: RemoteHost) -> HostConnection:
        if self._host_context is None:
            self._host_context = zmq.Context(io_threads=_HOST_IO_THREADS)
        key = (host.address, host.server_public_key, host.client_keys.public, host.lost_after_s)
        connection = self._connections.get(key)
        if connection is None or connection.is_lost:
            connection = self._connections[key] = HostConnection(self._host_context, host)
        return connection
