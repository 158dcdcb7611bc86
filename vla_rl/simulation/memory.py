"""How much memory a process holds for itself, and how much the machine has left."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")

_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""What counts as used by a control group, and is given up by the kernel where a process wants it: mostly cached files."""


def private_mb(pid: int) -> float:
    """Resident memory that the process shares with nobody, in MiB: what its end would give back; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def available_mb() -> float:
    """Memory that a new process can have, in MiB: what the machine has left, or less where our control group is limited."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    left = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 1024
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()) != "max":
        left = min(left, (int(text) - int(used.read_text()) + _reclaimable()) / 2**20)
    return left


def _reclaimable() -> int:
    """Bytes that our control group could give up at once, as MemAvailable counts them for the machine."""
    pairs = (line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    return sum(int(size) for name, size in pairs if name in _RECLAIMABLE)
