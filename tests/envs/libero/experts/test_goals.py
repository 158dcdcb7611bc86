"""Goals come in an order in which they can be reached."""

from types import SimpleNamespace
from typing import Any

import pytest

from vla_rl.envs.libero.experts.motions import Goal, read_goals


def scene(*conditions: list[str], met: tuple[list[str], ...] = ()) -> Any:
    """Return what the goals read of a scene."""
    domain = SimpleNamespace(
        parsed_problem={"goal_state": list(conditions)},
        _eval_predicate=lambda parts: parts in met,
    )
    return SimpleNamespace(domain=domain)


def test_switches_and_doors_come_before_things_and_closing_last() -> None:
    found = read_goals(
        scene(["close", "drawer"], ["on", "bowl", "plate"], ["open", "drawer"], ["turnon", "stove"])
    )
    assert [goal.predicate for goal in found] == ["turnon", "open", "on", "close"]
    assert found[2] == Goal("on", "bowl", "plate")
    assert found[0].target is None


def test_conditions_of_one_kind_keep_the_order_of_the_file() -> None:
    found = read_goals(scene(["in", "b", "basket"], ["on", "a", "plate"]))
    assert [goal.subject for goal in found] == ["b", "a"]


def test_an_unknown_condition_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"has the conditions \['stack'\], expected only turnon"):
        read_goals(scene(["stack", "a", "b"], ["on", "a", "b"]))


def test_a_goal_is_met_where_the_simulator_says_so() -> None:
    here = scene(["open", "drawer"], ["on", "a", "b"], met=(["open", "drawer"],))
    opened, placed = read_goals(here)
    assert opened.is_met(here)
    assert not placed.is_met(here)
