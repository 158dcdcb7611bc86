"""Limit how many deaths a pool tolerates within a time window: a plain class with no clock."""

from collections import deque


class RestartBudget:
    """At most `max_restarts` within any `window_s` seconds.

    Args:
        max_restarts: allowed within the window; the next one exceeds the budget.
        window_s: time for which a restart counts (s).
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts, self._window_s = max_restarts, window_s
        self._times: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Record a restart at `now` (seconds, never decreasing).

        Return False if it exceeds the budget.
        """
        self._times.append(now)
        while self._times[0] <= now - self._window_s:
            self._times.popleft()
        return len(self._times) <= self._max_restarts
