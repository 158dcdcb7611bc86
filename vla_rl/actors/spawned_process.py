"""A child in a fresh interpreter, never a fork of this process.

This process may have threads, a loop and a GPU context.

It reads its settings from stdin, whose other end we hold, so that it closes with us. Its end is
read from a pidfd, at once and without idle cost; a socket would not report it.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

import vla_rl
from vla_rl.actors.fork_protocol import ChildSettings
from vla_rl.actors.placement import ChildProcess
from vla_rl.util.processes import FROM_TERMINAL, inherited_environment

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


class SpawnedProcess:
    """A fresh interpreter.

    See `StartProcess` for the arguments; raises what `subprocess_of` raises.
    """

    def __init__(
        self, placement: ChildProcess, settings: ChildSettings, stderr: int, on_exit: OnExit
    ) -> None:
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        words = msgspec.json.encode(settings)
        self._process = subprocess_of(
            placement,
            ["vla_rl.actors.child", settings.name],
            placement.env,
            stderr,
            pass_fds=[*settings.shared_fds.values()],
            stdin=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has already ended, as its pidfd will show
            self._process.stdin.write(len(words).to_bytes(4, "little") + words)
        # a number may belong to another process by the time of a kill; a descriptor never does
        self._pidfd = os.pidfd_open(self.pid)
        self.has_ended = False
        self._loop.add_reader(self._pidfd, self._end)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def kill(self) -> None:
        """Send SIGKILL, which also ends a stopped process."""
        if not self.has_ended:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _end(self) -> None:
        returncode = self._process.wait()
        self.has_ended = True
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._on_exit(cause_of(returncode), ())


def subprocess_of(
    placement: ChildProcess,
    module_and_arguments: list[str],
    env: dict[str, str],
    stderr: int,
    pass_fds: Sequence[int],
    stdin: int,
) -> "subprocess.Popen[bytes]":
    """Start a fresh interpreter that runs one of our modules.

    It inherits only the environment and stdout of this process.

    Raises: OSError if it cannot be started; ValueError for an environment variable that is not
    valid.
    """
    own_path = [] if placement.python else [str(Path(vla_rl.__file__).parent.parent)]
    inherited = inherited_environment()
    python_path = os.pathsep.join(filter(None, [*own_path, inherited.get("PYTHONPATH")]))
    # A terminal signals the whole process group: a child must not die of it before it ignores it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_TERMINAL)
    try:
        return subprocess.Popen(
            [placement.python or sys.executable, "-P", "-m", *module_and_arguments],
            stdin=stdin,
            bufsize=0,
            stderr=stderr,
            pass_fds=pass_fds,
            env={**inherited, "PYTHONPATH": python_path, **env},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def own_sys_path(placement: ChildProcess) -> list[str] | None:
    """Return the `sys.path` for the child: ours, or None to keep that of another interpreter."""
    return None if placement.python else [str(entry) for entry in sys.path]


def cause_of(returncode: int) -> str:
    """Describe an exit status: `exit code 3`, or the name of the signal."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
