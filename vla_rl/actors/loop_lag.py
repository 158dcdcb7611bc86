"""How late a loop runs its timers: the time for which it was blocked."""

import asyncio
from collections import deque
from collections.abc import Callable

from vla_rl.actors.wire import LagReport

_INTERVAL_S = 0.1
_NUM_SAMPLES = 600
LOST_FROM_S = 1.0
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

    def report(self) -> LagReport:
        """Return percentiles of the lag over the last minute; zeros before the first sample."""
        ordered = sorted(self._samples)
        if not ordered:
            return LagReport(0.0, 0.0, 0.0, 0)
        last = len(ordered) - 1
        return LagReport(
            ordered[last // 2], ordered[round(last * 0.99)], ordered[last], len(ordered)
        )

    def stop(self) -> None:
        """Stop sampling."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sample(self) -> None:
        now = self._loop.time()
        lag_s = max(0.0, now - self._due)
        self._samples.append(lag_s)
        if lag_s >= LOST_FROM_S:
            self._on_lost(lag_s)
        self._due = now + _INTERVAL_S
        self._timer = self._loop.call_at(self._due, self._sample)
