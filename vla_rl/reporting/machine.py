"""The machine of a run: its memory, its GPUs, and the versions of its software.

`--dry-run` prints the available memory with an estimate of what the run needs, before anything starts.
"""

import datetime
import functools
import importlib.metadata
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.table import Table

from vla_rl.util.processes import query_gpus

GIB = 2**30


@dataclass(frozen=True)
class MemoryItem:
    """One line of an estimate: a number of objects, and the bytes of each.

    Example:
        MemoryItem("simulator processes, private memory of each", 140 * 2**20, count=8)
    """

    name: str
    bytes_each: int
    count: int = 1

    @property
    def total_bytes(self) -> int:
        """Bytes of all the objects."""
        return self.bytes_each * self.count


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU.

    Example:
        GpuMemory(name="NVIDIA H100 80GB HBM3", total_bytes=85520809984, free_bytes=84825604096)
    """

    name: str
    total_bytes: int
    free_bytes: int


def available_bytes() -> int:
    """Return the bytes of main memory that new processes can get without swapping."""
    return int(psutil.virtual_memory().available)


def resident_bytes(pid: int | None = None) -> int:
    """Return the resident bytes of a process (None: this one) and its descendants.

    Shared pages count for each.
    """
    process = psutil.Process(pid)
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # ended since it was listed
    return total


def gpu_memory() -> list[GpuMemory]:
    """Return the memory of each NVIDIA GPU as `nvidia-smi` reports it; empty if there is none."""
    return parse_gpu_memory(query_gpus("name,memory.total,memory.free"))


def parse_gpu_memory(text: str) -> list[GpuMemory]:
    """Parse lines of `name, MiB in all, MiB free`.

    A GPU that does not report its memory is left out.
    """
    gpus = []
    for line in text.splitlines():
        name, _, numbers = line.partition(", ")
        total, _, free = numbers.partition(", ")
        # GPUs with unified memory say "[N/A]"
        if total.isdecimal() and free.isdecimal():
            gpus.append(GpuMemory(name, int(total) * 2**20, int(free) * 2**20))
    return gpus


def memory_table(title: str, items: Sequence[MemoryItem], available: int) -> Table:
    """Return an estimate as a table: each item, the sum, and the available memory.

    The sum is marked if it does not fit.
    """
    total = sum(item.total_bytes for item in items)
    table = Table("what", "each", "count", "GiB", title=title, show_footer=True)
    for item in items:
        table.add_row(
            item.name,
            f"{item.bytes_each / GIB:.3f}",
            str(item.count),
            f"{item.total_bytes / GIB:.2f}",
        )
    # said and not refused: the estimate is rough, and memory may become free
    verdict = "fits in" if total <= available else "DOES NOT FIT in"
    table.columns[0].footer = f"in all; {verdict} the {available / GIB:.2f} GiB available"
    table.columns[3].footer = f"{total / GIB:.2f}"
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def versions() -> dict[str, Any]:
    """Return Python, packages, commit, platform, command and time, as values for JSON."""
    return {
        "started_at": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": sys.version,
        "platform": platform.platform(),
        "host": platform.node(),
        "commit": git_commit(Path(__file__).parent),
        "packages": _package_versions(),
    }


def git_commit(folder: Path) -> str | None:
    """Return the commit of the git checkout around `folder`, with `-dirty` if files differ from it.

    None outside of one.
    """
    command = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        # without tags: the commit itself, also where a release has been tagged
        "--exclude=*",
    ]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=10.0,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


@functools.cache
def _package_versions() -> dict[str, str]:
    # Reading 150 descriptions takes 0.2 s, and a later run of this process has the same ones loaded.
    found = (package.metadata for package in importlib.metadata.distributions())
    return dict(sorted((about["Name"], about["Version"]) for about in found if "Name" in about))
