"""Channels: the connection of a caller to one incarnation of an actor, in any placement.

A child process inherits two arenas of shared memory as well as the page of its heartbeat; if the
heartbeat stops, it is killed as frozen. The socket is in the abstract namespace, where it accepts only
our own user, so no file is left behind. An actor in this loop has the same codec, the same server.
`remote.host_connection` has the channel to another host.
"""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import zmq

from vla_rl.actors.calls.actor import Actor, MethodTable
from vla_rl.actors.calls.server import ActorServer
from vla_rl.actors.placement import ChildProcess
from vla_rl.actors.processes.liveness import HeartbeatPage, ProcessObserver, Watched
from vla_rl.actors.processes.started_process import (
    SpawnedProcess,
    StartProcess,
    StderrTail,
    get_own_sys_path,
)
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import (
    MAX_WIRE_FRAME_BYTES,
    OWN_CALL,
    ChildSettings,
    Frames,
    Kind,
    ListenSettings,
    OnMessage,
)
from vla_rl.actors.wire.slots import SlotReader, SlotWriter, create_arena
from vla_rl.actors.wire.sockets import LoopSocket, lift_high_water_mark
from vla_rl.util.error_reports import make_report
from vla_rl.util.stalls import LoopLag


@dataclass(frozen=True, slots=True)
class ActorExit:
    """The end of one incarnation, as its channel observed it.

    Example:
        ActorExit(pid=4711, cause="exit code 3", stderr_tail=("no device",))
    """

    pid: int
    cause: str
    stderr_tail: tuple[str, ...] = field(default=())
    frozen: bool = False
    """Whether the process was alive but stuck, and was killed for that."""


class Channel(Protocol):
    """The caller's end. Made by a launcher together with the incarnation; used once.

    The launcher receives two callbacks: `on_message` is called with each message of the
    incarnation; `on_end` is called once, on the loop, when the incarnation has ended for any
    reason, and no message follows it. `on_message` may be replaced.
    """

    on_message: OnMessage

    @property
    def pid(self) -> int:
        """Process id of the actor; 0 in this loop."""
        ...

    @property
    def codec(self) -> Codec:
        """Encodes for this incarnation and decodes from it."""
        ...

    @property
    def actor_id(self) -> int:
        """Actor number in each envelope on this channel."""
        ...

    @property
    def unanswered(self) -> str:
        """Name of what has not answered yet, if that is not the incarnation itself.

        Else an empty string.
        """
        ...

    @property
    def is_ending(self) -> bool:
        """Whether the incarnation is known to have ended, and `on_end` is about to be called."""
        ...

    def send_message(self, frames: Frames) -> None:
        """Queue one message; it is dropped if the incarnation has ended, since `on_end` follows."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether a call may be sent now, or else has to wait in `until_room`."""
        ...

    async def until_room(self) -> None:
        """Wait until the bytes on the way allow one more call, or the incarnation has ended."""
        ...

    def poll(self) -> None:
        """Deliver what has already arrived."""
        ...

    def kill_incarnation(self) -> None:
        """End the incarnation at once; `on_end` follows."""
        ...

    async def until_gone(self) -> None:
        """Wait for the end; afterwards all resources of the incarnation are free."""
        ...


OnEnd = Callable[[ActorExit], None]


class InLoopChannel:
    """Owns the task that builds and serves the actor. See `Channel`.

    Args:
        build: makes the instance; runs in the actor's task.
        mailbox: largest number of unanswered calls.
        lag: lag sampler of this loop.
    """

    pid = 0
    actor_id = 0
    unanswered = ""
    has_room = True

    def __init__(
        self,
        name: str,
        table: MethodTable,
        build: Callable[[], Actor],
        mailbox: int,
        lag: LoopLag,
        on_message: OnMessage,
        on_end: OnEnd,
    ) -> None:
        self.codec = Codec()
        self.on_message, self._on_end = on_message, on_end
        self._loop = asyncio.get_running_loop()
        self._server: ActorServer | None = None
        self._killed = False
        self._task = self._loop.create_task(
            self._live(table, build, mailbox, lag), name=f"actor {name}"
        )
        self._task.add_done_callback(self._ended)

    @property
    def is_ending(self) -> bool:
        """Whether its task has ended."""
        return self._task.done()

    def send_message(self, frames: Frames) -> None:
        """Hand over a copy of one message; it is dropped if the actor has ended."""
        if self._server is not None and not self._task.done():
            # A copy, as in every other placement: neither side may see what the other writes later.
            self._server.on_message([bytes(frame) for frame in frames])

    async def until_room(self) -> None:
        """Return at once: the mailbox alone bounds what is on the way in this host."""

    def poll(self) -> None:
        """Do nothing: there is no buffer between the actor and its caller."""

    def kill_incarnation(self) -> None:
        """Cancel all work of the actor."""
        self._killed = True
        if self._server is not None:
            self._server.is_killed = True
        self._task.cancel()

    async def until_gone(self) -> None:
        """Wait until its task has ended."""
        await asyncio.wait([self._task])

    async def _live(
        self, table: MethodTable, build: Callable[[], Actor], mailbox: int, lag: LoopLag
    ) -> None:
        try:
            actor = build()
            codec = self.codec
            self._server = ActorServer(
                actor, table, codec, self.actor_id, self._receive, mailbox, lag, at_once=False
            )
            await self._server.serve()
        except Exception as error:  # the owner decides: it receives the report while the actor ends
            self._receive(
                self.codec.encode(
                    Kind.ERROR, 0, self.actor_id, OWN_CALL, make_report(error), "birth or end"
                )
            )

    def _receive(self, frames: Frames) -> None:
        self.on_message([bytes(frame) for frame in frames])

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled():
            cause = "killed" if self._killed else "its task was cancelled"
        else:
            error = task.exception()
            cause = "it returned" if error is None else f"{type(error).__name__}: {error}"
        self._on_end(ActorExit(0, cause))


_IPC_FILTER_UID = 59  # ZMQ_IPC_FILTER_UID, for which pyzmq has no name

_LAST_MESSAGES_WITHIN_S = 5.0
"""Time for ZeroMQ's thread to read what an ended process had sent; a process that it forked may
hold the socket open."""
_LOOK_EVERY_S = 0.001
_SILENT_TIMES = 5.0
"""A sleeping process without a heartbeat has this many times as long as a stopped one: native code
may rightly wait for another program while it holds the interpreter lock."""


class ChildChannel:
    """One child process, from its launch to its end.

    See `Channel`. `start` starts the process, `observer` watches it. With `listens` it is a client's
    on another host: it says hello to us, and everything else to the client.
    """

    unanswered = ""
    has_room = True

    def __init__(
        self,
        name: str,
        placement: ChildProcess,
        context: zmq.Context[zmq.Socket[bytes]],
        on_message: OnMessage,
        on_end: OnEnd,
        observer: ProcessObserver,
        actor_id: int = 0,
        start: StartProcess = SpawnedProcess,
        listens: ListenSettings | None = None,
    ) -> None:
        self.name, self.actor_id, self._on_end = name, actor_id, on_end
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        # an abstract name leaves no file behind after a kill; random, so that nobody binds it first
        address = f"ipc://@vla_rl-{os.getpid()}-{secrets.token_hex(16)}"
        socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        lift_high_water_mark(socket)
        # An actor runs code of others; a frame of any size would be allocated before it is read.
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_WIRE_FRAME_BYTES)
        socket.setsockopt(_IPC_FILTER_UID, os.getuid())
        # Whatever fails in between, no descriptor stays: a pool starts processes for days.
        with contextlib.ExitStack() as until_started, contextlib.ExitStack() as on_failure:
            on_failure.callback(socket.close, linger=0)
            socket.bind(address)
            self._socket = LoopSocket(socket, on_message)
            on_failure.callback(self._socket.close)
            arenas = []
            for _ in range(2 if placement.arena_bytes else 0):
                arenas.append(create_arena(placement.arena_bytes))
                until_started.callback(os.close, arenas[-1])
            arena_in, arena_out = arenas or (-1, -1)
            heartbeat = HeartbeatPage() if placement.frozen_after_s is not None else None
            if heartbeat is not None:
                until_started.callback(os.close, heartbeat.fd)
            settings = ChildSettings(
                name,
                actor_id,
                address,
                os.getpid(),
                get_own_sys_path(placement),
                arena_in=arena_in,
                arena_out=arena_out,
                heartbeat=-1 if heartbeat is None else heartbeat.fd,
                listens=listens,
            )
            self.codec = Codec(SlotWriter(arena_in), SlotReader(arena_out)) if arenas else Codec()
            stderr_read, stderr_write = os.pipe()
            until_started.callback(os.close, stderr_write)
            self._stderr = StderrTail(stderr_read, name)
            on_failure.callback(self._stderr.close)
            self._process = start(placement, settings, stderr_write, self._end)
            on_failure.pop_all()
        self._frozen: str | None = None
        self._observer = observer
        self._watched = self._watch(heartbeat, placement.frozen_after_s)

    @property
    def on_message(self) -> OnMessage:
        """Callback for each message of the child."""
        return self._socket.on_message

    @on_message.setter
    def on_message(self, on_message: OnMessage) -> None:
        self._socket.on_message = on_message

    @property
    def pid(self) -> int:
        """Process id of the child; 0 until there is one."""
        return self._process.pid

    @property
    def is_ending(self) -> bool:
        """Whether the process has ended, and `on_end` is about to be called."""
        return self._process.has_ended

    def hand_over(self, actor_id: int, on_message: OnMessage, on_end: OnEnd) -> None:
        """Give the child to another owner, which knows it by another number."""
        self.actor_id, self.on_message, self._on_end = actor_id, on_message, on_end

    def send_message(self, frames: Frames) -> None:
        """Queue one message; it is dropped if the child has ended."""
        self._socket.send(frames)

    async def until_room(self) -> None:
        """Return at once: the mailbox alone bounds what is on the way in this host."""

    def poll(self) -> None:
        """Deliver what has already arrived."""
        self._socket.drain_all()

    def kill_incarnation(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        self._process.kill()

    async def until_gone(self) -> None:
        """Wait until the process is reaped."""
        await asyncio.shield(self._gone)

    def _watch(
        self, heartbeat: HeartbeatPage | None, frozen_after_s: float | None
    ) -> Watched | None:
        """Have the process observed from now on, unless its placement disables that."""
        if heartbeat is None or frozen_after_s is None:
            return None
        watched = Watched(
            pid=lambda: self._process.pid,
            beat=lambda: heartbeat.beats,
            owes_beat=lambda: heartbeat.beats > 0,  # it begins when its interpreter is up
            stopped_after_s=frozen_after_s,
            silent_after_s=_SILENT_TIMES * frozen_after_s,
            on_frozen=self._freeze,
        )
        self._observer.add_process(watched)
        return watched

    def _freeze(self, what: str) -> None:
        # It may have ended between the look and now: then its own exit code is the better cause.
        if not self.is_ending:
            self._frozen = f"{what}, so it was killed"
            self.kill_incarnation()

    def _end(self, cause: str, words: tuple[str, ...]) -> None:
        """Handle the end of the process.

        Its last messages may still be on their way through ZeroMQ's thread.
        """
        if self._watched is not None:
            self._observer.remove_process(self._watched)
            self._watched = None
        self._end_once_read(cause, words, self._loop.time() + _LAST_MESSAGES_WITHIN_S)

    def _end_once_read(self, cause: str, words: tuple[str, ...], until: float) -> None:
        # Often an answer, or the reason of the end, came just before it: it would be lost with the socket.
        if self._socket.has_peer and self._loop.time() < until:
            self._loop.call_later(_LOOK_EVERY_S, self._end_once_read, cause, words, until)
        else:
            self._finish(cause, words)

    def _finish(self, cause: str, words: tuple[str, ...]) -> None:
        """Read the last answers and lines of stderr, free everything, report to the owner."""
        try:
            self._socket.drain_all()
            self._socket.close()
            self._stderr.close()
        finally:  # whatever goes wrong, the owner must be notified
            self._gone.set_result(None)
            words = (*words, *self._stderr.lines)
            self._on_end(
                ActorExit(self.pid, self._frozen or cause, words, frozen=self._frozen is not None)
            )
