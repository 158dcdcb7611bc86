"""Prepare hooks for fork servers under test."""

import contextlib
import os
import signal
import stat
import threading
import time
from typing import Any

import numpy as np

from vla_rl.actors import Actor

SHARED: dict[str, Any] = {}


def remember(word: str, megabytes: int = 0) -> None:
    """Leave a word, and memory, to the children."""
    SHARED["word"] = word
    SHARED["made_by"] = os.getpid()
    SHARED["weight"] = np.ones(megabytes * 2**20, np.uint8)


def fail() -> None:
    """Raise, as for a missing file."""
    raise FileNotFoundError("scene.xml is missing from the assets")


def print_and_fail() -> None:
    """Say what is the matter, and raise."""
    print("looked in /usr/share/scenes")
    fail()


def exit_with(code: int) -> None:
    """End the server, with a word on stderr."""
    os.write(2, b"out of memory\n")
    os._exit(code)


def send_rubbish(content: str) -> None:
    """Write to the socket on which the server replies."""
    for number in range(3, 100):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, content.encode())


def hang() -> None:
    """Never end."""
    time.sleep(3600)


def start_thread() -> None:
    """Leave a thread behind."""
    threading.Thread(target=time.sleep, args=(3600,), name="prefetcher", daemon=True).start()


def start_lasting_thread() -> None:
    """Leave a thread behind that an exit waits for."""
    threading.Thread(target=time.sleep, args=(3600,), name="writer").start()


def stop_itself() -> None:
    """Stand still, as for SIGSTOP from elsewhere."""
    os.kill(os.getpid(), signal.SIGSTOP)


def take_time(seconds: float) -> None:
    """Prepare slowly."""
    time.sleep(seconds)


class Heir(Actor):
    """Tells what its process was left."""

    async def word(self) -> str:
        return str(SHARED.get("word"))

    async def made_by(self) -> int:
        return int(SHARED.get("made_by", 0))

    async def num_shared_bytes(self) -> int:
        return int(SHARED["weight"].size)

    async def private_mb(self) -> float:
        with open("/proc/self/smaps_rollup") as lines:  # noqa: ASYNC230  a file of the kernel
            return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024

    async def parent(self) -> int:
        return os.getppid()

    async def random_numbers(self) -> list[float]:
        import random

        return [random.random(), float(np.random.random()), float(np.random.default_rng().random())]

    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    async def open_files(self) -> list[str]:
        """What the descriptors of this process are, anonymous numbers left out."""
        found = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                found.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
            except FileNotFoundError:
                continue  # the listing's own
        return sorted(found)

    async def hold_the_interpreter(self) -> None:
        """Block every thread of this process, as code that never lets go of the
        interpreter does.
        """
        import ctypes

        ctypes.PyDLL(None).sleep(3600)

    async def compute_with_the_interpreter_held(self, cpu_s: float) -> int:
        """Use that much CPU time inside of one call that never lets go of the interpreter.

        How many calls it took.
        """
        began, size, num_calls = time.process_time(), 1 << 18, 0
        while time.process_time() - began < cpu_s:
            num_calls += 1
            size *= 2
            (1 << size) // 3 % 7
        return num_calls
