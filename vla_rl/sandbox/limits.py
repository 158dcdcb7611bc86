"""How long, how much and how many: the limits of one call in a process of its own."""

import math

from vla_rl.types import Config


class ProcessLimits(Config, frozen=True, kw_only=True):
    """Limits of one call. A call that passes one is killed with every process that it started."""

    timeout_s: float = 10.0
    """Wall-clock time, from its start."""

    cpu_s: int | None = None
    """CPU time of each process. None allows what one thread can use in `timeout_s`, and a second more, so that a busy loop
    ends by the clock."""

    memory_mb: int = 2048
    """Memory that all its processes hold together, and address space of each, in MiB, on top of what the function's process
    has when it is forked. Memory is added up ten times a second: it can pass the limit by what is allocated in between."""

    file_mb: int = 64
    """Size of each file that it writes, in MiB."""

    disk_mb: int = 256
    """Size of all its files together, /dev/shm included, in MiB. If it has mounts of its own, the files lie in memory, and
    a write beyond the limit fails with "No space left on device"; if not, the call is stopped."""

    output_kb: int = 1024
    """Size of its output, and of its returned value, in KiB each. Output up to the limit is kept."""

    max_processes: int = 16
    """Processes that it may have at a time, itself included."""

    network: bool = True
    """False refuses it the network and all unix sockets, if the kernel can; `CallResult.is_offline` says whether it did."""

    def __post_init__(self) -> None:
        self.require(0 < self.timeout_s < math.inf, "timeout_s", "> 0 seconds, and finite")
        self.require(self.cpu_s is None or self.cpu_s >= 1, "cpu_s", ">= 1")
        for field in ("memory_mb", "file_mb", "disk_mb", "output_kb", "max_processes"):
            self.require(getattr(self, field) >= 1, field, ">= 1")

    @property
    def most_cpu_s(self) -> int:
        """`cpu_s`, or what stands for None."""
        return math.ceil(self.timeout_s) + 1 if self.cpu_s is None else self.cpu_s
