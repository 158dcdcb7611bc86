"""One call that runs in a child of the keeper: its pipes, its deadline, and its end."""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Final

from vla_rl.sandbox.child import NOT_ISOLATED, PROGRAM_FILE, run_call
from vla_rl.sandbox.descendants import children_of, descendants_of, kill_all_below
from vla_rl.sandbox.protocol import Ended, Fault, FunctionCall, ProgramCall

STREAMS: Final = ("stdout", "stderr", "returned")
_READ_BYTES: Final = 1 << 16
_CPU_SHARE: Final = 0.25
"""Of its CPU time, used at least by a call that was killed for it: the kernel counts whole ticks, charged to whoever runs as
they end, and beside a busy process finds 1 s where there were 0.7."""


class RunningCall:
    """Forks on construction, in the keeper.

    Args:
        call: what to do.
        folder: in which it gets one of its own.
        can_isolate: whether the kernel gives it namespaces of its own.
    """

    def __init__(self, call: FunctionCall | ProgramCall, folder: Path, *, can_isolate: bool) -> None:
        self.call = call
        self._is_isolated = can_isolate
        self._folder = Path(tempfile.mkdtemp(prefix="call_", dir=folder))
        (self._folder / "stdin").write_bytes(_encoded(call.stdin) if isinstance(call, ProgramCall) else b"")
        if isinstance(call, ProgramCall):
            (self._folder / PROGRAM_FILE).write_bytes(_encoded(call.source))
        self.pipes: dict[int, str] = {}
        self._kept: dict[str, bytearray] = {name: bytearray() for name in STREAMS}
        self._fault: tuple[Fault, str] | None = None
        pipes = [os.pipe() for _ in STREAMS]
        fds, keeper_pid = (pipes[0][1], pipes[1][1], pipes[2][1]), os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            run_call(call, self._folder, fds, can_isolate=can_isolate, keeper_pid=keeper_pid)
        for (reading, writing), name in zip(pipes, STREAMS, strict=True):
            os.close(writing)
            os.set_blocking(reading, False)
            self.pipes[reading] = name
        self.pidfd = os.pidfd_open(self.pid)
        self._began = time.monotonic()
        self.deadline = self._began + call.limits.timeout_s

    def read(self, fd: int) -> bool:
        """Take what is in a pipe; False where it is at its end. A call that printed too much is killed."""
        try:
            data = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return True
        kept, most = self._kept[self.pipes[fd]], self.call.limits.output_kb * 1024
        kept += data[: max(0, most - len(kept))]
        if len(data) == _READ_BYTES or len(kept) == most:
            self._check_amount(fd, most)
        return bool(data)

    def check(self, now: float) -> None:
        """Kill the call if its time is over, or if it became too many processes.

        One that has ended stays as it is: it may have been in time, and this process at an import since.
        """
        if self._fault is not None or self._has_ended():
            return
        limits = self.call.limits
        # isolated, `pid` only waits for the first process of the namespace, and everything that counts is below it
        too_many = limits.max_processes + self._is_isolated
        if now >= self.deadline:
            self.kill("timed_out", self._too_long())
        elif len(descendants_of(self.pid, too_many)) >= too_many:
            self.kill("too_many_processes", f"it started more than {limits.max_processes} processes and was stopped")

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def kill(self, fault: Fault, words: str) -> None:
        """Kill it with everything below it. The first reason stays."""
        self._fault = self._fault or (fault, words)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGSTOP)
        if self._is_isolated:  # the first process of its namespace, with which the kernel ends all of them
            for first in children_of(self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(first, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            kill_all_below(self.pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> Ended:
        """Reap it, once its pidfd says that it is over, and say how it ended. Its folder is gone after that."""
        _, status, usage = os.wait4(self.pid, 0)
        for fd in list(self.pipes):
            while self._kept_grows(fd):
                pass
            os.close(fd)
        os.close(self.pidfd)
        shutil.rmtree(self._folder, ignore_errors=True)
        duration_s = time.monotonic() - self._began
        cpu_s = usage.ru_utime + usage.ru_stime
        fault = self._fault or self._fault_of(os.waitstatus_to_exitcode(status), duration_s, cpu_s)
        return Ended(
            id=self.call.id,
            fault=None if fault is None else fault[0],
            words="" if fault is None else fault[1],
            returned=bytes(self._kept["returned"]),
            stdout=bytes(self._kept["stdout"]),
            stderr=bytes(self._kept["stderr"]),
            is_offline=self._is_isolated and not self.call.limits.network,
            duration_s=duration_s,
        )

    def _check_amount(self, fd: int, most: int) -> None:
        if len(self._kept[self.pipes[fd]]) >= most and self._fault is None:
            verb = "returned" if self.pipes[fd] == "returned" else "printed"
            self.kill("printed_too_much", f"it {verb} more than {self.call.limits.output_kb} KiB and was stopped")

    def _kept_grows(self, fd: int) -> bool:
        """Read what is left in a pipe after the end; whoever else holds it is dead or about to be."""
        before = len(self._kept[self.pipes[fd]])
        return self.read(fd) and len(self._kept[self.pipes[fd]]) > before

    def _too_long(self) -> str:
        return f"it took longer than {self.call.limits.timeout_s:g} s and was stopped"

    def _fault_of(self, exit_code: int, duration_s: float, cpu_s: float) -> tuple[Fault, str] | None:
        limits = self.call.limits
        if exit_code == 0:
            return None
        if bytes(self._kept["returned"]) == NOT_ISOLATED:
            words = "the kernel gave it no namespaces of its own this time (are they limited?), so it was not run"
            return ("not_isolated", words)
        if exit_code == -signal.SIGKILL and duration_s >= limits.timeout_s:  # the kernel ended it before we did
            return ("timed_out", self._too_long())
        if exit_code == -signal.SIGKILL and cpu_s >= _CPU_SHARE * limits.most_cpu_s:
            return ("timed_out", f"it took longer than {limits.most_cpu_s} s of CPU time and was stopped")
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            return ("died", f"its process was killed by {name}; its limit is {limits.memory_mb} MiB of memory")
        last = bytes(self._kept["stderr"]).decode(errors="replace").strip().splitlines()[-1:]
        return ("died", f"its process ended with exit code {exit_code}" + (f": {last[0][:500]}" if last else ""))


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
