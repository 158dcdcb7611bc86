"""The driving world: scenes from integers, their roads, what the cameras see, and both ways of acting in it."""

from typing import Any

import cv2
import gymnasium
import numpy as np
import pytest

import vla_rl.envs  # noqa: F401  # registers ours
from vla_rl.envs.driving.observing import CAMERAS, FRONT
from vla_rl.envs.driving.one_decision import OpenLoopDrivingEnv
from vla_rl.envs.driving.plan_actions import decode_moves, encode_moves
from vla_rl.envs.driving.roads import (
    LANE_WIDTH,
    LAYOUTS,
    Roads,
    compute_curvatures,
    join_paths,
    make_arc,
    make_bend,
    make_line,
    ring_around,
    shift_path,
    tangents,
)
from vla_rl.envs.driving.scores.geometry import Polygons
from vla_rl.envs.driving.scores.motion import Car, bicycle_step, step_bicycle
from vla_rl.envs.driving.scores.scene import AX, HEADING, STEER, VX, YAW_RATE, X, Y
from vla_rl.envs.driving.world import NUM_SCENES, choose_scene, draw_world

STRAIGHT = make_line((0.0, 0.0), (10.0, 0.0))


def test_a_line_has_a_point_every_metre_and_both_ends() -> None:
    assert np.allclose(STRAIGHT, np.stack([np.arange(11.0), np.zeros(11)], -1))


def test_joined_paths_have_a_point_every_metre_and_none_twice() -> None:
    path = join_paths(STRAIGHT, make_line((10.0, 0.0), (10.0, 5.0)))
    assert np.allclose(np.hypot(*np.diff(path, axis=0).T), 1.0)
    assert np.allclose(path[[0, 10, 14]], [[0.0, 0.0], [10.0, 0.0], [10.0, 4.0]])


def test_a_path_is_shifted_to_its_own_left() -> None:
    assert np.allclose(shift_path(STRAIGHT, 2.0), STRAIGHT + np.array([0.0, 2.0]))
    back = STRAIGHT[::-1]
    assert np.allclose(shift_path(back, 2.0), back - np.array([0.0, 2.0]))


def test_a_circle_is_as_curved_as_its_radius_says() -> None:
    circle = join_paths(make_arc(np.zeros(2), 20.0, 0.0, np.pi))
    assert compute_curvatures(circle)[5:-5] == pytest.approx(1 / 20.0, rel=0.02)
    assert np.allclose(compute_curvatures(STRAIGHT), 0.0)


def test_a_bend_leaves_and_arrives_in_the_given_directions() -> None:
    curve = make_bend(
        np.zeros(2), np.array([1.0, 0.0]), np.array([10.0, 10.0]), np.array([0.0, 1.0])
    )
    assert np.allclose(curve[[0, -1]], [[0.0, 0.0], [10.0, 10.0]])
    assert np.allclose(tangents(curve)[[0, -1]], [[1.0, 0.0], [0.0, 1.0]], atol=0.2)


def test_a_strip_is_the_ring_around_its_path() -> None:
    ring = ring_around(STRAIGHT, 1.5)
    assert np.allclose(ring, [[0.0, 1.5], [10.0, 1.5], [10.0, -1.5], [0.0, -1.5]])


ALONG_X = np.stack([np.arange(0.0, 20.0), np.zeros(20)], axis=1)


def made() -> Roads:
    return Roads(command="straight", speed_limit=10.0, route=ALONG_X)


def test_a_lane_lies_on_a_road_that_is_no_part_of_the_route() -> None:
    roads = made()
    roads.add_lane(ALONG_X, on_route=True)
    assert (roads.layers, roads.on_route) == (["lane", "roadblock"], [True, False])
    lane, road = (np.ptp(ring[:, 1]) for ring in roads.rings)
    assert np.isclose(lane, LANE_WIDTH)
    assert road > lane


def test_lines_stand_at_half_a_lane_to_the_left_and_to_the_right() -> None:
    roads = made()
    roads.draw_edges(ALONG_X, left_dashed=True, right_dashed=False)
    (left,), (right,) = roads.dashed, roads.solid
    assert np.allclose(left[:, 1], LANE_WIDTH / 2)
    assert np.allclose(right[:, 1], -LANE_WIDTH / 2)


def test_the_map_has_every_polygon_with_its_layer() -> None:
    roads = made()
    roads.add_lane(ALONG_X, on_route=False)
    found = roads.as_map()
    assert len(found.rings) == len(found.layers) == len(found.on_route) == 2


STANDING = encode_moves(np.zeros((9, 3)))


def make(env_id: str, **kwargs: Any) -> Any:
    env = gymnasium.make(f"vla_rl/{env_id}", disable_env_checker=True, image_size=32, **kwargs)
    return env.unwrapped


@pytest.mark.parametrize("kind", list(LAYOUTS))
def test_every_layout_has_a_sound_map_under_its_route(kind: str) -> None:
    for number in range(5):
        world = draw_world(number, kind=kind)
        ours = [
            ring
            for ring, on_route in zip(world.map.rings, world.map.on_route, strict=True)
            if on_route
        ]
        ahead = world.roads.route[30:90]
        inside = Polygons(ours).contain(ahead + 0.01).any(0)
        assert inside.mean() > 0.95
        assert np.isfinite(world.recording).all()


def test_the_same_number_is_the_same_scene_and_splits_share_none() -> None:
    one, again, other = draw_world(5), draw_world(5), draw_world(5, "held_out")
    np.testing.assert_array_equal(one.recording, again.recording)
    assert one.recording.shape != other.recording.shape or not np.array_equal(
        one.recording, other.recording
    )
    with pytest.raises(ValueError, match="train or held_out"):
        draw_world(5, "test")  # type: ignore[arg-type]


def test_the_planner_drives_well_and_standing_still_does_not() -> None:
    env = make("driving-v0", split="held_out")
    experts, idle = [], []
    for number in range(12):
        env.reset(options={"init_state_id": number})
        for row in env.expert_actions():
            *_, terminated, _, info = env.step(row)
        assert terminated
        experts.append(info["score"]["total"])
        env.reset(options={"init_state_id": number})
        for _ in range(8):
            *_, info = env.step(STANDING[0])
        idle.append(info["score"]["total"])
    assert np.mean(experts) > 0.85
    assert np.mean(idle) < np.mean(experts) - 0.15


def test_the_reward_can_be_one_sub_score_and_success_has_a_threshold() -> None:
    env = make("driving-v0", reward="ego_progress", version="pdms_v1", success_score=0.0)
    env.reset(seed=3)
    for _ in range(8):
        _, reward, *_, info = env.step(STANDING[0])
    assert reward == info["score"]["ego_progress"]
    assert info["is_success"] is True
    with pytest.raises(ValueError, match="ego_progress"):
        make("driving-v0", reward="speed")


def test_the_last_observation_is_at_the_end_of_the_graded_motion() -> None:
    env, other = make("driving-v0", action="along_route"), make("driving-v0", action="along_route")
    before, _ = env.reset(options={"init_state_id": 3})
    for _ in range(7):
        seen, *_ = env.step(np.zeros(3))
        np.testing.assert_array_equal(seen["image"], before["image"])
    after, *_, info = env.step(np.zeros(3))
    assert info["score"]["total"] > 0.0
    assert not np.array_equal(after["image"], before["image"])
    # zeros along the route keep the speed: the car is as fast, 4 s farther on
    assert after["state"][0] == pytest.approx(before["state"][0], abs=0.5)
    assert not np.allclose(after["route"], before["route"], atol=1.0)
    restored = other.set_state(env.get_state())
    for key, value in after.items():
        np.testing.assert_array_equal(restored[key], value)


def test_moves_and_waypoints_are_inverse() -> None:
    actions = np.random.default_rng(0).uniform(-0.5, 0.5, (8, 3))
    poses = np.concatenate([np.zeros((1, 3)), decode_moves(actions)])
    np.testing.assert_allclose(encode_moves(poses), actions, atol=1e-6)


def test_surround_cameras_are_named_as_navsims() -> None:
    env = make("driving_waypoints-v0", cameras=tuple(CAMERAS))
    observation, _ = env.reset(seed=0)
    views = [key for key in observation if key.startswith("image")]
    assert views == ["image", *(f"image_{name}" for name in CAMERAS if name != "cam_f0")]
    assert len({observation[key].tobytes() for key in views}) > 4
    with pytest.raises(ValueError, match="cam_f0"):
        make("driving_waypoints-v0", cameras=("cam_l0",))


def test_the_scalar_bicycle_equals_the_batched_one() -> None:
    rng = np.random.default_rng(1)
    car = Car(1.0, 2.0, 0.3, 6.0, 0.5, 0.1, 0.2)
    state = np.zeros((1, 11))
    state[0, [X, Y, HEADING, VX, AX, STEER, YAW_RATE]] = car
    for _ in range(40):
        accel, rate = rng.uniform(-3, 3), rng.uniform(-2, 2)
        car = step_bicycle(car, accel, rate, 0.1)
        state = bicycle_step(state, np.array([accel]), np.array([rate]))
    columns = state[0, [X, Y, HEADING, VX, AX, STEER, YAW_RATE]]
    np.testing.assert_allclose(columns, car, rtol=0, atol=1e-9)


@pytest.mark.parametrize("env_id", ["driving-v0", "driving_waypoints-v0", "driving_control-v0"])
def test_actions_that_are_not_finite_are_refused(env_id: str) -> None:
    env = make(env_id)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="finite"):
        env.step(np.full(env.action_space.shape, np.nan, np.float32))
    with pytest.raises(ValueError, match="finite"):
        env.step(np.zeros((5, 2), np.float32))


def test_the_birds_eye_view_is_an_image() -> None:
    for env_id in ("driving-v0", "driving_waypoints-v0"):
        env = make(env_id, render_mode="rgb_array")
        env.reset(seed=1)
        env.step(np.zeros(env.action_space.shape, np.float32))
        assert env.render().shape == (256, 256, 3)


@pytest.mark.parametrize("env_id", ["driving-v0", "driving_waypoints-v0"])
def test_the_state_ends_with_the_nearest_points_of_the_route_if_asked(env_id: str) -> None:
    plain, _ = make(env_id).reset(options={"init_state_id": 3})
    env = make(env_id, route_points=4)
    seen, _ = env.reset(options={"init_state_id": 3})
    assert plain["state"].shape == (10,)
    assert seen in env.observation_space
    np.testing.assert_array_equal(
        seen["state"], np.concatenate([plain["state"], plain["route"][:4].ravel()])
    )
    with pytest.raises(ValueError, match="route_points is 11, expected 0 to 10"):
        make(env_id, route_points=11)


def test_the_options_name_the_scene_or_it_is_drawn() -> None:
    assert choose_scene({"init_state_id": NUM_SCENES - 1}, np.random.default_rng(0)) == (
        NUM_SCENES - 1
    )
    first, second = (choose_scene(None, np.random.default_rng(seed)) for seed in (0, 1))
    assert first != second
    assert first == choose_scene({}, np.random.default_rng(0))
    assert choose_scene({"init_state_id": 3.0}, np.random.default_rng(0)) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"init_state_id": NUM_SCENES}, f"init_state_id is {NUM_SCENES}, expected 0 to"),
        ({"init_state_id": -1}, "init_state_id is -1"),
        ({"init_state_id": "1"}, "init_state_id is '1', expected 0 to"),
        ({"init_state_id": 3.5}, "init_state_id is 3.5, expected 0 to"),
        ({"init_state_id": True}, "init_state_id is True, expected 0 to"),
        ({"scene": 3}, r"reset options \['scene'\] are unknown, expected only 'init_state_id'"),
    ],
)
def test_another_number_or_option_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        choose_scene(options, np.random.default_rng(0))


def front_image(size: int, scene: int, **options: tuple[float, float]) -> np.ndarray:
    env = OpenLoopDrivingEnv(split="held_out", cameras=(FRONT,), image_size=size, **options)
    return env.reset(options={"init_state_id": scene})[0]["image"]


@pytest.mark.parametrize("scene", [0, 3])  # with a car ahead; a curve with two lanes
def test_a_crop_is_a_part_of_the_whole_image_stretched(scene: int) -> None:
    whole = front_image(560, scene)
    part = cv2.resize(whole[196:420], (56, 56), interpolation=cv2.INTER_AREA)
    cropped = cv2.resize(
        front_image(560, scene, crop=(0.35, 0.75)), (56, 56), interpolation=cv2.INTER_AREA
    )
    difference = np.abs(part.astype(int) - cropped).max(axis=2)
    assert difference.mean() < 2.0
    assert (difference > 40).mean() < 0.01  # edges


def test_the_horizon_moves_with_the_crop() -> None:
    cropped = front_image(100, 0, crop=(0.3, 0.8))
    sky = cropped[0, 0]
    is_sky = (cropped[:, -1] == sky).all(axis=1)
    assert is_sky.argmin() == 41  # (0.5 - 0.3) / (0.8 - 0.3) of the height


@pytest.mark.parametrize("crop", [(0.6, 0.9), (0.1, 0.5), (-0.1, 1.0), (0.0, 1.1)])
def test_a_crop_without_the_horizon_is_refused(crop: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"crop is .*: the horizon is in the middle"):
        OpenLoopDrivingEnv(crop=crop)
