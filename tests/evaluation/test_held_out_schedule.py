"""A schedule of held-out evaluations that cannot be followed is refused."""

import pytest

from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"every": 0}, "every is 0, expected at least 1, or none"),
        ({"every": 1, "stop_after": 0}, "stop_after is 0"),
        ({"every": 1, "simulators": 0}, "simulators is 0"),
        ({"every": 1, "niceness": 20}, "niceness is 20, expected 0 to 19"),
        ({"every": 1, "niceness": -1}, "niceness is -1"),
    ],
)
def test_a_value_out_of_its_range_is_refused(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HeldOutSchedule(**changed)


def test_without_evaluations_during_the_run_their_options_are_not_read() -> None:
    assert set(HeldOutSchedule().unread()) == {"simulators", "niceness", "stop_after"}
    assert not HeldOutSchedule(every=5).unread()
