"""Processes, descriptors, shared memory and folders that outlive their creator.

The campaign is the reaper of its orphans (PR_SET_CHILD_SUBREAPER): a process whose parents all died
becomes a child of the campaign. So between two tries every descendant of the campaign is a process
that a try left behind.
"""

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from benchmarks.faults.one_try import Try

_PR_SET_CHILD_SUBREAPER: Final = 36
_SHARED_MEMORY: Final = re.compile(r" (/dev/shm/.+?)(?: \(deleted\))?$", re.MULTILINE)
ENDS_WITHIN_S: Final = 20.0
"""Most seconds until the descendants of an ended process have ended too. The package promises a few
seconds; a loaded machine needs longer."""


def become_subreaper() -> None:
    """Become the parent of every descendant whose own parent dies.

    Raises: OSError if the kernel does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(of: int | None = None) -> list[psutil.Process]:
    """Return the live processes below this one, or below `of`, without zombies."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [
            process for process in psutil.Process(of).children(recursive=True) if _lives(process)
        ]
    return []


def named_memory(pids: Iterable[int]) -> set[Path]:
    """Return the named shared memory that these processes have mapped, which a kill could leave
    behind.
    """
    names = set[Path]()
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended meanwhile
            names |= {
                Path(name) for name in _SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text())
            }
    return names


def num_descriptors(pid: int) -> int:
    """Return the number of descriptors that a process holds now."""
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextmanager
def nothing_left(case: Try) -> Iterator[None]:
    """Check after the block that no descendant, descriptor of ours or temporary file is left."""
    descriptors = num_descriptors(os.getpid())
    case.temporary.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        _end_descendants(case)
        case.left_behind += [f"temporary {path.name}" for path in sorted(case.temporary.iterdir())]
        if (more := num_descriptors(os.getpid()) - descriptors) > 0:
            case.left_behind.append(f"{more} descriptors of the campaign itself")


def note_memory_left(case: Try, names: Iterable[Path]) -> None:
    """Report named shared memory that still exists."""
    case.left_behind += [f"shared memory {name}" for name in names if name.exists()]


def reap() -> None:
    """Reap orphans that have ended, except children that `subprocess` waits for."""
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)


def _end_descendants(case: Try) -> None:
    until = time.monotonic() + ENDS_WITHIN_S
    while (left := descendants()) and time.monotonic() < until:
        reap()
        time.sleep(0.05)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            case.left_behind.append(
                f"process {process.pid}: {' '.join(process.cmdline())[:200] or process.name()}"
            )
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(left, timeout=10)
    reap()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
