"""A plan as profiles: speeds along a path, and what one number of it changes."""

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import vla_rl.envs  # noqa: F401  # registers ours
from vla_rl.envs.driving.plan_actions import (
    AHEAD_SCALE,
    COSINES,
    RADII,
    TURN_SCALE,
    decode_profiles,
    encode_profiles,
)
from vla_rl.envs.driving.planner import best_proposal, extend_path
from vla_rl.envs.driving.scores import score_poses, score_waypoints
from vla_rl.envs.driving.scores.scene import VX
from vla_rl.envs.driving.world import draw_world


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
