"""How many deaths are put down to chance before a pool says that something is wrong: a plain class with no clock."""

from collections import deque


class RestartBudget:
    """At most `max_restarts` within any `window_s` seconds.

    Args:
        max_restarts: allowed within the window; the next one exceeds the budget.
        window_s: how long a restart counts.
    """

    def __init__(self, max_restarts: int, window_s: float) -> None:
        self._max_restarts, self._window_s = max_restarts, window_s
        self._times: deque[float] = deque()

    def spend(self, now: float) -> bool:
        """Note a restart at `now` (seconds, never going back); False if it is one too many."""
        self._times.append(now)
        while self._times[0] <= now - self._window_s:
            self._times.popleft()
        return len(self._times) <= self._max_restarts
