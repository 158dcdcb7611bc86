"""One call in a child of the call runner: its pipes, its deadline, its use of memory, its end."""

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Final

from vla_rl.sandbox.child import NOT_ISOLATED, report_not_isolated, run_call
from vla_rl.sandbox.isolation import MOST_FILES, Isolation, NotIsolated, read_wait_status
from vla_rl.sandbox.linux import (
    disk_used,
    get_descendants,
    holds_more_memory,
    kill_tree,
    memory_held,
)
from vla_rl.sandbox.protocol import Ended, Fault, FunctionCall, Means, ProgramCall
from vla_rl.util.ownership import remove_tree

STREAMS: Final = ("stdout", "stderr", "returned")
_READ_BYTES: Final = 1 << 16
_MIB: Final = 1 << 20
_MEASURE_EVERY_S: Final = 0.1
"""Seconds between two sums of memory and files. A process that allocates at full speed takes about
100 MB meanwhile."""

_CPU_SHARE: Final = 0.25
"""Smallest share of its CPU limit that a call killed for CPU time has used. The kernel charges a
whole tick to the process that runs at the end of the tick: beside a busy process it counted 1 s for
0.7 s."""


class RunningCall:
    """Forks on construction, in the call runner.

    Args:
        call: the call to run.
        folder: the folder in which the call gets a folder of its own.
        means: the means of isolation.
    """

    def __init__(
        self, call: FunctionCall | ProgramCall, folder: Path, means: frozenset[Means]
    ) -> None:
        self.call = call
        self._folder = Path(tempfile.mkdtemp(prefix="call_", dir=folder))
        # the child starts with that much
        held = memory_held(os.getpid()) if isinstance(call, FunctionCall) else 0
        self._most_memory = held + call.limits.memory_mb * _MIB
        self._kept: dict[str, bytearray] = {name: bytearray() for name in STREAMS}
        self._fault: tuple[Fault, str] | None = None
        pipes = [os.pipe() for _ in (*STREAMS, "status")]
        self._isolation = Isolation(means, self._folder, call.limits)
        self.pid = self._fork([writing for _, writing in pipes])
        for reading, writing in pipes:
            os.close(writing)
            os.set_blocking(reading, False)
        self.pipes = {reading: name for (reading, _), name in zip(pipes, STREAMS, strict=False)}
        self._status_fd = pipes[3][0]
        self.pidfd = os.pidfd_open(self.pid)
        self._began = self._measured = time.monotonic()
        self.deadline = self._began + call.limits.timeout_s

    def _fork(self, writing: list[int]) -> int:
        runner = os.pidfd_open(os.getpid())
        try:
            if (pid := self._isolation.fork()) == 0:
                run_call(self.call, self._folder, [*writing, runner], self._isolation)
        except NotIsolated as failure:
            if (pid := os.fork()) == 0:
                report_not_isolated(failure, writing[STREAMS.index("returned")])
        os.close(runner)
        return pid

    def read_output(self, fd: int) -> bool:
        """Read the content of a pipe; return False at its end.

        A call that printed too much is killed.
        """
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return True
        kept, most = self._kept[self.pipes[fd]], self.call.limits.output_kb * 1024
        kept += data[: max(0, most - len(kept))]
        if len(data) == _READ_BYTES or len(kept) == most:
            self._check_amount(fd, most)
        return bool(data)

    def enforce_limits(self, now: float) -> None:
        """Kill the call if its time is over, or if it has too many processes or holds too much.

        A call that has ended is not killed: it may have ended in time while this process was busy
        with an import.
        """
        if self._fault is not None or self._has_ended():
            return
        limits = self.call.limits
        # the first process of a namespace, which waits for the call
        is_first = "namespaces" in self._isolation.means
        too_many = limits.max_processes + is_first
        below = get_descendants(self.pid, too_many)
        if now >= self.deadline:
            self.kill_call("timed_out", self._describe_timeout())
        elif len(below) >= too_many:
            self.kill_call(
                "too_many_processes",
                f"it started more than {limits.max_processes} processes and was stopped",
            )
        elif now >= self._measured + _MEASURE_EVERY_S:
            self._measured = now
            self._check_usage(below if is_first else [self.pid, *below])

    def _check_usage(self, pids: list[int]) -> None:
        limits = self.call.limits
        if holds_more_memory(pids, self._most_memory):
            self.kill_call(
                "too_much_memory",
                f"it held more than {limits.memory_mb} MiB of memory in all and was stopped",
            )
        elif (
            "mounts" not in self._isolation.means
            and disk_used(self._folder, pids, MOST_FILES) > limits.disk_mb * _MIB
        ):
            words = f"it wrote more than {limits.disk_mb} MiB or {MOST_FILES} files and was stopped"
            self.kill_call("too_much_disk", words)

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill_call(self, fault: Fault, words: str) -> None:
        """Kill the call with all its descendants. The first reason is kept."""
        self._fault = self._fault or (fault, words)
        with contextlib.suppress(ProcessLookupError):
            # the kernel kills a namespace with its first process
            if "namespaces" in self._isolation.means:
                os.kill(self.pid, signal.SIGKILL)
            else:
                kill_tree(self.pid)

    def reap(self) -> Ended:
        """Reap the call after its pidfd reported its end, and return how it ended.

        Its folder is removed.
        """
        _, status, usage = os.wait4(self.pid, 0)
        told = read_wait_status(self._status_fd)
        os.close(self._status_fd)
        # bytes that arrived before the end are still in the pipes
        for fd in list(self.pipes):
            while self._read_rest(fd):
                pass
            os.close(fd)
        os.close(self.pidfd)
        remove_tree(self._folder)
        duration_s = time.monotonic() - self._began
        cpu_s = usage.ru_utime + usage.ru_stime
        fault = self._fault or self._find_fault(
            os.waitstatus_to_exitcode(status if told is None else told), duration_s, cpu_s
        )
        return Ended(
            id=self.call.id,
            fault=None if fault is None else fault[0],
            words="" if fault is None else fault[1],
            returned=bytes(self._kept["returned"]),
            stdout=bytes(self._kept["stdout"]),
            stderr=bytes(self._kept["stderr"]),
            is_offline=not self.call.limits.network
            and not self._isolation.means.isdisjoint(("namespaces", "seccomp")),
            duration_s=duration_s,
        )

    def _check_amount(self, fd: int, most: int) -> None:
        if len(self._kept[self.pipes[fd]]) >= most and self._fault is None:
            verb = "returned" if self.pipes[fd] == "returned" else "printed"
            self.kill_call(
                "printed_too_much",
                f"it {verb} more than {self.call.limits.output_kb} KiB and was stopped",
            )

    def _read_rest(self, fd: int) -> bool:
        """Read the rest of a pipe after the end; all processes that hold it are dead or dying."""
        before = len(self._kept[self.pipes[fd]])
        return self.read_output(fd) and len(self._kept[self.pipes[fd]]) > before

    def _describe_timeout(self) -> str:
        return f"it took longer than {self.call.limits.timeout_s:g} s and was stopped"

    def _find_fault(
        self, exit_code: int, duration_s: float, cpu_s: float
    ) -> tuple[Fault, str] | None:
        limits = self.call.limits
        if exit_code == 0:
            return None
        if (told := bytes(self._kept["returned"])).startswith(NOT_ISOLATED):
            reason = told.removeprefix(NOT_ISOLATED).decode()
            return (
                "not_isolated",
                f"it was not run, as the kernel did not isolate it this time ({reason})",
            )
        # the kernel killed it first
        if exit_code == -signal.SIGKILL and duration_s >= limits.timeout_s:
            return ("timed_out", self._describe_timeout())
        if exit_code == -signal.SIGKILL and cpu_s >= _CPU_SHARE * limits.most_cpu_s:
            return (
                "timed_out",
                f"it took longer than {limits.most_cpu_s} s of CPU time and was stopped",
            )
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            return (
                "died",
                f"its process was killed by {name}; its limit is {limits.memory_mb} MiB of memory",
            )
        last = bytes(self._kept["stderr"]).decode(errors="replace").strip().splitlines()[-1:]
        return (
            "died",
            "its process ended with "
            f"exit code {exit_code}" + (f": {last[0][:500]}" if last else ""),
        )
