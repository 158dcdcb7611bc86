"""Limits of a text episode that no episode could keep are refused."""

from typing import Any

import pytest

from vla_rl.envs.text.task import TextLimits
from vla_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_turns", 0),
        ("max_characters", 0),
        ("max_answer_characters", 0),
        ("max_tool_calls", -1),
        ("setup_timeout_s", 0.0),
        ("reply_timeout_s", -1.0),
        ("tool_timeout_s", float("nan")),
    ],
)
def test_a_value_out_of_range_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"TextLimits\.{field} is {value}, expected"):
        TextLimits(**{field: value})


def test_an_episode_may_be_without_tools() -> None:
    assert TextLimits(max_tool_calls=0).max_tool_calls == 0
