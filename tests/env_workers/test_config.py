"""Every limit of the pool is checked before a process starts."""

from typing import Any

import pytest

from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import ConfigError


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
    assert SimulatorConfig(envs_per_process=per_process).split_envs(num_envs) == sizes


def test_without_devices_the_environment_is_as_configured() -> None:
    assert SimulatorConfig().get_environment(3) == {
        "OMP_NUM_THREADS": "1",
        "VLA_RL_PROCESS_INDEX": "3",
    }
