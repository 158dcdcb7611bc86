"""Starts that are drawn: fixed by their number alone, spread over the task's regions, solved like
any other.
"""

from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.experts import Expert

IDLE = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


def start(env: LiberoEnv, number: int) -> dict[str, Any]:
    env.reset(options={"init_state_id": number})
    return env.scene.get_state()


def place_of(env: LiberoEnv, body: str) -> np.ndarray:
    position: np.ndarray = env.scene.data.body(body).xpos.copy()
    return position


def test_a_drawn_start_is_fixed_by_its_number_whatever_was_played_before(
    object_env: LiberoEnv,
) -> None:
    before = start(object_env, 77)
    object_env.reset(options={"init_state_id": 3})
    object_env.step(IDLE)
    again = start(object_env, 77)
    np.testing.assert_array_equal(again["physics"], before["physics"])
    np.testing.assert_array_equal(again["body_pos"], before["body_pos"])


def test_a_scene_of_another_seed_gives_the_same_drawn_start(
    goal_env: LiberoEnv, assets: str
) -> None:
    other = LiberoEnv("libero_goal", task_id=7, image_size=32, scene_seed=5, assets=assets)
    try:
        ours, theirs = start(goal_env, 60), start(other, 60)
    finally:
        other.close()
    np.testing.assert_array_equal(ours["physics"], theirs["physics"])
    np.testing.assert_array_equal(ours["body_pos"], theirs["body_pos"])


def test_objects_and_robot_stand_elsewhere_in_every_drawn_start(object_env: LiberoEnv) -> None:
    places, hands = [], []
    for number in range(50, 56):
        start(object_env, number)
        places.append(place_of(object_env, "cream_cheese_1_main"))
        hands.append(object_env.scene.reading.proprio[:3].copy())
    # m; the task's region has sides of 5 mm
    assert np.ptp([place[:2] for place in places], axis=0).min() > 0.002
    assert np.ptp(hands, axis=0).max() > 0.01  # m
    assert np.ptp([place[2] for place in places]) < 0.005  # it lies on the floor every time


def test_fixtures_move_too(goal_env: LiberoEnv) -> None:
    stoves = []
    for number in (50, 51):
        start(goal_env, number)
        stoves.append(place_of(goal_env, "flat_stove_1_main"))
    assert np.linalg.norm(stoves[0] - stoves[1]) > 1e-3


def test_the_expert_solves_a_drawn_start(
    object_env: LiberoEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_env, "render_every_step", False)  # the expert looks at the scene
    _, info = object_env.reset(options={"init_state_id": 1000})
    assert info["init_state_id"] == 1000
    expert = Expert(object_env.scene)
    while not info["is_success"]:
        *_, truncated, info = object_env.step(expert.act())
        assert not truncated


@pytest.mark.parametrize("number", [-1, 1 << 31, "three"])
def test_a_number_that_is_no_start_is_refused(object_env: LiberoEnv, number: Any) -> None:
    with pytest.raises(
        ValueError, match=r"expected 0 to 49, or up to 2147483647 for a start that is drawn"
    ):
        object_env.reset(options={"init_state_id": number})
