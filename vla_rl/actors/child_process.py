"""Launches a child process and is the caller's channel to it.

A fresh interpreter, never a fork: the parent may have threads, a loop and a GPU context. The child inherits two arenas of
shared memory and reads its first words from stdin, whose other end we keep: it closes with us. The socket lives in the
abstract namespace and lets in our own user only, so there is no file to leave behind. The end of the child is read from
a pidfd, at once and at no idle cost; a socket would never tell.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import zmq

import vla_rl
from vla_rl.actors.channel import Death, OnEnd, OnMessage
from vla_rl.actors.codec import Codec
from vla_rl.actors.placement import ChildProcess
from vla_rl.actors.slots import SlotReader, SlotWriter, create_arena
from vla_rl.actors.sockets import LoopSocket
from vla_rl.actors.stderr_tail import StderrTail
from vla_rl.actors.wire import MAX_MESSAGE_BYTES, Frames

_IPC_FILTER_UID = 59  # ZMQ_IPC_FILTER_UID, for which pyzmq has no name


class ChildSettings(msgspec.Struct, frozen=True):
    """A child's first words, read from its stdin."""

    name: str
    actor_id: int
    endpoint: str
    parent_pid: int
    sys_path: list[str]
    arena_in: int
    """File descriptor of the arena that the child reads; -1 without shared memory."""
    arena_out: int


class ChildChannel:
    """One child process, from its launch to its end. See `Channel`."""

    def __init__(
        self,
        name: str,
        placement: ChildProcess,
        context: zmq.Context[zmq.Socket[bytes]],
        on_message: OnMessage,
        on_end: OnEnd,
        actor_id: int = 0,
    ) -> None:
        self.name, self.actor_id, self._on_end = name, actor_id, on_end
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        endpoint = f"ipc://@vla_rl-{os.getpid()}-{secrets.token_hex(16)}"
        socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(_IPC_FILTER_UID, os.getuid())
        socket.bind(endpoint)
        self._socket = LoopSocket(socket, on_message)
        arenas = [create_arena(placement.arena_bytes) for _ in range(2)] if placement.arena_bytes else []
        arena_in, arena_out = arenas or (-1, -1)
        settings = ChildSettings(name, actor_id, endpoint, os.getpid(), sys.path, arena_in, arena_out)
        self.codec = Codec(SlotWriter(arena_in), SlotReader(arena_out)) if arenas else Codec()
        stderr_read, stderr_write = os.pipe()
        try:
            self._process = _start(settings, placement, arenas, stderr_write)
        except OSError:
            self._socket.close()
            os.close(stderr_read)
            raise
        finally:
            for fd in (*arenas, stderr_write):
                os.close(fd)
        self._stderr = StderrTail(stderr_read, name)
        self._pidfd = os.pidfd_open(self._process.pid)
        self._loop.add_reader(self._pidfd, self._end)

    @property
    def on_message(self) -> OnMessage:
        """Called with each message of the child."""
        return self._socket.on_message

    @on_message.setter
    def on_message(self, on_message: OnMessage) -> None:
        self._socket.on_message = on_message

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def send(self, frames: Frames) -> None:
        """Queue one message; where the child is gone it is dropped."""
        self._socket.send(frames)

    def poll(self) -> None:
        """Deliver what has already arrived."""
        self._socket.drain_all()

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process."""
        if not self._gone.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def until_gone(self) -> None:
        """Wait until the process is reaped."""
        await asyncio.shield(self._gone)

    def _end(self) -> None:
        """The process is gone: take its last answers and words, free everything, tell the owner."""
        returncode = self._process.wait()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._socket.drain_all()
        self._socket.close()
        self._stderr.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._gone.set_result(None)
        self._on_end(Death(self.pid, _cause_of(returncode), self._stderr.last_lines))


def _start(
    settings: ChildSettings, placement: ChildProcess, arenas: list[int], stderr: int
) -> "subprocess.Popen[bytes]":
    package_parent = str(Path(vla_rl.__file__).parent.parent)
    python_path = os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")]))
    # Ctrl-C goes to the whole process group: a child must not die of it before it can say so.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "vla_rl.actors.child", settings.name],
            stdin=subprocess.PIPE,
            bufsize=0,
            stderr=stderr,
            pass_fds=arenas,
            env={**os.environ, "PYTHONPATH": python_path, **placement.env},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert process.stdin is not None
    words = msgspec.json.encode(settings)
    with contextlib.suppress(BrokenPipeError):  # it is gone already, as its pidfd will tell
        process.stdin.write(len(words).to_bytes(4, "little") + words)
    return process


def _cause_of(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
