"""When a process of a pool is replaced, and how many deaths are too many."""

from typing import Any, cast

import pytest

from vla_rl.env_workers import SimulatorConfig
from vla_rl.env_workers.pool_state import Replacements, RestartBudget
from vla_rl.env_workers.process import SimulatorProcess
from vla_rl.errors import ActorDied, ActorFrozen


class Worn:
    """A process as far as the limits look at it."""

    name = "worn"

    def __init__(self, episodes: int = 0, mb: float = 0.0, death: ActorDied | None = None) -> None:
        self.num_episodes, self._mb, self.death = episodes, mb, death

    def is_alive(self) -> bool:
        return self.death is None

    def holds_more_than(self, limit_mb: float) -> bool:
        return self._mb > limit_mb

    def private_mb(self) -> float:
        return self._mb


def process(**state: Any) -> SimulatorProcess:
    return cast(SimulatorProcess, Worn(**state))


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ({"episodes": 9, "mb": 100.0}, None),
        ({"episodes": 10, "mb": 100.0}, "recycle_after_episodes"),
        ({"mb": 100.5}, "rss_limit_mb"),
        ({"death": ActorDied("worn", 7, "it ended")}, "died"),
        ({"episodes": 10, "death": ActorFrozen("worn", 7, "it stands still")}, "frozen"),
    ],
)
def test_a_process_at_a_limit_is_replaced_and_the_cause_is_named(
    state: dict[str, Any], cause: str | None
) -> None:
    limits = Replacements(SimulatorConfig(recycle_after_episodes=10, rss_limit_mb=100))
    assert limits.find_cause(process(**state)) == cause


def test_without_limits_a_living_process_is_never_replaced() -> None:
    limits = Replacements(SimulatorConfig(recycle_after_episodes=None, rss_limit_mb=None))
    assert limits.find_cause(process(episodes=10**6, mb=1e6)) is None


def test_replacements_are_counted_by_cause_and_only_deaths_use_the_budget() -> None:
    limits = Replacements(SimulatorConfig(max_restarts=1, restart_window_s=10.0))
    death = ActorDied("worn", 7, "it ended")
    limits.mark_expired(process(), "rss_limit_mb")
    limits.mark_expired(process(), "rss_limit_mb")
    assert [limits.record_death("died", death, now) for now in (0.0, 1.0)] == [True, False]
    assert limits.counts == {
        "died": 2,
        "frozen": 0,
        "recycle_after_episodes": 0,
        "rss_limit_mb": 2,
    }


def test_restarts_long_ago_do_not_count() -> None:
    budget = RestartBudget(max_restarts=2, window_s=10.0)
    assert [budget.spend(now) for now in (0.0, 1.0, 9.9)] == [True, True, False]
    assert [budget.spend(now) for now in (20.0, 21.0, 22.0)] == [True, True, False]
