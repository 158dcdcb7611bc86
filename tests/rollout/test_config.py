"""Settings of the scheduler that cannot work together."""

import pytest

from vla_rl.errors import ConfigError
from vla_rl.rollout import SchedulerConfig


def test_environments_that_could_never_play_are_refused_with_the_inequality() -> None:
    config = SchedulerConfig(groups_per_update=2, max_staleness=1)
    config.require_feasible(num_envs=16, group_size=4)
    expected = r"\(max_staleness \+ 1\) \* groups_per_update \* group_size = \(1 \+ 1\) \* 2 \* 4 = 16 < num_envs = 17"
    with pytest.raises(ConfigError, match=expected):
        config.require_feasible(num_envs=17, group_size=4)


def test_updates_that_could_never_fill_are_refused_with_the_inequality() -> None:
    config = SchedulerConfig(groups_per_update=4, max_outstanding_groups=3)
    with pytest.raises(ConfigError, match="max_outstanding_groups=3 < groups_per_update=4"):
        config.require_feasible(num_envs=1, group_size=1)


def test_a_bound_on_outstanding_groups_counts_among_what_environments_can_play() -> None:
    config = SchedulerConfig(groups_per_update=4, max_staleness=3, max_outstanding_groups=4)
    with pytest.raises(
        ConfigError, match=r"max_outstanding_groups \* group_size = 4 \* 2 = 8 < num_envs = 9"
    ):
        config.require_feasible(num_envs=9, group_size=2)


def test_deterministic_mode_needs_synchronous_training() -> None:
    with pytest.raises(ConfigError, match="expected max_staleness=0"):
        SchedulerConfig(groups_per_update=1, max_staleness=1, deterministic=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("groups_per_update", 0),
        ("max_staleness", -1),
        ("max_attempts", 0),
        ("episode_timeout_s", 0.0),
        ("max_filtered_in_a_row", 0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"SchedulerConfig.{field} is"):
        SchedulerConfig(**{"groups_per_update": 1, field: value})
