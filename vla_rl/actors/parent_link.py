"""End a child with its parent, however the parent ends.

The kernel's parent-death signal does it, and a pipe as a second way.

A forked child's parent is its fork server, which it may outlive; its link is a pipe whose end the
kernel turns into SIGKILL.
"""

import ctypes
import fcntl
import os
import signal
import threading
from typing import Final

from vla_rl.actors.readiness import is_ready

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_F_SETSIG = 10  # F_SETSIG, for which Python has no name before 3.13


FROM_TERMINAL: Final = frozenset({signal.SIGINT, signal.SIGHUP})
"""Signals that a terminal sends to all processes of its group: on Ctrl-C, and when it closes. The
parent decides what they mean; it starts a child with these signals blocked."""


def leave_terminal_to_parent() -> None:
    """Ignore the signals of a terminal from now on."""
    for number in FROM_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_TERMINAL)


def die_with_parent(parent_pid: int, pipe_fd: int) -> None:
    """Ask for SIGKILL when the parent dies; also exit when `pipe_fd` is closed.

    The parent holds the other end of `pipe_fd`.

    Both work while this process's loop is blocked. A parent that died before we asked is noticed
    too.
    """
    die_with_parent_only(parent_pid)
    threading.Thread(
        target=_exit_at_end_of, args=(pipe_fd,), name="parent-watch", daemon=True
    ).start()


def die_with_parent_only(parent_pid: int) -> None:
    """Ask for SIGKILL when the parent dies, without the pipe.

    For a process that may not have a second thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # the kernel sends nothing for a parent that was dead already
    if os.getppid() != parent_pid:
        os._exit(1)


def die_with_pipe(pipe_fd: int) -> None:
    """Ask for SIGKILL when the other end of this pipe is closed, even while this process is busy.

    The kernel reports a pipe's end like input (O_ASYNC), with the signal of our choice (F_SETSIG).
    """
    fcntl.fcntl(pipe_fd, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe_fd, fcntl.F_SETFL, fcntl.fcntl(pipe_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if is_ready(pipe_fd):  # it was closed before we asked
        os._exit(1)


def name_process(name: str) -> None:
    """Show the first 15 bytes of `name` in ps and top."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _exit_at_end_of(pipe_fd: int) -> None:
    while os.read(pipe_fd, 1):
        pass
    os._exit(1)
