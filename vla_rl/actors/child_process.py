"""A caller's channel to a child process, started in any way.

The child inherits two arenas of shared memory and the page of its heartbeat; if the heartbeat
stops, it is killed as frozen. The socket is in the abstract namespace and accepts only our own
user, so no file is left behind.
"""

import asyncio
import contextlib
import os
import secrets

import zmq

from vla_rl.actors.channel import Death, OnEnd, OnMessage
from vla_rl.actors.codec import Codec
from vla_rl.actors.fork_protocol import ChildSettings, ListenSettings
from vla_rl.actors.observer import ProcessObserver, Watched
from vla_rl.actors.parts import MAX_WIRE_FRAME_BYTES
from vla_rl.actors.placement import ChildProcess
from vla_rl.actors.pulse import Pulse
from vla_rl.actors.slots import SlotReader, SlotWriter, create_arena
from vla_rl.actors.sockets import LoopSocket, lift_high_water_mark
from vla_rl.actors.spawned_process import SpawnedProcess, StartProcess, own_sys_path
from vla_rl.actors.stderr_tail import StderrTail
from vla_rl.actors.wire import Frames

_IPC_FILTER_UID = 59  # ZMQ_IPC_FILTER_UID, for which pyzmq has no name

_LAST_WORDS_WITHIN_S = 5.0
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
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_WIRE_FRAME_BYTES)
        socket.setsockopt(_IPC_FILTER_UID, os.getuid())
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
            pulse = Pulse() if placement.frozen_after_s is not None else None
            if pulse is not None:
                until_started.callback(os.close, pulse.fd)
            settings = ChildSettings(
                name,
                actor_id,
                address,
                os.getpid(),
                own_sys_path(placement),
                arena_in=arena_in,
                arena_out=arena_out,
                pulse=-1 if pulse is None else pulse.fd,
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
        self._watched = self._watch(pulse, placement.frozen_after_s)

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

    def give(self, actor_id: int, on_message: OnMessage, on_end: OnEnd) -> None:
        """Give the child to another owner, which knows it by another number."""
        self.actor_id, self.on_message, self._on_end = actor_id, on_message, on_end

    def send(self, frames: Frames) -> None:
        """Queue one message; it is dropped if the child has ended."""
        self._socket.send(frames)

    async def until_room(self) -> None:
        """Return at once: the mailbox alone bounds what is on the way in this host."""

    def poll(self) -> None:
        """Deliver what has already arrived."""
        self._socket.drain_all()

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        self._process.kill()

    async def until_gone(self) -> None:
        """Wait until the process is reaped."""
        await asyncio.shield(self._gone)

    def _watch(self, pulse: Pulse | None, frozen_after_s: float | None) -> Watched | None:
        """Have the process observed from now on, unless its placement disables that."""
        if pulse is None or frozen_after_s is None:
            return None
        watched = Watched(
            pid=lambda: self._process.pid,
            beat=lambda: pulse.beats,
            owes_beat=lambda: pulse.beats > 0,  # it begins when its interpreter is up
            stopped_after_s=frozen_after_s,
            silent_after_s=_SILENT_TIMES * frozen_after_s,
            on_frozen=self._freeze,
        )
        self._observer.watch(watched)
        return watched

    def _freeze(self, what: str) -> None:
        if not self.is_ending:
            self._frozen = f"{what}, so it was killed"
            self.kill()

    def _end(self, cause: str, words: tuple[str, ...]) -> None:
        """Handle the end of the process.

        Its last messages may still be on their way through ZeroMQ's thread.
        """
        if self._watched is not None:
            self._observer.forget(self._watched)
            self._watched = None
        self._end_once_read(cause, words, self._loop.time() + _LAST_WORDS_WITHIN_S)

    def _end_once_read(self, cause: str, words: tuple[str, ...], until: float) -> None:
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
            words = (*words, *self._stderr.last_lines)
            self._on_end(
                Death(self.pid, self._frozen or cause, words, frozen=self._frozen is not None)
            )
