"""How much memory there is, and how much a run will take: what `--dry-run` prints before anything starts."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from rich.table import Table

GIB = 2**30


@dataclass(frozen=True)
class MemoryItem:
    """One line of an estimate: so many things of so many bytes each."""

    name: str
    bytes_each: int
    count: int = 1

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.bytes_each * self.count


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU."""

    name: str
    total_bytes: int
    free_bytes: int


def available_bytes() -> int:
    """Main memory that new processes can get without swapping."""
    return int(psutil.virtual_memory().available)


def resident_bytes(pid: int | None = None) -> int:
    """Resident memory of a process (None: this one) and its descendants; pages that they share count once for each."""
    process = psutil.Process(pid)
    total = 0
    for member in (process, *process.children(recursive=True)):
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # ended since it was listed
    return total


def gpu_memory() -> list[GpuMemory]:
    """Memory of each NVIDIA GPU as `nvidia-smi` sees it; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return parse_gpu_memory(done.stdout) if done.returncode == 0 else []


def parse_gpu_memory(text: str) -> list[GpuMemory]:
    """Read lines of `name, MiB in all, MiB free`; a GPU that does not tell its memory is left out."""
    gpus = []
    for line in text.splitlines():
        name, _, numbers = line.partition(", ")
        total, _, free = numbers.partition(", ")
        if total.isdecimal() and free.isdecimal():
            gpus.append(GpuMemory(name, int(total) * 2**20, int(free) * 2**20))
    return gpus


def memory_table(title: str, items: Sequence[MemoryItem], available: int) -> Table:
    """An estimate as a table: each item, the sum, and what is available, marked where the sum does not fit."""
    total = sum(item.total_bytes for item in items)
    table = Table("what", "each", "count", "GiB", title=title, show_footer=True)
    for item in items:
        table.add_row(item.name, f"{item.bytes_each / GIB:.3f}", str(item.count), f"{item.total_bytes / GIB:.2f}")
    verdict = "fits in" if total <= available else "DOES NOT FIT in"
    table.columns[0].footer = f"in all; {verdict} the {available / GIB:.2f} GiB available"
    table.columns[3].footer = f"{total / GIB:.2f}"
    for column in table.columns[1:]:
        column.justify = "right"
    return table
