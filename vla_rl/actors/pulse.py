"""The heartbeat of a child process: a counter in a page of memory that it shares with its parent.

A thread of the child increments it a few times a second, whatever its other threads do, as long as
they release the interpreter lock now and then. Reading the counter costs the parent no system call.
"""

import mmap
import os
import threading
from time import sleep  # bound here: an environment may replace the module's

from vla_rl.util.processes import make_memory_file

BEAT_EVERY_S = 0.25


class Pulse:
    """The parent's end. `fd` is for the child; close it once the child has it."""

    def __init__(self) -> None:
        self.fd = make_memory_file("vla_rl-pulse", mmap.PAGESIZE)
        try:
            self._counter = _counter_of(self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def beats(self) -> int:
        """Number of beats so far; 0 until the child begins."""
        return self._counter[0]


def begin_beating(fd: int) -> None:
    """Beat until this process ends, in the page behind `fd`, which is closed."""
    counter = _counter_of(fd)
    os.close(fd)
    threading.Thread(target=_beat, args=(counter,), name="pulse", daemon=True).start()


def _beat(counter: "memoryview[int]") -> None:
    while True:
        counter[0] += 1
        sleep(BEAT_EVERY_S)


def _counter_of(fd: int) -> "memoryview[int]":
    return memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")
