"""Every limit of the pool is checked before a process starts, and the restart budget forgets what
is long ago.
"""

from typing import Any

import pytest

from vla_rl.errors import ConfigError
from vla_rl.simulation import SimulatorConfig
from vla_rl.simulation.replacements import RestartBudget


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_envs", 0),
        ("envs_per_process", 0),
        ("concurrent_starts", 0),
        ("step_timeout_s", 0.0),
        ("reset_timeout_s", -1.0),
        ("learned_timeout_factor", 0.5),
        ("learned_timeout_floor_s", 0.0),
        ("frozen_after_s", 0.5),
        ("frozen_after_s", float("nan")),
        ("start_timeout_s", 0.0),
        ("recycle_after_episodes", 0),
        ("rss_limit_mb", 0),
        ("max_restarts", -1),
        ("restart_window_s", 0.0),
        ("render_devices", (0, -1)),
    ],
)
def test_a_value_out_of_range_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"SimulatorConfig\.{field} is .*, expected"):
        SimulatorConfig(**{field: value})


@pytest.mark.parametrize(
    ("num_envs", "per_process", "sizes"),
    [(3, 1, [1, 1, 1]), (16, 8, [8, 8]), (6, 4, [4, 2]), (3, 8, [3])],
)
def test_environments_fill_one_process_after_the_other(
    num_envs: int, per_process: int, sizes: list[int]
) -> None:
    assert SimulatorConfig(envs_per_process=per_process).envs_of_processes(num_envs) == sizes


def test_without_devices_the_environment_is_as_configured() -> None:
    assert SimulatorConfig().environment_of(3) == {
        "OMP_NUM_THREADS": "1",
        "VLA_RL_PROCESS_INDEX": "3",
    }


def test_restarts_long_ago_do_not_count() -> None:
    budget = RestartBudget(max_restarts=2, window_s=10.0)
    assert [budget.spend(now) for now in (0.0, 1.0, 9.9)] == [True, True, False]
    assert [budget.spend(now) for now in (20.0, 21.0, 22.0)] == [True, True, False]
