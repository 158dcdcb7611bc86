"""Find and kill all processes that a process started.

A process and its parent are marked as subreapers: orphans below them become a child of one of them,
even after a new session or a double fork. So all processes stay reachable through
`/proc/<pid>/task/*/children`.
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
    """Make this process the parent of orphans below it. Raises: OSError."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> list[int]:
    """Return the children of a process, with zombies; empty if it is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(
                    int,
                    Path(f"/proc/{pid}/task/{task}/children").read_text(encoding="utf-8").split(),
                )
    return found


def descendants_of(pid: int, most: int = 1 << 20) -> list[int]:
    """Return the descendants of a process, the nearest first; at most `most`."""
    found: list[int] = []
    ahead = [pid]
    while ahead and len(found) < most:
        below = children_of(ahead.pop(0))
        found += below
        ahead += below
    return found[:most]


def kill_all_below(pid: int) -> None:
    """Kill all descendants of a live process, and wait at most 10 s for their end.

    Dying takes their own CPU time.

    Each round stops the processes before it kills them, so that forking processes cannot outrun it.
    """
    dead: set[int] = set()
    until = time.monotonic() + _MOST_S
    for num_rounds in itertools.count():
        found = descendants_of(pid)
        if dead.issuperset(found) or time.monotonic() > until:
            return  # no process died meanwhile, so no orphan is moving to another parent
        living = [child for child in found if _is_alive(child)]
        dead = set(found).difference(living)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for child in living:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(child, number)
        # at first without a pause, which a fork bomb would use; then the dying need the core
        if num_rounds >= _ROUNDS_WITHOUT_PAUSE:
            time.sleep(_PAUSE_S)


def kill_with_all_below(pid: int) -> None:
    """Kill a stuck child and all its descendants.

    It is stopped first, so that it starts no more processes.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        kill_all_below(pid)
        os.kill(pid, signal.SIGKILL)


def num_processes_of(uid: int) -> int:
    """Return the number of processes and threads of a user on this machine."""
    num = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                num += len(os.listdir(entry / "task"))
    return num


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process, such as R, S, T or Z.

    Empty if it is gone.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rsplit(")", 1)[1].split()[0]


def _is_alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z", "X")
