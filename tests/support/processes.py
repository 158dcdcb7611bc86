"""Other processes, as a test sees them: who is alive, when it ends, what it could leave behind.

One of them serves a policy.
"""

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from vla_rl.models.shipped import BASE_POLICY

SHARED_MEMORY = re.compile(r" (/dev/shm/.+?)(?: \(deleted\))?$", re.MULTILINE)


def children_of(pid: int) -> set[int]:
    """Processes whose parent is `pid`."""
    return {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def processes_of_session(pid: int) -> Sequence[int]:
    """Processes still alive in the session that `pid` began."""
    alive = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # ended while we looked
        state, session = fields[0], int(fields[3])
        if session == pid and state != "Z":
            alive.append(int(entry.name))
    return alive


def all_end(pidfds: Iterable[int], within_s: float) -> bool:
    """Wait for the end of every process; closes the descriptors."""
    until = time.monotonic() + within_s
    ended = []
    for fd in pidfds:
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        ended.append(bool(waiting.poll(1000 * max(0.0, until - time.monotonic()))))
        os.close(fd)
    return all(ended)


def is_gone(pid: int) -> bool:
    """Dead; somebody else may have to reap it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def named_memory_of(pids: Iterable[int]) -> set[Path]:
    """Shared memory with a name that these processes have mapped, and that a kill could therefore
    leave behind.

    Not all of /dev/shm: other tests, and others on the machine, have theirs there.
    """
    names = set[Path]()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended while we looked
            names |= {
                Path(name) for name in SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text())
            }
    return names


def those_left(names: Iterable[Path]) -> list[Path]:
    """Which of them still exist."""
    return [name for name in names if name.exists()]


def said_by(program: str, *arguments: object) -> str:
    """Run a program, and return what it prints; if it fails, the test fails."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def serving(
    *options: str, checkpoint: str = str(BASE_POLICY)
) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Yield the server's address and its process, which is killed at the end if it still runs."""
    command = [sys.executable, "-m", "vla_rl.cli.main", "serve", checkpoint, "--server.port", "0"]
    process = subprocess.Popen([*command, *options], text=True, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("serving at "):
                yield line.split()[2].rstrip(";"), process
                return
        raise AssertionError(f"the server ended with status {process.wait()}")
    finally:
        process.kill()
        process.communicate()
