"""A plan along the route: what zeros mean, what one number changes, and what needs a route."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import vla_rl.envs  # noqa: F401  # registers ours
from benchmarks.driving_blind import steady
from vla_rl.envs.driving.plan_actions import (
    AHEAD_SCALE,
    RADII,
    decode_along_route,
    decode_plan,
    encode_along_route,
    encode_plan,
)
from vla_rl.envs.driving.planner import propose
from vla_rl.envs.driving.world import draw_world
from vla_rl.errors import ConfigError
from vla_rl.recipes.grpo_navsim import GrpoNavsimConfig

STRAIGHT = np.stack([5.0 * np.arange(1, 11), np.zeros(10)], -1)


def arc(radius: float) -> np.ndarray:
    """Ten points, 5 m apart, of a bend to the left from the car on."""
    angles = 5.0 * np.arange(1, 11) / radius
    return np.stack([radius * np.sin(angles), radius * (1 - np.cos(angles))], -1)


def plan(**rows: tuple[int, float]) -> np.ndarray:
    """Zeros but for one number of a column: ahead=(0, 0.5) is 0.5 in row 0."""
    made = np.zeros((8, 3))
    for name, (row, value) in rows.items():
        made[row, ("ahead", "left", "turn").index(name)] = value
    return made


def test_zeros_keep_the_speed_in_the_middle_of_the_lane() -> None:
    waypoints = decode_along_route(plan(), 8.0, STRAIGHT)
    np.testing.assert_allclose(waypoints[:, 0], 4.0 * np.arange(1, 9), atol=1e-9)
    np.testing.assert_allclose(waypoints[:, 1:], 0.0, atol=1e-9)


def test_zeros_follow_a_bend() -> None:
    radius = 25.0
    turned = 4.0 * np.arange(1, 9) / radius
    waypoints = decode_along_route(plan(), 8.0, arc(radius))
    np.testing.assert_allclose(waypoints[:, 0], radius * np.sin(turned), atol=0.1)
    np.testing.assert_allclose(waypoints[:, 1], radius * (1 - np.cos(turned)), atol=0.1)
    np.testing.assert_allclose(waypoints[:, 2], turned, atol=0.05)


def test_the_first_number_is_a_steady_pull_or_brake() -> None:
    pull = 0.25 * AHEAD_SCALE[0] / 8**0.5  # m/s^2
    time_s = 0.5 * np.arange(1, 9)
    faster = decode_along_route(plan(ahead=(0, 0.25)), 6.0, STRAIGHT)[:, 0]
    np.testing.assert_allclose(faster, 6.0 * time_s + pull / 2 * time_s**2, atol=1e-9)


def test_the_third_number_is_a_shift_at_its_distance_of_the_route() -> None:
    waypoints = decode_along_route(plan(turn=(3, 0.5)), 2 * RADII[3], STRAIGHT)
    assert waypoints[0, 1] == pytest.approx(2.0 * 0.5)  # after 0.5 s it is RADII[3] away


def test_the_second_number_is_a_shift_of_all_waypoints_and_its_sign_the_side() -> None:
    left = decode_along_route(plan(left=(0, 0.5)), 8.0, STRAIGHT)[:, 1]
    right = decode_along_route(plan(left=(0, -0.5)), 8.0, STRAIGHT)[:, 1]
    np.testing.assert_allclose(left, 4.0 * 0.5 / 8**0.5)
    np.testing.assert_allclose(right, -left)


@pytest.mark.parametrize("points", [0, 1, 3])
def test_beyond_the_end_of_the_route_the_path_is_straight(points: int) -> None:
    ended = STRAIGHT[np.minimum(np.arange(10), points - 1)] if points else np.zeros((10, 2))
    waypoints = decode_along_route(plan(), 10.0, ended)
    np.testing.assert_allclose(waypoints[:, 0], 5.0 * np.arange(1, 9), atol=1e-9)
    np.testing.assert_allclose(waypoints[:, 1:], 0.0, atol=1e-9)


def test_the_planners_proposals_come_back_as_plans_of_every_layout() -> None:
    for number in range(12):
        world = draw_world(number, "held_out")
        env = gymnasium.make("vla_rl/driving-v0", split="held_out", image_size=32).unwrapped
        seen, _ = env.reset(options={"init_state_id": number})
        speed, route = float(seen["state"][0]), seen["route"]
        for poses in propose(world)[[6, 12, 13, 14]]:  # slow and fast, three places in the lane
            cos, sin = np.cos(poses[0, 2]), np.sin(poses[0, 2])
            own = (poses[5::5, :2] - poses[0, :2]) @ np.array([[cos, -sin], [sin, cos]])
            again = decode_along_route(encode_along_route(poses[::5], speed, route), speed, route)
            assert np.hypot(*(again[:, :2] - own).T).max() < 0.5


def test_a_plan_along_the_route_needs_a_route() -> None:
    for call in (
        lambda: decode_plan(plan(), "along_route", 5.0, None),
        lambda: encode_plan(np.zeros((9, 3)), np.zeros((2, 3)), "along_route", 5.0, None),
    ):
        with pytest.raises(ValueError, match="but the observation has no route"):
            call()
    with pytest.raises(ConfigError, match="action is 'along_route', expected moves or profiles"):
        GrpoNavsimConfig(action="along_route")
    with pytest.raises(ValueError, match="NavSim gives no route"):
        gymnasium.make("vla_rl/navsim-v0", folder="scenes", action="along_route")


def test_the_planner_drives_along_the_route_in_the_environment() -> None:
    env: Any = gymnasium.make("vla_rl/driving-v0", action="along_route", image_size=32).unwrapped
    env.reset(options={"init_state_id": 3})
    for row in env.expert_actions():
        *_, terminated, _, info = env.step(row)
    assert terminated
    assert info["score"]["total"] > 0.9


def test_zeros_drive_round_a_roundabout_in_closed_loop() -> None:
    env = gymnasium.make(
        "vla_rl/driving_waypoints-v0", action="along_route", kind="roundabout", image_size=32
    ).unwrapped
    env.reset(options={"init_state_id": 3})
    for _ in range(8 * 8):  # 4 s
        _, _, _, _, info = env.step(np.zeros(3, np.float32))
    assert info["score"]["completion"] > 30.0
    assert info["score"]["red_light"] == 0.0


def test_gymnasium_accepts_environments_that_are_driven_along_the_route() -> None:
    for env_id in ("driving-v0", "driving_waypoints-v0"):
        env = gymnasium.make(f"vla_rl/{env_id}", action="along_route", image_size=32).unwrapped
        check_env(env, skip_render_check=True)


def test_a_plan_that_sees_nothing_pulls_with_its_acceleration() -> None:
    time_s = 0.5 * np.arange(1, 9)
    brakes = decode_along_route(steady(-1.0), 8.0, STRAIGHT)[:, 0]
    np.testing.assert_allclose(brakes, 8.0 * time_s - time_s**2 / 2, atol=1e-9)
