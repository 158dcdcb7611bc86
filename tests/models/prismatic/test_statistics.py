"""Action bounds come from the set of statistics that was asked for, and none is guessed."""

import json
from pathlib import Path
from typing import Any

import pytest

from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.public_config import Extension
from vla_rl.models.prismatic.statistics import (
    STATISTICS_FILE,
    Range,
    Statistics,
    choose_key,
    get_action_bounds,
    get_gripper,
    get_proprio,
    read_statistics,
)


def written(folder: Path, content: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / STATISTICS_FILE).write_bytes(text)
    return folder


def action(low: float) -> dict[str, Any]:
    return {"action": {"q01": [low], "q99": [9.0]}}


def test_an_earlier_folder_counts_before_a_later_one_and_all_before_the_config(
    tmp_path: Path,
) -> None:
    adapter = written(tmp_path / "adapter", {"a": action(1.0)})
    base = written(tmp_path / "base", {"a": action(2.0), "b": action(2.0)})
    in_config = {key: action(3.0) for key in "abc"}
    found = read_statistics([adapter, base, tmp_path / "none"], in_config)
    assert {key: each.action.q01 for key, each in found.items()} == {
        "a": (1.0,),
        "b": (2.0,),
        "c": (3.0,),
    }
    assert in_config["a"] == action(3.0)


@pytest.mark.parametrize("content", [b"{", b"\xff", [1], {"a": {"proprio": {}}}, {"a": 5}])
def test_a_file_of_something_else_is_refused(content: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"action statistics"):
        read_statistics([written(tmp_path, content)], {})


SETS = {"libero_goal_no_noops": Statistics(action=Range()), "bridge": Statistics(action=Range())}


def test_a_set_is_chosen_by_its_key_with_or_without_idle_steps() -> None:
    assert choose_key(SETS, "bridge", Path("x")) == "bridge"
    assert choose_key(SETS, "libero_goal", Path("x")) == "libero_goal_no_noops"
    both = SETS | {"libero_goal": Statistics(action=Range())}
    assert choose_key(both, "libero_goal", Path("x")) == "libero_goal"


def test_the_only_set_needs_no_key_but_a_wrong_one_is_refused() -> None:
    one = {"bridge": SETS["bridge"]}
    assert choose_key(one, None, Path("x")) == "bridge"
    with pytest.raises(CheckpointError, match=r"with no 'goal'; it has \['bridge'\]"):
        choose_key(one, "goal", Path("x"))


def test_one_of_several_sets_is_never_guessed() -> None:
    with pytest.raises(CheckpointError, match="more than one set, and none was chosen"):
        choose_key(SETS, None, Path("x"))


BOTH_ENDS = Statistics(
    action=Range(q01=(-1.0, 0.0), q99=(1.0, 1.0), min=(-2.0, 0.0), max=(2.0, 1.0))
)


def test_bounds_are_percentiles_or_ends() -> None:
    percentiles = get_action_bounds(BOTH_ENDS, "bounds_q99", gripper="openvla", epsilon=0.0)
    ends = get_action_bounds(BOTH_ENDS, "bounds", gripper="openvla", epsilon=0.0)
    assert (percentiles.low, percentiles.high) == ((-1.0, 0.0), (1.0, 1.0))
    assert (ends.low, ends.high) == ((-2.0, 0.0), (2.0, 1.0))
    assert percentiles.is_scaled == (True, True)


@pytest.mark.parametrize(
    "ends", [Range(q01=(1.0,)), Range(q01=(), q99=()), Range(q01=(1.0,), q99=(1.0, 2.0))]
)
def test_bounds_without_their_numbers_are_refused(ends: Range) -> None:
    with pytest.raises(CheckpointError, match="the action statistics have no q01 and q99"):
        get_action_bounds(Statistics(action=ends), "bounds_q99", gripper="openvla", epsilon=0.0)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ((True, True, False), "openvla"),
        ((True, True, True), "signed"),
        ((True, False, False), "signed"),
        (None, "openvla"),
    ],
)
def test_the_gripper_is_read_from_what_is_not_scaled(
    mask: tuple[bool, ...] | None, expected: str
) -> None:
    assert get_gripper(Statistics(action=Range(mask=mask)), Extension()) == expected


def test_the_checkpoints_own_setting_counts_before_its_statistics() -> None:
    scaled = Statistics(action=Range(mask=(True, True)))
    assert get_gripper(scaled, Extension(gripper="openvla")) == "openvla"


def test_proprioception_is_scaled_whole_or_refused() -> None:
    assert get_proprio(BOTH_ENDS, "bounds_q99", "state", "zero") is None
    whole = Range(q01=(0.0,), q99=(2.0,), mask=(True,))
    found = get_proprio(Statistics(action=Range(), proprio=whole), "bounds_q99", "state", "zero")
    assert found is not None
    assert (found.key, found.low, found.high) == ("state", (0.0,), (2.0,))
    part = Range(q01=(0.0,), q99=(2.0,), mask=(False,))
    with pytest.raises(CheckpointError, match="expected one that scales every dimension"):
        get_proprio(Statistics(action=Range(), proprio=part), "bounds_q99", "state", "zero")
