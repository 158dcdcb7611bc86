"""The driving world in closed loop: what a drive is graded by, and scenes that are kept."""

from typing import Any

import gymnasium
import numpy as np
import pytest

import vla_rl.envs  # noqa: F401  # registers ours
from vla_rl.envs.driving.plan_actions import encode_moves


def make(env_id: str = "driving_waypoints-v0", **kwargs: Any) -> Any:
    env = gymnasium.make(f"vla_rl/{env_id}", disable_env_checker=True, image_size=32, **kwargs)
    return env.unwrapped


def driven(env: Any, scene: int, rows: np.ndarray) -> list[tuple[Any, ...]]:
    """Drive a scene by one plan again and again; return images, rewards and scores."""
    observation, _ = env.reset(options={"init_state_id": scene})
    found, is_over = [(observation["image"].tobytes(),)], False
    while not is_over:
        for row in rows:
            observation, reward, terminated, truncated, info = env.step(row)
            is_over = terminated or truncated
            if is_over:
                break
        found.append((observation["image"].tobytes(), reward, info["score"]))
    return found


def along_the_route(observation: dict[str, Any], speed: float) -> np.ndarray:
    """The action that follows the route of the observation at a steady speed."""
    route = np.concatenate([np.zeros((1, 2)), observation["route"]])
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(route, axis=0).T))])
    wanted = speed * 0.5 * np.arange(9)
    places = np.stack([np.interp(wanted, along, route[:, axis]) for axis in (0, 1)], -1)
    ways = np.diff(places, axis=0)
    headings = np.concatenate([[0.0], np.arctan2(ways[:, 1], ways[:, 0])])
    return encode_moves(np.concatenate([places, headings[:, None]], -1))


def test_following_the_route_by_waypoints_reaches_the_goal() -> None:
    env = make("driving_waypoints-v0", kind="curve")
    done = []
    for number in range(4):
        observation, _ = env.reset(options={"init_state_id": number})
        over = False
        while not over:
            action = along_the_route(observation, 5.0)
            observation, reward, terminated, truncated, info = env.step(action)
            over = terminated or truncated
        done.append(info["score"]["completion"])
        assert reward == pytest.approx(info["score"]["driving_score"] / 100)
    assert np.mean(done) == 100.0


def test_running_into_others_is_noted_once_for_each() -> None:
    env = make("driving_control-v0")
    noted = []
    for number in range(12):
        env.reset(options={"init_state_id": number})
        over = False
        while not over:
            _, _, terminated, truncated, info = env.step(np.array([1, 0, 0], np.float32))
            over = terminated or truncated
        noted.append(sum(v for k, v in info["score"].items() if k.startswith("collisions")))
        assert info["is_success"] is (
            info["score"]["driving_score"] == 100.0 and info["score"]["completion"] == 100.0
        )
    assert max(noted) >= 1
    assert max(noted) <= 6


def test_a_plan_of_eight_moves_drives_as_one_of_eight_waypoints() -> None:
    rows = gymnasium.make("vla_rl/driving_waypoints-v0", action="moves", image_size=32).unwrapped
    whole = gymnasium.make("vla_rl/driving_waypoints-v0", image_size=32).unwrapped
    plan = np.tile(np.array([0.1, 0.05, 0.0], np.float32), (8, 1))
    for env in (rows, whole):
        env.reset(options={"init_state_id": 3})
    for row in plan[:5]:
        assert rows.step(row)[1:4] == (0.0, False, False)
    half = rows.get_state()
    rows.step(plan[5])
    rows.set_state(half)
    for row in plan[5:]:
        observation, *_, info = rows.step(row)
    expected, *_, expected_info = whole.step(plan)
    np.testing.assert_array_equal(observation["image"], expected["image"])
    assert info["score"] == expected_info["score"]
    assert info["score"]["total"] == info["score"]["driving_score"] / 100


def test_a_scene_that_is_driven_again_is_the_scene_of_a_new_environment() -> None:
    rows = np.tile(np.array([0.05, 0.0, 0.0], np.float32), (8, 1))
    used = make(action="along_route", kind="four_way")
    first = driven(used, 3, rows)
    assert driven(used, 3, rows) == first
    assert driven(used, 4, rows) != first
    assert driven(used, 3, rows) == first
    assert driven(make(action="along_route", kind="four_way"), 3, rows) == first


@pytest.mark.parametrize("version", ["pdms_v1", "epdms_v2"])
def test_the_first_plan_is_graded_as_the_open_loop_grades_it(version: str) -> None:
    rows = np.zeros((8, 3), np.float32)
    rows[0, 0] = -0.2
    scene = {"init_state_id": 5}
    plan = make("driving-v0", action="along_route", kind="tee", version=version)
    plan.reset(options=scene)
    for row in rows:
        *_, info = plan.step(row)
    expected = {key: value for key, value in info["score"].items() if key != "backward_m"}
    drive = make(action="along_route", kind="tee", first_plan=version)
    drive.reset(options=scene)
    for row in (*rows, *-rows):  # another plan follows
        *_, info = drive.step(row)
    expected[version] = expected.pop("total")
    # the open loop plans with the speed that is seen, a float32
    graded = {name: info["score"][name] for name in expected}
    assert graded == pytest.approx(expected, abs=1e-6)
    state = drive.get_state()
    drive.reset(options={"init_state_id": 6})
    assert "comfort" not in drive.step(rows[0])[-1]["score"]  # of the scene before
    drive.set_state(state)
    assert graded.items() <= drive.step(rows[0])[-1]["score"].items()


def test_what_grades_no_first_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="first_plan is 'pdms', expected one of"):
        make(first_plan="pdms")
    with pytest.raises(ValueError, match="pedals and wheel have no plan"):
        make("driving_control-v0", first_plan="pdms_v1")
