"""Stalls of a process: who waits for what, how late its loop is, where each task stands.

Waiting code calls `waiting`; code that completes work calls `note_progress`. Both cost about a
microsecond. The `Watchdog` reads them from its own thread, so the tables hold plain values, each access
is one dictionary operation. A runtime itself lists the calls of its actors: they need no `waiting`.

The watchdog runs outside the loop, so it also works while the loop is blocked. Progress is what
`note_progress` reports.
"""

import asyncio
import itertools
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Final, Self, TextIO

import msgspec


@dataclass(frozen=True, slots=True)
class Wait:
    """One edge of the wait graph: `who` has waited for `on` since `since`.

    `since` is in seconds of time.monotonic.

    Example:
        Wait(who="episode 12", on="env-3", since=1203.4, pid=48213)
    """

    who: str
    on: str
    since: float
    pid: int = 0
    """Process on this host that has to answer; 0 if it is none, or not known."""

    def describe(self, now: float) -> str:
        """Return one line of the wait graph, e.g. `episode 12 waits for env-3 since 4.2 s`."""
        return f"{self.who} waits for {self.on} since {now - self.since:.1f} s"


@dataclass(frozen=True, slots=True)
class RecordedExit:
    """The end of a process or host that was not requested, at `at` of time.monotonic."""

    what: str
    at: float


MOST_EXITS: Final = 20
MOST_NAMES: Final = 8
"""Tasks that a report names of those that stand at one line."""

_waits: dict[int, Wait] = {}
_exits: deque[RecordedExit] = deque(maxlen=MOST_EXITS)
_sources: dict[int, Callable[[], Iterable[Wait]]] = {}
_wait_ids = itertools.count()
_progress_counts: dict[str, int] = {}
_last_progress_s: list[float] = [time.monotonic()]


@contextmanager
def waiting(who: str, on: str) -> Iterator[None]:
    """List `who` as waiting for `on` while the body runs, e.g.
    `with waiting("episode 12", on="env-3"): await ...`.
    """
    token = begin_wait(who, on)
    try:
        yield
    finally:
        end_wait(token)


def begin_wait(who: str, on: str) -> int:
    """List a wait that is not a `with` block; pass the returned token to `end_wait`."""
    token = next(_wait_ids)
    _waits[token] = Wait(who, on, time.monotonic())
    return token


def end_wait(token: int) -> None:
    """Take a wait off the list; a token that is no longer listed is ignored."""
    _waits.pop(token, None)


def note_progress(what: str, count: int = 1) -> None:
    """Report progress to the watchdog, e.g. `note_progress("episodes")`."""
    _progress_counts[what] = _progress_counts.get(what, 0) + count
    _last_progress_s[0] = time.monotonic()


def record_exit(what: str) -> None:
    """Remember an unexpected end with the end of its stderr; the last 20 are kept."""
    _exits.append(RecordedExit(what, time.monotonic()))


def list_recent_exits() -> list[RecordedExit]:
    """Return the last unexpected ends, the newest last. Safe to call from any thread."""
    return list(_exits)


def add_wait_source(waits: Callable[[], Iterable[Wait]]) -> int:
    """Also list the waits that `waits` returns, called from any thread.

    Pass the returned token to `remove_wait_source`.
    """
    token = next(_wait_ids)
    _sources[token] = waits
    return token


def remove_wait_source(token: int) -> None:
    """Stop calling a source."""
    _sources.pop(token, None)


def list_waits() -> list[Wait]:
    """Return all waits, including those for answers of actors, longest first.

    Safe to call from any thread.
    """
    waits = list(_waits.values())  # atomic for other threads, which sorting would not be
    for source in list(_sources.values()):
        waits.extend(source())
    return sorted(waits, key=lambda wait: wait.since)


def count_progress() -> dict[str, int]:
    """Return the progress counts since the process began. Safe to call from any thread."""
    return dict(_progress_counts)


def seconds_since_progress() -> float:
    """Return the time since the last `note_progress`, or since the import of this module (s)."""
    return time.monotonic() - _last_progress_s[0]


class LagReport(msgspec.Struct, frozen=True, array_like=True):
    """How late a loop ran its timers, over the last minute or so (s).

    Example:
        A loop that was late by 41 ms once in the last minute:

        LagReport(p50_s=0.0003, p99_s=0.002, max_s=0.041, num_samples=600)
    """

    p50_s: float
    p99_s: float
    max_s: float
    num_samples: int


_INTERVAL_S = 0.1
_NUM_SAMPLES = 600
STALL_FROM_S = 1.0
"""A lag from which the loop counts as having stood still, as after Ctrl-Z or on a suspended
machine."""


class LoopLag:
    """Samples the running loop ten times a second and remembers the last minute.

    Costs about 2 µs a sample.

    Args:
        on_lost: called with the seconds for which the loop has just stood still, if that was at
            least one second.
    """

    def __init__(self, on_lost: Callable[[float], None] = lambda lost_s: None) -> None:
        self._on_lost = on_lost
        self._samples: deque[float] = deque(maxlen=_NUM_SAMPLES)
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time() + _INTERVAL_S
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(self._due, self._sample)

    def make_report(self) -> LagReport:
        """Return percentiles of the lag over the last minute; zeros before the first sample."""
        ordered = sorted(self._samples)
        if not ordered:
            return LagReport(0.0, 0.0, 0.0, 0)
        last = len(ordered) - 1
        return LagReport(
            ordered[last // 2], ordered[round(last * 0.99)], ordered[last], len(ordered)
        )

    def stop_sampling(self) -> None:
        """Stop sampling."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sample(self) -> None:
        now = self._loop.time()
        # Counted from when the timer was due and not from the last sample: one long turn counts
        # once.
        lag_s = max(0.0, now - self._due)
        self._samples.append(lag_s)
        if lag_s >= STALL_FROM_S:
            self._on_lost(lag_s)
        self._due = now + _INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._sample)


_FRAMES = ("cr_frame", "gi_frame", "ag_frame")
_AWAITED = ("cr_await", "gi_yieldfrom", "ag_await")


def list_tasks(loop: asyncio.AbstractEventLoop) -> "list[asyncio.Task[Any]]":
    """Return all tasks of a loop by name; asyncio retries if the set changes meanwhile."""
    return sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())


def list_awaiting_frames(awaited: Any) -> list[FrameType]:
    """Return the frames from a task's outermost coroutine to the suspended one."""
    frames = []
    for each in list_awaited(awaited):
        frame = _get_first(each, _FRAMES)
        if frame is None:
            break
        frames.append(frame)
    return frames


def list_awaited(awaited: Any) -> list[Any]:
    """Return a coroutine, what it awaits, what that awaits, and so on."""
    chain = []
    while awaited is not None:
        chain.append(awaited)
        awaited = _get_first(awaited, _AWAITED)
    return chain


def _get_first(awaited: Any, names: tuple[str, ...]) -> Any:
    return next(
        (found for name in names if (found := getattr(awaited, name, None)) is not None), None
    )


def format_thread_stack(thread_id: int) -> str:
    """Return the stack of a thread as text; the innermost call is last."""
    frame = sys._current_frames().get(thread_id)
    lines = "".join(traceback.format_stack(frame)) if frame is not None else "    it has ended\n"
    return lines.rstrip()


logger = logging.getLogger(__name__)


class Watchdog:
    """Watches the running loop while its `with` block is open.

    Args:
        stall_after_s: report after this long without progress (s), and again after each further
            such time.
        abort: abort the process after the report, so that an outside supervisor restarts it from
            its checkpoint.
        out: stream for the report; stderr by default.
    """

    def __init__(
        self, *, stall_after_s: float, abort: bool = False, out: TextIO | None = None
    ) -> None:
        if not stall_after_s > 0:
            raise ValueError(f"stall_after_s is {stall_after_s}, expected more than 0 seconds.")
        self._stall_after_s, self._abort, self._out = stall_after_s, abort, out
        self._loop = asyncio.get_running_loop()
        self._loop_thread_id = threading.get_ident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.num_reports = 0

    def __enter__(self) -> Self:
        note_progress("watchdog started")
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def describe_stall(self) -> str:
        """Return the current wait graph and all stacks. Safe to call from any thread."""
        parts = [
            _format_wait_graph(),
            f"thread of the loop:\n{format_thread_stack(self._loop_thread_id)}",
        ]
        # Of 64 simulators that start, 64 tasks stand at the same line.
        alike: dict[tuple[str, ...], list[str]] = {}
        for task in list_tasks(self._loop):
            alike.setdefault(_format_task_stack(task), []).append(repr(task.get_name()))
        for stack, names in alike.items():
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            parts += [f"task {', '.join(names[:MOST_NAMES])}{more}:", *stack]
        return "\n".join(parts)

    def _watch(self) -> None:
        reported_s = 0.0
        while True:
            quiet_s = seconds_since_progress()
            # There was progress since the last report, so the next stall is a new one.
            if quiet_s < reported_s:
                reported_s = 0.0
            if quiet_s - reported_s >= self._stall_after_s:
                reported_s = quiet_s
                self._report(quiet_s)
            if self._stop.wait(self._stall_after_s - (quiet_s - reported_s)):
                return

    def _report(self, quiet_s: float) -> None:
        try:
            self._print(quiet_s)
        except Exception:  # such as a closed pipe: the watchdog continues
            logger.exception(
                "the watchdog saw no progress for %.1f s and could not print its report.", quiet_s
            )
        # Abort and no exit: it ends the process even if its loop and its exit handlers hang, and
        # leaves a core for a debugger.
        if self._abort:
            os.abort()

    def _print(self, quiet_s: float) -> None:
        out = self._out if self._out is not None else sys.stderr
        counts = ", ".join(f"{what} {count}" for what, count in count_progress().items())
        out.write(
            f"watchdog: no progress for {quiet_s:.1f} s (so far: {counts}).\n{self.describe_stall()}\n"
        )
        out.flush()
        self.num_reports += 1


def _format_wait_graph() -> str:
    now = time.monotonic()
    # The longest wait of several between the same two.
    alike: dict[tuple[str, str], list[Wait]] = {}
    for wait in list_waits():
        alike.setdefault((wait.who, wait.on), []).append(wait)
    lines = [
        f"    {waits[0].describe(now)}" + (f" ({len(waits)} times)" if len(waits) > 1 else "")
        for waits in alike.values()
    ]
    return "who waits for whom:\n" + ("\n".join(lines) if lines else "    no task reports a wait")


def _format_task_stack(task: "asyncio.Task[Any]") -> tuple[str, ...]:
    return tuple(
        f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_qualname}'
        for frame in list_awaiting_frames(task.get_coro())
    )
