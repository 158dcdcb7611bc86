"""Watch over the processes of one engine, and the deadlines of callers that wait for it."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

from vla_rl.actors.heartbeat import Heartbeat, ObservedTime, ProcessState
from vla_rl.actors.process_state import find_stopped

LOOK_EVERY_S: Final = 0.25
"""Seconds between two looks. A look costs about 20 µs and does not involve the process."""

STOPPED_AFTER_S: Final = 1.5
"""Seconds after which a stopped process counts as frozen. Job managers stop and resume the
processes of a job one after another, which takes less."""


class EngineWatch:
    """Checks an engine's processes from the running loop, between `start` and `end`.

    Deadlines count the time in which this process itself ran (`ObservedTime`). So after Ctrl-Z and
    `fg`, or on an overloaded machine, an engine that could not run either does not count as late.

    Args:
        processes: returns the ids of the processes to check.
        on_frozen: called with the id of a process that was stopped for `STOPPED_AFTER_S`; this ends
            the watch.
    """

    def __init__(
        self, processes: Callable[[], Iterable[int]], on_frozen: Callable[[int], None]
    ) -> None:
        self._processes, self._on_frozen = processes, on_frozen
        self._time = ObservedTime(LOOK_EVERY_S)
        self._heartbeat = Heartbeat(look_every_s=LOOK_EVERY_S, stopped_after_s=STOPPED_AFTER_S)
        self._deadlines: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False

    def start(self) -> None:
        """Start checking."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def end(self) -> None:
        """Stop checking; all waiting blocks time out at once."""
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for timeout in list(self._deadlines):
            _expire(timeout)

    @contextlib.asynccontextmanager
    async def limit(self, limit_s: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Limit the block to `limit_s` seconds in which this process ran, and to the watch's end.

        None: to its end alone. See `asyncio.timeout`.
        """
        self._time.pass_time(asyncio.get_running_loop().time())
        async with asyncio.timeout(None) as timeout:
            self._deadlines[timeout] = math.inf if limit_s is None else self._time.total_s + limit_s
            if self._has_ended:
                _expire(timeout)
            try:
                yield timeout
            finally:
                del self._deadlines[timeout]

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_EVERY_S, self._look)
        now, stopped = loop.time(), find_stopped(self._processes())
        state = ProcessState.RUNNING if stopped is None else ProcessState.STOPPED
        verdict = self._heartbeat.observe(now, 0, state)
        self._time.pass_time(now)
        for timeout, deadline in list(self._deadlines.items()):
            if self._time.total_s >= deadline:
                _expire(timeout)
        if verdict.is_frozen and stopped is not None:
            self._on_frozen(stopped)


def _expire(timeout: asyncio.Timeout) -> None:
    if not timeout.expired():
        timeout.reschedule(asyncio.get_running_loop().time())
