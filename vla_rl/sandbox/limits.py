"""The limits of one call in a process of its own."""

import math

from vla_rl.types import Config


class ProcessLimits(Config, frozen=True, kw_only=True):
    """Limits of one call. A call that exceeds one is killed with every process that it started."""

    timeout_s: float = 10.0
    """Most seconds of wall-clock time from the start of the call; > 0."""

    cpu_s: int | None = None
    """Most seconds of CPU time of each process. None: what one thread can use in `timeout_s`, and a
    second more, so that `timeout_s` ends a busy loop first."""

    memory_mb: int = 2048
    """Most memory of all its processes together, and address space of each, in MiB, beyond that of
    the function's process when it is forked. Memory is summed ten times a second, so a call can
    exceed the limit for a moment."""

    file_mb: int = 64
    """Largest size of each file that it writes, in MiB."""

    disk_mb: int = 256
    """Largest size of all its files together, with /dev/shm, in MiB. If it has mounts of its own,
    the files are in memory, and a write beyond the limit fails with "No space left on device"; if
    not, the call is killed."""

    output_kb: int = 1024
    """Largest size of its output, and of its returned value, in KiB each. Output up to the limit is
    kept."""

    max_processes: int = 16
    """Most processes that it may have at a time, with its own."""

    network: bool = True
    """False blocks the network and all unix sockets, if the kernel can; `CallResult.is_offline`
    reports whether it did."""

    def __post_init__(self) -> None:
        self.require(0 < self.timeout_s < math.inf, "timeout_s", "> 0 seconds, and finite")
        self.require(self.cpu_s is None or self.cpu_s >= 1, "cpu_s", ">= 1")
        for field in ("memory_mb", "file_mb", "disk_mb", "output_kb", "max_processes"):
            self.require(getattr(self, field) >= 1, field, ">= 1")

    @property
    def most_cpu_s(self) -> int:
        """`cpu_s`, or the value that None stands for."""
        return math.ceil(self.timeout_s) + 1 if self.cpu_s is None else self.cpu_s
