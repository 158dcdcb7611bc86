"""A started process as its channel sees it: a fresh interpreter, or a fork of a fork server.

This process may have threads, a loop, a GPU context, so it is never forked itself. A fresh interpreter
reads its settings from stdin, whose other end we hold, so that it closes with us. Its end is
read from a pidfd, at once, without idle cost; a socket would not report it. For a forked child the
server reports how it ended, the kernel that it ended. The last lines of stderr are kept for errors.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

import vla_rl
from vla_rl.actors.placement import ChildProcess
from vla_rl.actors.processes.fork_server import Fork
from vla_rl.actors.wire.envelope import ChildSettings
from vla_rl.util.processes import FROM_TERMINAL, inherited_environment

_LINES_KEPT = 20
_LONGEST_LINE = 2000


class StderrTail:
    """Reads the pipe `fd` on the running loop; owns it."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name
        self._rest = b""
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._open = True
        os.set_blocking(fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first, including an unfinished one."""
        unfinished = [self._rest.decode(errors="replace")] if self._rest else []
        return tuple([*self._lines, *unfinished][-_LINES_KEPT:])

    def close(self) -> None:
        """Read the rest, without waiting for descendants that may hold the pipe, and close it."""
        if self._open:
            # A descendant may hold the pipe open for ever: what is there is read, its end is not awaited.
            while self._open and self._read():
                pass
            if self._rest:
                self._take_line(self._rest)
                self._rest = b""
            self._shut()

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._shut()
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take_line(line)
        # A progress bar writes megabytes without a line end.
        if len(self._rest) > _LONGEST_LINE:
            self._take_line(self._rest)
            self._rest = b""
        return True

    def _take_line(self, line: bytes) -> None:
        text = line[:_LONGEST_LINE].decode(errors="replace")
        self._lines.append(text)
        with contextlib.suppress(
            OSError, ValueError
        ):  # our stderr may be closed; the child's end must be noticed anyway
            sys.stderr.write(f"[{self._name}] {text}\n")

    def _shut(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            os.close(self._fd)


OnExit = Callable[[str, tuple[str, ...]], None]
"""Called once, on the loop, when the process has ended: with the cause, and stderr lines if it
could not be started."""


class StartedProcess(Protocol):
    """A process as its channel sees it, from its start to its end."""

    @property
    def pid(self) -> int:
        """Process id; 0 until there is one."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether it is known to have ended; `on_exit` follows, or was called."""
        ...

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process; `on_exit` follows.

        Does nothing if it has ended.
        """
        ...


StartProcess = Callable[[ChildProcess, ChildSettings, int, OnExit], StartedProcess]
"""Starts a process: (placement, settings, stderr, on_exit). The caller keeps and closes all
descriptors."""


class ProcessDescriptor:
    """A process by its descriptor, which the kernel makes readable when it ends.

    Args:
        pid: its number.
        on_end: called once, on the running loop, unless this is closed before.
    """

    def __init__(self, pid: int, on_end: Callable[[], object]) -> None:
        self._on_end = on_end
        # a number may belong to another process by the time of a kill; a descriptor never does
        self._fd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._end)

    def send_kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process; do nothing once it has ended."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):  # somebody else has reaped it
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of the process."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _end(self) -> None:
        self.close()
        self._on_end()


class InterpreterProcess:
    """A fresh interpreter that runs one of our modules. See `StartedProcess`.

    The arguments are those of `start_interpreter`, which says what it raises; `on_exit`: see `OnExit`.
    """

    def __init__(
        self,
        placement: ChildProcess,
        module_and_arguments: list[str],
        on_exit: OnExit,
        *,
        stderr: int | None,
        pass_fds: Sequence[int],
        stdin: int,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._on_exit = on_exit
        self._process = start_interpreter(
            placement, module_and_arguments, stderr, pass_fds, stdin, env
        )
        self._descriptor = ProcessDescriptor(self.pid, self._end)
        self.has_ended = False

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        self._descriptor.send_kill()

    def _end(self) -> None:
        returncode = self._process.wait()
        self.has_ended = True
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._on_exit(describe_exit_status(returncode), ())


class SpawnedProcess(InterpreterProcess):
    """A fresh interpreter that becomes an actor. See `StartProcess` for the arguments."""

    def __init__(
        self, placement: ChildProcess, settings: ChildSettings, stderr: int, on_exit: OnExit
    ) -> None:
        super().__init__(
            placement,
            ["vla_rl.actors.processes.child", settings.name],
            on_exit,
            stderr=stderr,
            pass_fds=[*settings.shared_fds.values()],
            stdin=subprocess.PIPE,
        )
        words = msgspec.json.encode(settings)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has already ended, as its pidfd will show
            self._process.stdin.write(len(words).to_bytes(4, "little") + words)


def start_interpreter(
    placement: ChildProcess,
    module_and_arguments: list[str],
    stderr: int | None,
    pass_fds: Sequence[int],
    stdin: int,
    env: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Start a fresh interpreter that runs one of our modules.

    It inherits only the environment and stdout of this process.

    Args:
        env: all of its environment, for a process that must not read ours; it also gets a session of
            its own then, which no terminal signals. None: ours, with the placement's variables.

    Raises: OSError if it cannot be started; ValueError for an environment variable that is not
    valid.
    """
    variables = env
    if variables is None:
        inherited = inherited_environment()
        own_path = [] if placement.python else [str(Path(vla_rl.__file__).parent.parent)]
        python_path = os.pathsep.join(filter(None, [*own_path, inherited.get("PYTHONPATH")]))
        variables = {**inherited, "PYTHONPATH": python_path, **placement.env}
    # A terminal signals the whole process group: a child must not die of it before it ignores it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_TERMINAL if env is None else ())
    try:
        return subprocess.Popen(
            [placement.python or sys.executable, "-P", "-m", *module_and_arguments],
            stdin=stdin,
            bufsize=0,
            stderr=stderr,
            pass_fds=pass_fds,
            env=variables,
            start_new_session=env is not None,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def get_own_sys_path(placement: ChildProcess) -> list[str] | None:
    """Return the `sys.path` for the child: ours, or None to keep that of another interpreter."""
    return None if placement.python else [str(entry) for entry in sys.path]


def describe_exit_status(returncode: int) -> str:
    """Describe an exit status: `exit code 3`, or the name of the signal."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


_STATUS_WITHIN_S = 10.0
"""Time to wait for the server's report on a child's end: on a busy machine its only thread may be
delayed."""


class ForkedProcess:
    """One child of a fork server. See `StartedProcess`.

    Args:
        withdraw: takes it off the server's queue; returns False if it was requested already.
        request, fds: what its server sends, and closes with `close_fds`: stderr and shared memory.
        on_exit: see `OnExit`.
    """

    def __init__(
        self,
        withdraw: Callable[["ForkedProcess"], bool],
        request: Fork,
        fds: list[int],
        on_exit: OnExit,
    ) -> None:
        self._withdraw, self.request, self._on_exit = withdraw, request, on_exit
        self._loop = asyncio.get_running_loop()
        self.pid = 0
        read_end, self._lifeline = (
            os.pipe()
        )  # the child dies when ours is closed, at the latest with us
        self.fds = [read_end, *fds]
        self._pidfd = -1
        self._is_kill_requested = self._has_exited = False
        self.has_ended = False
        self._server_is_lost = False
        self._timer: asyncio.TimerHandle | None = None

    def close_fds(self) -> None:
        """Close the descriptors that were sent."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def kill(self) -> None:
        """Send SIGKILL; if it is not forked yet, it will not be, or will be killed at once."""
        self._is_kill_requested = True
        if self._pidfd >= 0:
            # its server has reaped it, and will report that
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        elif not self._has_exited and self._withdraw(self):
            self.end_unforked("killed before it was forked", ())

    def on_forked(self, pid: int, pidfd: int) -> None:
        """Record that the child was forked."""
        self.pid, self._pidfd = pid, pidfd
        self._loop.add_reader(pidfd, self._on_exited)
        if self._is_kill_requested:
            self.kill()

    def on_status(self, returncode: int) -> None:
        """Record that the server has reaped it."""
        self._end(describe_exit_status(returncode))

    def on_server_lost(self) -> None:
        """Record that the server has ended: its report on this child's end will not come."""
        self._server_is_lost = True
        if self.has_ended:
            self._end_unknown()

    def end_unforked(self, cause: str, words: tuple[str, ...]) -> None:
        """Report the end of a child that was never forked."""
        self._finish(cause, words)

    def _on_exited(self) -> None:
        """Wait for the server's report on how it ended, unless the server itself has ended."""
        self.has_ended = True
        self._loop.remove_reader(self._pidfd)
        # Only the process that forked it may ask for its exit status, and that is the server.
        if self._server_is_lost:
            self._end_unknown()
        else:
            self._timer = self._loop.call_later(_STATUS_WITHIN_S, self._end_unknown)

    def _end_unknown(self) -> None:
        self._end(
            "unknown, since its fork server is gone"
            if self._server_is_lost
            else "unknown to its fork server"
        )

    def _end(self, cause: str) -> None:
        if self._has_exited:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._finish(cause, ())

    def _finish(self, cause: str, words: tuple[str, ...]) -> None:
        if self._has_exited:
            return
        self._has_exited = self.has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        os.close(self._lifeline)
        self.close_fds()
        self._on_exit(cause, words)
