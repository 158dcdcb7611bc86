"""Child processes: what they get from this process, how they end with it.

`overlay_environment` changes variables that belong to the whole process. Children started
meanwhile through `inherited_environment` get the earlier values; variables that other code sets
meanwhile keep their values.

A child ends with its parent, however the parent ends: the kernel's parent-death signal sees to it, with a
pipe as a second way. A forked child's parent is its fork server, which it may outlive; its link is a pipe
whose end the kernel turns into SIGKILL.

Memory that processes share is a file without a name, so that none is left behind. Its size is final: if
one process could shorten it, SIGBUS would end another that reads or writes there.
"""

import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_lock = threading.Lock()
_overlays: list["_Overlay"] = []


class _Overlay:
    """Variables of a borrower: those that it names, and all with its library's prefixes."""

    def __init__(self, names: set[str], prefixes: tuple[str, ...]) -> None:
        self._names, self._prefixes = names, prefixes
        self._before = {name: value for name, value in os.environ.items() if self._is_theirs(name)}

    def put_back(self, variables: MutableMapping[str, str]) -> None:
        """Restore its variables to their earlier values."""
        for name in [
            name for name in variables if self._is_theirs(name) and name not in self._before
        ]:
            del variables[name]
        variables.update(self._before)

    def _is_theirs(self, name: str) -> bool:
        return name in self._names or name.startswith(self._prefixes)


@contextmanager
def overlay_environment(values: Mapping[str, str], prefixes: tuple[str, ...]) -> Iterator[None]:
    """Set variables of this process while the block runs. One block at a time.

    Args:
        values: set at the beginning, and restored at the end.
        prefixes: prefixes of variables that the block's own work may set; those are restored too.
    """
    with _lock:
        overlay = _Overlay(set(values), prefixes)
        _overlays.append(overlay)
        os.environ.update(values)
    try:
        yield
    finally:
        with _lock:
            overlay.put_back(os.environ)
            _overlays.remove(overlay)


def inherited_environment() -> dict[str, str]:
    """Return this process's variables for a child, without those that are borrowed.

    `overlay_environment` borrows them.
    """
    with _lock:
        # An engine of vLLM starts for seconds in a thread; a simulator that starts meanwhile would
        # take over its variables.
        variables = dict(os.environ)
        for overlay in _overlays:
            overlay.put_back(variables)
        return variables


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
        target=_exit_with_pipe, args=(pipe_fd,), name="parent-watch", daemon=True
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
    # Without an owner, the kernel sends the signal to nobody.
    fcntl.fcntl(pipe_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe_fd, fcntl.F_SETFL, fcntl.fcntl(pipe_fd, fcntl.F_GETFL) | os.O_ASYNC)
    if is_ready(pipe_fd):  # it was closed before we asked
        os._exit(1)


def name_process(name: str) -> None:
    """Show the first 15 bytes of `name` in ps and top."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _exit_with_pipe(pipe_fd: int) -> None:
    while os.read(pipe_fd, 1):
        pass
    os._exit(1)


def query_gpus(fields: str) -> str:
    """Return `nvidia-smi`'s lines of these fields, one for each GPU; empty if it lists none.

    It takes a second or more, and torch, whose import takes longer, is not needed.
    """
    import subprocess  # here: simulators and fork servers import this file, and start no program

    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20.0,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):  # most machines without a GPU do not have it
        return ""
    # without a driver it writes its complaint to where the lines would be
    return done.stdout if done.returncode == 0 else ""


def is_ready(fd: int) -> bool:
    """Return whether a read of `fd` would not wait; for a pidfd, whether its process has ended.

    Uses poll(), since select() takes no descriptor above 1023, and a runtime of many processes has
    those.
    """
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(0))


def list_other_threads() -> list[str]:
    """Return the names of all threads but the first, sorted.

    For threads of C libraries they are the names that the kernel shows.
    """
    tasks = [task for task in Path("/proc/self/task").iterdir() if int(task.name) != os.getpid()]
    known = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = []
    for task in tasks:
        with suppress(OSError):  # it has ended since the folder was listed
            names.append(
                known.get(int(task.name))
                or (task / "comm").read_text(encoding="utf-8", errors="replace").strip()
            )
    return sorted(names)


def refuse_threads(culprit: str) -> None:
    """Raise RuntimeError if there are other threads.

    A fork would lack them, and hold their locks for ever.
    """
    if names := list_other_threads():
        raise RuntimeError(
            f"{culprit} left {len(names)} threads running in the fork server "
            f"({', '.join(names)}); a process with threads "
            "cannot be forked safely. Leave them to the children, or start the children as fresh "
            "interpreters."
        )


def make_memory_file(name: str, num_bytes: int) -> int:
    """Return the descriptor of new memory, zeros; it is freed with its last user.

    Args:
        name: shown by the kernel, for people.
        num_bytes: its size.

    Raises: OSError naming the limit, if a limit forbids this size.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        # Sealed at once, before anyone else has the descriptor.
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        os.close(descriptor)
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if error.errno == errno.EFBIG and most != resource.RLIM_INFINITY:
            raise OSError(
                errno.EFBIG,
                f"{num_bytes} bytes of memory for processes to share cannot be made: the limit on the "
                f"size of files is {most} bytes and holds for them too, expected none; set `ulimit -f "
                "unlimited`",
            ) from None
        raise
    return descriptor
