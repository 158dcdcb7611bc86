"""Compile the control step once on a machine, however many processes start together."""

import contextlib
import fcntl
import time
from collections.abc import Iterator
from typing import Any

from vla_rl.envs.mujoco.loading import cache_folder

PATIENCE_S = 120.0
"""Longest wait for a process that compiles (s); after that a process compiles for itself."""


def call_compiled(function: Any, *arguments: Any) -> Any:
    """Call a function of numba's; its first call in a process holds the lock of all processes.

    The first process on a machine compiles for half a minute and keeps the code on disk. Those
    that start beside it wait, and read that code instead of compiling it too.
    """
    if function.overloads:  # compiled or read in this process
        return function(*arguments)
    with _holding_the_lock():
        return function(*arguments)


@contextlib.contextmanager
def _holding_the_lock() -> Iterator[None]:
    with (cache_folder() / "compiling.lock").open("w", encoding="utf-8") as lock:
        deadline = time.monotonic() + PATIENCE_S
        # the kernel frees the lock of a killed process; a stopped one keeps it
        while not _take(lock.fileno()) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield


def _take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
