"""Liveness: which processes are frozen, found by one thread that looks at them twice a second.

A child's own thread counts in a page of memory that it shares with its parent, a few times a second,
whatever its other threads do, as long as they release the interpreter lock now and then. A look at such
a process is a read of that page, without a system call. Only a process that missed a beat is read from
/proc: one file, one more for each thread of a process that seems to sleep (about 15 µs each).

    its beat changed             it is alive; all counters start again
    STOPPED  (SIGSTOP)           counted; frozen after `stopped_after_s`
    ASLEEP   without a beat      counted; frozen after `silent_after_s`
    RUNNING  without a beat      not counted: it holds the interpreter lock, or waits for a core
    TRACED                       not counted: a debugger holds it

Only time in which the observer itself ran is counted: between two looks at most twice its interval.
A process is therefore frozen only after several looks. A process that stood still together with its
observer (Ctrl-Z with `fg`, a suspended machine, a machine with thirty times more work than cores) is
not. The loop is woken only for a frozen process, which it checks once more before it is killed.
"""

import asyncio
import contextlib
import enum
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from time import sleep  # bound here: an environment may replace the module's

from vla_rl.util.processes import make_memory_file

_MOST_COUNTED = 2.0
"""Longest time between two looks that is counted, in intervals of the observer."""


class ObservedTime:
    """Time in which an observer ran, between looks at intervals of `look_every_s`."""

    def __init__(self, look_every_s: float) -> None:
        self._most_counted_s = _MOST_COUNTED * look_every_s
        self._seen_at = -math.inf
        self.total_s = 0.0
        """Time since the first look (s)."""

    def pass_time(self, now: float) -> float:
        """Count the time from the last look to `now`, and return the counted time (s).

        `now` is of a clock that never goes back.
        """
        counted_s = (
            0.0
            if self._seen_at == -math.inf
            else min(max(0.0, now - self._seen_at), self._most_counted_s)
        )
        self._seen_at = now
        self.total_s += counted_s
        return counted_s


class ProcessState(enum.Enum):
    """State of a process, as the kernel reports it."""

    RUNNING = enum.auto()
    """One of its threads runs, waits for a core or a device, or used CPU time since the last
    look."""
    ASLEEP = enum.auto()
    """All threads wait for something."""
    STOPPED = enum.auto()
    """Stopped by a signal; SIGCONT would continue it."""
    TRACED = enum.auto()
    """A debugger is attached."""


class Verdict(enum.Enum):
    """Conclusion from the observations so far."""

    ALIVE = enum.auto()
    QUIET = enum.auto()
    """No beat since the last look, but no reason yet to count it as frozen."""
    STOPPED = enum.auto()
    """Frozen: stopped for too long."""
    SILENT = enum.auto()
    """Frozen: asleep without a beat for too long."""

    @property
    def is_frozen(self) -> bool:
        """Whether the process has to be killed."""
        return self in (Verdict.STOPPED, Verdict.SILENT)


class FreezeDetector:
    """Classifies one process from its observations, given in order.

    Args:
        look_every_s: interval at which its observer means to look.
        stopped_after_s: a process that was seen stopped for this long is frozen.
        silent_after_s: a process that was seen asleep for this long, without a beat, is frozen;
            infinite for a process that does not beat.
    """

    def __init__(
        self, *, look_every_s: float, stopped_after_s: float, silent_after_s: float = math.inf
    ) -> None:
        self._time = ObservedTime(look_every_s)
        self._stopped_after_s, self._silent_after_s = stopped_after_s, silent_after_s
        self._beat: int | None = None
        self.stopped_s = 0.0
        """Time for which it was seen stopped (s)."""
        self.silent_s = 0.0
        """Time for which it was seen stopped or asleep since its last beat (s)."""

    def observe(self, now: float, beat: int, state: ProcessState) -> Verdict:
        """Evaluate one look.

        Args:
            now: time of the look (s, any clock that does not go back).
            beat: any number that changes while the process is alive; a constant for one that does
                not beat.
            state: state of the process at that moment; ignored if the beat has changed.
        """
        counted_s = self._time.pass_time(now)
        # whatever the kernel says of it: a beat can only come from a process that runs
        if beat != self._beat:
            self._beat, self.stopped_s, self.silent_s = beat, 0.0, 0.0
            return Verdict.ALIVE
        self.stopped_s = self.stopped_s + counted_s if state is ProcessState.STOPPED else 0.0
        if state in (ProcessState.STOPPED, ProcessState.ASLEEP):
            self.silent_s += counted_s
        if self.stopped_s >= self._stopped_after_s:
            return Verdict.STOPPED
        if self.silent_s >= self._silent_after_s:
            return Verdict.SILENT
        return Verdict.QUIET


# after the name, which may hold spaces and parentheses itself
_STATE, _USER_TIME, _SYSTEM_TIME = 0, 11, 12
_AT_WORK = ("R", "D")
"""Running or waiting for a core; waiting for a disk or a driver, which no signal interrupts."""
_ENDED = ("Z", "X")
_STATE_NAMES = {
    "R": "running",
    "S": "asleep",
    "D": "in a call of a disk or driver that no signal interrupts",
    "Z": "dead",
    "X": "dead",
}


class ProcessReader:
    """Looks at one process repeatedly; remembers how much CPU time it had used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._folder = Path(f"/proc/{pid}")
        self._cpu_ticks = -1

    def read_state(self) -> ProcessState:
        """Read its state.

        A process that has ended, or cannot be read, counts as running: its end is noticed
        elsewhere.
        """
        try:
            return self._look()
        except (OSError, IndexError, ValueError):  # its files are gone, or empty while it ends
            return ProcessState.RUNNING

    def _look(self) -> ProcessState:
        state, cpu_ticks = _read_stat(self._folder / "stat")
        if state in ("T", "t"):
            return (
                ProcessState.TRACED if state == "t" or self._is_traced() else ProcessState.STOPPED
            )
        has_worked, self._cpu_ticks = cpu_ticks > self._cpu_ticks, cpu_ticks
        if (
            has_worked
            or state in _AT_WORK + _ENDED
            or any(thread in _AT_WORK for thread in self._list_thread_states())
        ):
            return ProcessState.RUNNING
        return ProcessState.TRACED if self._is_traced() else ProcessState.ASLEEP

    def _list_thread_states(self) -> list[str]:
        return [_read_stat(task / "stat")[0] for task in (self._folder / "task").iterdir()]

    def _is_traced(self) -> bool:
        return _is_traced(self._folder)


def find_stopped(pids: Iterable[int]) -> int | None:
    """Return the first process that a signal such as SIGSTOP has stopped.

    For processes that do not beat.

    Return None if there is none: a process that is traced, or has ended, is not stopped. Reads one
    file per process.
    """
    return next((pid for pid in pids if _is_stopped(pid)), None)


def describe_process(pid: int) -> str:
    """Return the state of a process in words, such as `stopped by a signal (SIGSTOP)`."""
    folder = Path(f"/proc/{pid}")
    try:
        state, _ = _read_stat(folder / "stat")
        if state in ("T", "t"):
            return "held by a debugger" if _is_traced(folder) else "stopped by a signal (SIGSTOP)"
    except (OSError, IndexError, ValueError):
        return "not there any more"
    return _STATE_NAMES.get(state, f"in state {state}")


def _is_stopped(pid: int) -> bool:
    folder = Path(f"/proc/{pid}")
    try:
        return _read_stat(folder / "stat")[0] == "T" and not _is_traced(folder)
    except (OSError, IndexError, ValueError):  # it ends
        return False


def _is_traced(folder: Path) -> bool:
    status = (folder / "status").read_text(encoding="utf-8", errors="replace")
    return not status.partition("TracerPid:")[2].lstrip().startswith("0")


def _read_stat(file: Path) -> tuple[str, int]:
    """Return the state, and the CPU time of all threads in clock ticks.

    Raises: OSError if it has ended.
    """
    with open(file, "rb") as opened:
        fields = opened.read().rpartition(b")")[2].split()
    return fields[_STATE].decode(), int(fields[_USER_TIME]) + int(fields[_SYSTEM_TIME])


LOOK_EVERY_S = 0.5


@dataclass(eq=False, kw_only=True)
class Watched:
    """One process under observation."""

    pid: Callable[[], int]
    """Return its process id; 0 until there is one."""
    beat: Callable[[], int]
    """See `FreezeDetector.observe`."""
    owes_beat: Callable[[], bool]
    """Return whether it has to beat now; if not, it only counts as frozen if it is stopped."""
    stopped_after_s: float
    silent_after_s: float
    """See `FreezeDetector`."""
    on_frozen: Callable[[str], None]
    """Called on the loop, once, with a description of the observation; has to kill the process."""
    is_reported: bool = field(init=False, default=False)
    """Whether the loop was notified and has not checked yet."""
    _heartbeat: FreezeDetector = field(init=False)
    _eye: ProcessReader | None = field(init=False, default=None)
    _last_beat: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self._heartbeat = FreezeDetector(
            look_every_s=LOOK_EVERY_S,
            stopped_after_s=self.stopped_after_s,
            silent_after_s=self.silent_after_s,
        )

    def check_process(self, now: float) -> Verdict:
        """Look at the process now; return the verdict."""
        if (pid := self.pid()) == 0:
            return Verdict.QUIET
        beat = self.beat()
        if beat != self._last_beat:
            self._last_beat = beat
            return self._heartbeat.observe(now, beat, ProcessState.RUNNING)
        if self._eye is None or self._eye.pid != pid:
            self._eye = ProcessReader(pid)
        state = self._eye.read_state()
        # A process that has not begun to beat may rightly sleep: only a stop says something.
        if state is ProcessState.ASLEEP and not self.owes_beat():
            state = ProcessState.RUNNING
        return self._heartbeat.observe(now, beat, state)

    def describe_verdict(self, verdict: Verdict) -> str:
        """Describe the observation of a frozen process."""
        if verdict is Verdict.STOPPED:
            return f"it was stopped by a signal for {self._heartbeat.stopped_s:.1f} s"
        return f"it gave no sign of life for {self._heartbeat.silent_s:.1f} s and used no CPU time"


class ProcessObserver:
    """Observes processes from the first `add_process` until `close`.

    Its methods are called on the loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._watched: dict[Watched, None] = {}
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def add_process(self, watched: Watched) -> None:
        """Start observing a process."""
        self._watched[watched] = None
        self._loop = asyncio.get_running_loop()
        if self._thread is None and not self._is_closed.is_set():
            thread = threading.Thread(
                target=self._observe, name=f"observer of {self._name}", daemon=True
            )
            thread.start()
            self._thread = thread

    def remove_process(self, watched: Watched) -> None:
        """Stop observing a process; one that is not observed is ignored."""
        self._watched.pop(watched, None)

    def close(self) -> None:
        """Stop observing."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def _observe(self) -> None:
        # waits for `_is_closed` at most one interval; woken by `close`
        while not self._is_closed.wait(LOOK_EVERY_S):
            # a separate function, so that this thread keeps no reference to ended processes
            self._look_at_all()

    def _look_at_all(self) -> None:
        # one atomic step, during which the loop cannot change it
        for watched in list(self._watched):
            if not watched.is_reported and watched.check_process(time.monotonic()).is_frozen:
                watched.is_reported = True
                self._notify_loop(watched)

    def _notify_loop(self, watched: Watched) -> None:
        assert self._loop is not None
        # the loop has ended, and all of its processes with it
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._look_again, watched)

    def _look_again(self, watched: Watched) -> None:
        """Confirm a verdict on the loop.

        The loop may have been busy, and the process may have continued since, or ended.
        """
        if watched not in self._watched:
            return
        verdict = watched.check_process(time.monotonic())
        if verdict.is_frozen:
            self.remove_process(watched)
            watched.on_frozen(watched.describe_verdict(verdict))
        watched.is_reported = False


BEAT_EVERY_S = 0.25


class HeartbeatPage:
    """The parent's end. `fd` is for the child; close it once the child has it."""

    def __init__(self) -> None:
        self.fd = make_memory_file("vla_rl-pulse", mmap.PAGESIZE)
        try:
            self._counter = _map_counter(self.fd)
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def beats(self) -> int:
        """Number of beats so far; 0 until the child begins."""
        return self._counter[0]


def start_heartbeat(fd: int) -> None:
    """Beat until this process ends, in the page behind `fd`, which is closed."""
    counter = _map_counter(fd)
    os.close(fd)
    threading.Thread(target=_write_heartbeat, args=(counter,), name="pulse", daemon=True).start()


def _write_heartbeat(counter: "memoryview[int]") -> None:
    while True:
        counter[0] += 1
        sleep(BEAT_EVERY_S)


def _map_counter(fd: int) -> "memoryview[int]":
    return memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")
