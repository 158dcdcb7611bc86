"""CPU seconds of a command with all processes that it starts, and a limit of them.

On a machine that others use too, minutes say little about the cost of a run.
"""

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from vla_rl.util.atomic_files import replace_file

POLL_S: Final = 2.0


class CpuLimitExceeded(ValueError):
    """A command was stopped because it took too many CPU seconds."""


def run_counted(command: Sequence[str], counted: Path, limit_s: float) -> float:
    """Run a command to its end; return its CPU seconds, with those of earlier calls that were
    stopped before their end.

    Args:
        command: the command; what it prints goes to this process's errors.
        counted: file with the seconds so far, written while the command runs.
        limit_s: CPU seconds after which the command is stopped by SIGTERM.

    Raises: CalledProcessError if the command fails; CpuLimitExceeded.
    """
    before = read_counted(counted)
    waited = _waited_for()
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        seen: dict[tuple[int, float], float] = {}
        while process.poll() is None:
            _count_tree(process.pid, seen)
            total = before + sum(seen.values())
            replace_file(counted, f"{total:.2f}\n".encode())
            if total > limit_s:
                raise CpuLimitExceeded(
                    f"{' '.join(command)} took {total:.0f} CPU seconds, expected at most "
                    f"{limit_s:.0f}; take fewer updates or smaller ones, in a new folder of runs"
                )
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait()
    # What ended between two looks is in the first of the two, what nobody waited for in the second.
    total = before + max(_waited_for() - waited, sum(seen.values()))
    replace_file(counted, f"{total:.2f}\n".encode())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return total


def read_counted(counted: Path) -> float:
    """Return the seconds so far; 0 without a file."""
    return float(counted.read_text()) if counted.exists() else 0.0


def _waited_for() -> float:
    """Return the CPU seconds of all ended descendants that their parents waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _count_tree(pid: int, seen: dict[tuple[int, float], float]) -> None:
    """Note the CPU seconds of a process and its descendants; those that have ended stay."""
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in members:
        try:
            times = member.cpu_times()
            seen[member.pid, member.create_time()] = times.user + times.system
        except psutil.NoSuchProcess:
            continue
