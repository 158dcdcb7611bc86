"""Actions between -1 and 1 are plans: moves between waypoints, profiles along a path, numbers along the route."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import vla_rl.envs  # noqa: F401  # registers ours
from benchmarks.driving_blind import steady
from vla_rl.envs.driving.plan_actions import (
    AHEAD_SCALE,
    COSINES,
    HIGHEST_MOVE,
    LOWEST_MOVE,
    RADII,
    TURN_SCALE,
    decode_along_route,
    decode_moves,
    decode_plan,
    decode_profiles,
    encode_along_route,
    encode_moves,
    encode_plan,
    encode_profiles,
)
from vla_rl.envs.driving.planner import best_proposal, extend_path, propose
from vla_rl.envs.driving.scores import score_poses, score_waypoints
from vla_rl.envs.driving.scores.scene import VX
from vla_rl.envs.driving.world import draw_world
from vla_rl.errors import ConfigError
from vla_rl.recipes.grpo_navsim import GrpoNavsimConfig


def test_the_bounds_of_an_action_are_the_bounds_of_a_move() -> None:
    assert np.allclose(decode_moves(np.full((1, 3), -1.0)), [LOWEST_MOVE])
    assert np.allclose(decode_moves(np.full((1, 3), 1.0)), [HIGHEST_MOVE])
    assert np.allclose(decode_moves(np.full((1, 3), 7.0)), [HIGHEST_MOVE])


def test_a_move_is_in_the_frame_of_the_waypoint_before_it() -> None:
    def action(ahead: float, left: float, turn: float) -> np.ndarray:
        return (
            2.0 * (np.array([ahead, left, turn]) - LOWEST_MOVE) / (HIGHEST_MOVE - LOWEST_MOVE) - 1.0
        )

    turned = decode_moves(np.stack([action(0.0, 0.0, 0.5), action(2.0, 0.0, 0.0)]))
    assert np.allclose(turned, [[0.0, 0.0, 0.5], [2.0 * np.cos(0.5), 2.0 * np.sin(0.5), 0.5]])


def test_poses_in_any_frame_give_the_actions_that_made_them() -> None:
    actions = np.random.default_rng(0).uniform(-0.9, 0.9, (8, 3)).astype(np.float32)
    made = np.concatenate([np.zeros((1, 3)), decode_moves(actions)])
    turn = np.array([[0.0, -1.0], [1.0, 0.0]])  # a quarter turn to the left
    moved = np.concatenate([made[:, :2] @ turn.T + [5.0, -3.0], made[:, 2:] + np.pi / 2], axis=1)
    assert np.allclose(encode_moves(moved), actions, atol=1e-5)
    assert encode_moves(moved).dtype == np.float32


def test_a_move_beyond_the_bounds_is_clipped() -> None:
    poses = np.array([[0.0, 0.0, 0.0], [100.0, 0.0, 0.0]])
    assert encode_moves(poses)[0, 0] == 1.0


def plan(ahead: float = 0.0) -> np.ndarray:
    """A steady pull straight on."""
    rows = np.zeros((8, 3))
    rows[0, 0] = ahead
    return rows


def test_the_cosines_are_orthonormal_and_the_first_is_constant() -> None:
    assert np.allclose(COSINES @ COSINES.T, np.eye(8))
    assert np.allclose(COSINES[0], 8**-0.5)


def test_a_plan_of_zeros_keeps_the_speed_straight_on() -> None:
    waypoints = decode_profiles(plan(), speed=6.0)
    assert np.allclose(waypoints[:, 0], 3.0 * np.arange(1, 9))
    assert np.allclose(waypoints[:, 1:], 0.0)


def test_the_first_number_is_a_steady_pull_or_brake() -> None:
    pull = 0.25 * AHEAD_SCALE[0] / 8**0.5  # m/s^2
    time_s = 0.5 * np.arange(1, 9)
    faster = decode_profiles(plan(ahead=0.25), speed=6.0)[:, 0]
    assert np.allclose(faster, 6.0 * time_s + pull / 2 * time_s**2)
    stops = decode_profiles(plan(ahead=-1.0), speed=6.0)[:, 0]
    assert np.isclose(stops[-1], 6.0**2 / (2 * AHEAD_SCALE[0] / 8**0.5), atol=0.3)


def test_a_turn_is_the_bearing_of_the_path_at_its_radius() -> None:
    rows = plan()
    radius = 30.0
    rows[:, 2] = (np.arcsin(RADII / (2 * radius)) / TURN_SCALE) ** (
        1 / 1.5
    )  # an arc from the car on
    waypoints = decode_profiles(rows, speed=8.0)
    turned = 4.0 * np.arange(1, 9) / radius
    assert np.allclose(waypoints[:, 2], turned, atol=0.02)
    assert np.allclose(waypoints[:, 0], radius * np.sin(turned), atol=0.1)
    assert np.allclose(waypoints[:, 1], radius * (1 - np.cos(turned)), atol=0.1)


def test_faster_is_farther_along_the_same_path() -> None:
    rows = np.random.default_rng(0).uniform(-0.5, 0.5, (8, 3))
    rows[:, :2] = 0.0
    slow, fast = decode_profiles(rows, 3.0), decode_profiles(rows, 6.0)
    # twice as fast: the place after k spans is the slow one's after 2 k
    assert np.allclose(fast[:4], slow[1::2])


def test_the_mirrored_plan_is_the_mirrored_motion() -> None:
    rows = np.random.default_rng(1).uniform(-0.5, 0.5, (8, 3))
    mirrored = decode_profiles(rows * [1.0, -1.0, -1.0], 5.0)
    assert np.allclose(mirrored, decode_profiles(rows, 5.0) * [1.0, -1.0, -1.0])


def test_a_plan_never_reverses() -> None:
    for seed in range(20):
        rows = np.random.default_rng(seed).uniform(-1.0, 1.0, (8, 3))
        rows[:, 1:] = 0.0
        assert (np.diff(decode_profiles(rows, 2.0)[:, 0], prepend=0.0) >= 0.0).all()


def test_the_path_of_a_plan_is_known_beyond_its_end() -> None:
    radius = 40.0
    angles = np.arange(0.0, 60.0) / radius
    path = np.stack([radius * np.sin(angles), radius * (1 - np.cos(angles)), angles], -1)
    waits = encode_profiles(np.zeros((9, 3)), path, 0.0)
    drives = encode_profiles(path[:45:5], path, 10.0)
    assert np.allclose(waits[:, 2], drives[:, 2])
    near = RADII < 50.0  # the path ends 52 m away
    assert np.allclose(
        TURN_SCALE[near] * drives[near, 2] ** 1.5, np.arcsin(RADII[near] / (2 * radius)), atol=0.01
    )
    assert np.allclose([waits[:, 0], drives[:, 0]], 0.0, atol=0.01)  # neither changes its speed


def test_the_planners_trajectories_score_as_profiles_what_they_score_as_poses() -> None:
    given, planned = [], []
    for number in range(12):
        world = draw_world(number, "held_out")
        reference, _ = best_proposal(world, "epdms_v2")
        scene = world.scene(reference)
        path, speed = extend_path(reference, world.roads.route), float(world.start[VX])
        rows = encode_profiles(reference[::5], path, speed)
        assert np.abs(rows).max() <= 1.0
        waypoints = decode_profiles(rows, speed)
        given.append(score_poses(scene, reference[None], "epdms_v2").total[0])
        planned.append(score_waypoints(scene, waypoints[None], "epdms_v2").total[0])
    assert np.mean(planned) > np.mean(given) - 0.02


def test_the_planner_drives_by_profiles_in_the_environment() -> None:
    env = gymnasium.make("vla_rl/driving-v0", action="profiles", image_size=32).unwrapped
    env.reset(options={"init_state_id": 3})
    best, slowest = env.expert_actions(), env.proposed_actions(0)
    assert best.shape == slowest.shape == (8, 3)
    assert slowest[0, 0] < best[0, 0]
    for row in best:
        *_, terminated, _, info = env.step(row)
    assert terminated
    assert info["score"]["total"] > 0.9


def test_the_total_of_another_version_is_reported_beside() -> None:
    totals = {}
    for version, other in (("pdms_v1", "epdms_v2"), ("epdms_v2", "pdms_v1")):
        env = gymnasium.make(
            "vla_rl/driving-v0", version=version, also=(other,), action="profiles", image_size=32
        ).unwrapped
        env.reset(options={"init_state_id": 5})
        for row in np.zeros((8, 3), np.float32):
            *_, info = env.step(row)
        totals[version] = (info["score"]["total"], info["score"][other])
    assert totals["pdms_v1"] == totals["epdms_v2"][::-1]
    with pytest.raises(ValueError, match="version is 'pdms_v3'"):
        gymnasium.make("vla_rl/driving-v0", also=("pdms_v3",))


def test_profiles_drive_in_closed_loop_from_the_speed_of_each_decision() -> None:
    env = gymnasium.make(
        "vla_rl/driving_waypoints-v0", action="profiles", kind="straight", image_size=32
    ).unwrapped
    seen, _ = env.reset(options={"init_state_id": 3})
    stop = np.zeros((8, 3), np.float32)
    stop[0, 0] = -1.0
    speeds = [float(seen["state"][0])]
    for _ in range(6):
        for row in stop:
            seen, *_ = env.step(row)
        speeds.append(float(seen["state"][0]))
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] - speeds[-1] > 4.0


def test_an_unknown_way_of_planning_is_refused() -> None:
    with pytest.raises(
        ValueError, match="action is 'modes', expected one of moves, profiles, along_route"
    ):
        gymnasium.make("vla_rl/driving-v0", action="modes")


def test_gymnasium_accepts_environments_that_are_driven_by_profiles() -> None:
    for env_id in ("driving-v0", "driving_waypoints-v0"):
        env = gymnasium.make(f"vla_rl/{env_id}", action="profiles", image_size=32).unwrapped
        check_env(env, skip_render_check=True)


STRAIGHT = np.stack([5.0 * np.arange(1, 11), np.zeros(10)], -1)


def arc(radius: float) -> np.ndarray:
    """Ten points, 5 m apart, of a bend to the left from the car on."""
    angles = 5.0 * np.arange(1, 11) / radius
    return np.stack([radius * np.sin(angles), radius * (1 - np.cos(angles))], -1)


def rows_along_route(**rows: tuple[int, float]) -> np.ndarray:
    """Zeros but for one number of a column: ahead=(0, 0.5) is 0.5 in row 0."""
    made = np.zeros((8, 3))
    for name, (row, value) in rows.items():
        made[row, ("ahead", "left", "turn").index(name)] = value
    return made


def test_zeros_keep_the_speed_in_the_middle_of_the_lane() -> None:
    waypoints = decode_along_route(rows_along_route(), 8.0, STRAIGHT)
    np.testing.assert_allclose(waypoints[:, 0], 4.0 * np.arange(1, 9), atol=1e-9)
    np.testing.assert_allclose(waypoints[:, 1:], 0.0, atol=1e-9)


def test_zeros_follow_a_bend() -> None:
    radius = 25.0
    turned = 4.0 * np.arange(1, 9) / radius
    waypoints = decode_along_route(rows_along_route(), 8.0, arc(radius))
    np.testing.assert_allclose(waypoints[:, 0], radius * np.sin(turned), atol=0.1)
    np.testing.assert_allclose(waypoints[:, 1], radius * (1 - np.cos(turned)), atol=0.1)
    np.testing.assert_allclose(waypoints[:, 2], turned, atol=0.05)


def test_the_first_number_along_the_route_is_a_steady_pull_or_brake() -> None:
    pull = 0.25 * AHEAD_SCALE[0] / 8**0.5  # m/s^2
    time_s = 0.5 * np.arange(1, 9)
    faster = decode_along_route(rows_along_route(ahead=(0, 0.25)), 6.0, STRAIGHT)[:, 0]
    np.testing.assert_allclose(faster, 6.0 * time_s + pull / 2 * time_s**2, atol=1e-9)


def test_the_third_number_is_a_shift_at_its_distance_of_the_route() -> None:
    waypoints = decode_along_route(rows_along_route(turn=(3, 0.5)), 2 * RADII[3], STRAIGHT)
    assert waypoints[0, 1] == pytest.approx(2.0 * 0.5)  # after 0.5 s it is RADII[3] away


def test_the_second_number_is_a_shift_of_all_waypoints_and_its_sign_the_side() -> None:
    left = decode_along_route(rows_along_route(left=(0, 0.5)), 8.0, STRAIGHT)[:, 1]
    right = decode_along_route(rows_along_route(left=(0, -0.5)), 8.0, STRAIGHT)[:, 1]
    np.testing.assert_allclose(left, 4.0 * 0.5 / 8**0.5)
    np.testing.assert_allclose(right, -left)


@pytest.mark.parametrize("points", [0, 1, 3])
def test_beyond_the_end_of_the_route_the_path_is_straight(points: int) -> None:
    ended = STRAIGHT[np.minimum(np.arange(10), points - 1)] if points else np.zeros((10, 2))
    waypoints = decode_along_route(rows_along_route(), 10.0, ended)
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
        lambda: decode_plan(rows_along_route(), "along_route", 5.0, None),
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
