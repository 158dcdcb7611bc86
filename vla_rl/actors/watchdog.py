"""A thread that reports a lack of progress: the wait graph, and where each task stands.

It runs outside the loop, so it also works while the loop is blocked. Progress is what
`note_progress` reports.
"""

import asyncio
import logging
import os
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self, TextIO

from vla_rl.actors.stacks import awaiting_frames, tasks_of, thread_stack
from vla_rl.actors.waits import (
    current_waits,
    note_progress,
    progress_counts,
    seconds_since_progress,
)

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

    def describe(self) -> str:
        """Return the current wait graph and all stacks. Safe to call from any thread."""
        parts = [_wait_graph(), f"thread of the loop:\n{thread_stack(self._loop_thread_id)}"]
        parts += [_task_stack(task) for task in tasks_of(self._loop)]
        return "\n".join(parts)

    def _watch(self) -> None:
        reported_s = 0.0
        while True:
            quiet_s = seconds_since_progress()
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
        if self._abort:
            os.abort()

    def _print(self, quiet_s: float) -> None:
        out = self._out if self._out is not None else sys.stderr
        counts = ", ".join(f"{what} {count}" for what, count in progress_counts().items())
        out.write(
            f"watchdog: no progress for {quiet_s:.1f} s (so far: {counts}).\n{self.describe()}\n"
        )
        out.flush()
        self.num_reports += 1


def _wait_graph() -> str:
    now = time.monotonic()
    lines = [f"    {wait.describe(now)}" for wait in current_waits()]
    return "who waits for whom:\n" + ("\n".join(lines) if lines else "    no task reports a wait")


def _task_stack(task: "asyncio.Task[Any]") -> str:
    lines = [f"task {task.get_name()!r}:"]
    for frame in awaiting_frames(task.get_coro()):
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_qualname}')
    return "\n".join(lines)
