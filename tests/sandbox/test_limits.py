"""Limits of a call are above zero, and a busy loop ends by the clock."""

import math

import pytest

from vla_rl.errors import ConfigError
from vla_rl.sandbox.protocol import ProcessLimits


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.inf, math.nan])
def test_a_call_has_a_finite_time(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match=r"timeout_s is .*, expected > 0 seconds, and finite"):
        ProcessLimits(timeout_s=timeout_s)


@pytest.mark.parametrize(
    "field", ["cpu_s", "memory_mb", "file_mb", "disk_mb", "output_kb", "max_processes"]
)
def test_a_limit_of_nothing_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is 0, expected >= 1"):
        ProcessLimits(**{field: 0})


def test_without_a_limit_of_its_own_cpu_time_ends_after_the_clock() -> None:
    assert ProcessLimits(timeout_s=0.5).most_cpu_s == 2
    assert ProcessLimits(timeout_s=10.0).most_cpu_s == 11
    assert ProcessLimits(timeout_s=10.0, cpu_s=3).most_cpu_s == 3
