"""Evaluations that cannot be made are refused when they are configured."""

from typing import Any

import pytest

from vla_rl.errors import ConfigError
from vla_rl.recipes.eval_libero import EvalLiberoConfig


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": "10"}, "tasks of libero_object are '10', expected numbers from 0 to 9"),
        (
            {"init_states": "40-2147483648"},
            "init_states of libero_object/0 are '40-2147483648', expected numbers from 0 to",
        ),
        ({"suites": ("libero_goal", "libero_goal")}, "expected each once"),
        ({"suites": ()}, "expected at least one suite"),
        ({"temperature": 0.0}, "temperature is 0.0, expected above 0, or none for greedy"),
        ({"num_envs": 0}, "num_envs is 0, expected at least 1"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EvalLiberoConfig(**changed)
