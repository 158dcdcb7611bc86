"""How a child dies with its parent, whatever kills it: the kernel's parent-death signal, and a pipe as a second rope."""

import ctypes
import os
import signal
import threading

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent_pid: int, pipe_fd: int) -> None:
    """Ask for SIGKILL when the parent dies; also exit when `pipe_fd`, whose other end it holds, is closed.

    Both work while this process's loop is blocked. A parent that died before we asked is noticed too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)
    threading.Thread(target=_exit_at_end_of, args=(pipe_fd,), name="parent-watch", daemon=True).start()


def name_process(name: str) -> None:
    """Show the first 15 bytes of `name` in ps and top."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _exit_at_end_of(pipe_fd: int) -> None:
    while os.read(pipe_fd, 1):
        pass
    os._exit(1)
