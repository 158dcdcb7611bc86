"""Decide when a process of a pool is replaced, count it, and limit the deaths."""

import logging
from collections import Counter, deque

from vla_rl.env_workers.config import SimulatorConfig
from vla_rl.env_workers.process import SimulatorProcess
from vla_rl.errors import ActorDied, ActorFrozen

logger = logging.getLogger(__name__)

_CAUSES = ("died", "frozen", "recycle_after_episodes", "rss_limit_mb")


class Replacements:
    """Checks processes against the pool's limits, and counts the replaced ones by cause."""

    def __init__(self, config: SimulatorConfig) -> None:
        self._config = config
        self._budget = RestartBudget(config.max_restarts, config.restart_window_s)
        self.counts: Counter[str] = Counter(dict.fromkeys(_CAUSES, 0))

    def cause(self, process: SimulatorProcess) -> str | None:
        """Return why the process must be replaced; None if it can run another episode."""
        config = self._config
        if not process.is_alive():
            return "frozen" if isinstance(process.death, ActorFrozen) else "died"
        if (
            config.recycle_after_episodes is not None
            and process.num_episodes >= config.recycle_after_episodes
        ):
            return "recycle_after_episodes"
        if config.rss_limit_mb is not None and process.holds_more_than(config.rss_limit_mb):
            return "rss_limit_mb"
        return None

    def metrics(self) -> dict[str, float]:
        """Return the number of replaced processes by cause. Keys read like paths."""
        return {
            f"simulation/replaced/{cause}": float(count) for cause, count in self.counts.items()
        }

    def note_worn_out(self, process: SimulatorProcess, cause: str) -> None:
        """Count a living process that reached its number of episodes or its memory limit."""
        self.counts[cause] += 1
        told = (
            f"after {process.num_episodes} episodes, with {process.private_mb():.0f} MiB of its own"
        )
        logger.info("simulator %s is replaced (%s) %s.", process.name, cause, told)

    def note_death(self, cause: str, death: ActorDied, now: float) -> bool:
        """Count a process that died or froze at `now` (s).

        Return False if that exceeds the budget.
        """
        self.counts[cause] += 1
        logger.warning("a simulator is replaced: %s", death)
        return self._budget.spend(now)


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
        # a window and not a total: a long run may lose many, and only many at once mean a fault
        while self._times[0] <= now - self._window_s:
            self._times.popleft()
        return len(self._times) <= self._max_restarts
