"""Finding and killing all that a process started, wherever it hid.

A process and the one above it are marked as subreapers: what is orphaned below becomes a child of one of them, a new session
or two forks notwithstanding, so that everything stays reachable from `/proc/<pid>/task/*/children`.
"""

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Final

from vla_rl.sandbox.linux import PR_SET_CHILD_SUBREAPER, prctl

_MOST_S: Final = 10.0
_ROUNDS_WITHOUT_PAUSE: Final = 5
_PAUSE_S: Final = 0.001


def become_subreaper() -> None:
    """Have orphans below this process handed to it. Raises: OSError."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> list[int]:
    """The children of a process, zombies included; none if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants_of(pid: int, most: int = 1 << 20) -> list[int]:
    """Everything below a process, those nearest to it first; no more than `most`."""
    found: list[int] = []
    ahead = [pid]
    while ahead and len(found) < most:
        below = children_of(ahead.pop(0))
        found += below
        ahead += below
    return found[:most]


def kill_all_below(pid: int) -> None:
    """Kill everything below a live process, and wait until it is dead: 10 s at most, as a process dies on its own CPU time.

    Each round stops before it kills, so that what forks cannot outrun it.
    """
    dead: set[int] = set()
    until = time.monotonic() + _MOST_S
    for num_rounds in itertools.count():
        found = descendants_of(pid)
        if dead.issuperset(found) or time.monotonic() > until:
            return  # no process died as we looked, so no orphan is on its way to another parent
        living = [child for child in found if _is_alive(child)]
        dead = set(found).difference(living)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for child in living:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, number)
        if num_rounds >= _ROUNDS_WITHOUT_PAUSE:
            time.sleep(_PAUSE_S)


def kill_with_all_below(pid: int) -> None:
    """Kill a child that is stuck, and everything below it. It is stopped first, so that it starts no more processes."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        kill_all_below(pid)
        os.kill(pid, signal.SIGKILL)


def num_processes_of(uid: int) -> int:
    """Processes of a user on this machine, and their threads."""
    num = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                num += len(os.listdir(entry / "task"))
    return num


def state_of(pid: int) -> str:
    """The kernel's letter for the state of a process, such as R, S, T or Z; empty if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rsplit(")", 1)[1].split()[0]


def _is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")
