"""Measure how much memory a process holds for itself, and how much the machine has left."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Memory that counts as used by a control group, but that the kernel frees on demand: mostly cached
files."""


def private_mb(pid: int) -> float:
    """Return the resident memory that a process's end would free (MiB); 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def holds_more_than(pid: int, limit_mb: float) -> bool:
    """Return whether a process's end would free more than `limit_mb` (MiB).

    The exact figure takes the kernel tens of milliseconds for a simulator, whose pages it counts one
    by one. Resident memory is never less and is a counter, so most questions end with it.
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return False
    return pages * _PAGE_BYTES > limit_mb * 2**20 and private_mb(pid) > limit_mb


def available_mb() -> float:
    """Return the memory left for a new process (MiB).

    It is that of the machine, or less if our control group is limited.
    """
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    left = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1024
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if (
        limit.is_file()
        and used.is_file()
        and (text := limit.read_text(encoding="utf-8").strip()) != "max"
    ):
        left = min(
            left, (int(text) - int(used.read_text(encoding="utf-8")) + _reclaimable()) / 2**20
        )
    return left


def _reclaimable() -> int:
    """Return the bytes that our control group could free at once.

    They are counted as MemAvailable counts them for the machine.
    """
    pairs = (
        line.split() for line in (_CGROUP / "memory.stat").read_text(encoding="utf-8").splitlines()
    )
    return sum(int(size) for name, size in pairs if name in _RECLAIMABLE)
