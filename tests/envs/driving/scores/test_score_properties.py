"""What every driving score keeps, whatever the scene, and that it equals what the benchmarks' own code gave."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.envs.driving.scores.drawn import draw_ride, draw_scene, moved
from vla_rl.envs.driving.scores import (
    Map,
    PdmScores,
    RedLights,
    Scene,
    Tracks,
    Version,
    benchmark_score,
    extended_comfort,
    human_sub_scores,
    score_poses,
    score_waypoints,
    second_stage_weights,
    two_stage_score,
    with_extended_comfort,
    with_human_filter,
)
from vla_rl.envs.driving.scores.comfort import comfort_as_published, savitzky_golay
from vla_rl.envs.driving.scores.geometry import Polygons
from vla_rl.envs.driving.scores.motion import bicycle_step, interpolate_waypoints, simulate

VERSIONS: tuple[Version, ...] = ("pdms_v1", "epdms_v2")


def columns(scores: PdmScores) -> np.ndarray:
    return np.stack([*scores.sub.values(), scores.total], -1)


def turned(scene: Scene, angle: float, shift: np.ndarray) -> Scene:
    """The same scene elsewhere."""
    history, start = np.array(scene.history), scene.start.copy()
    start[:3] = moved(start[:3], angle, shift)
    history[:, :3] = moved(history[:, :3], angle, shift)
    area, lights = scene.map, scene.red_lights
    assert scene.reference is not None
    return replace(
        scene,
        start=start,
        history=history,
        map=Map(tuple(moved(r, angle, shift) for r in area.rings), area.layers, area.on_route),
        red_lights=RedLights(tuple(moved(r, angle, shift) for r in lights.rings), lights.is_red),
        centre_line=moved(scene.centre_line, angle, shift),
        tracks=replace(scene.tracks, poses=moved(scene.tracks.poses, angle, shift)),
        reference=moved(scene.reference, angle, shift),
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_scores_lie_between_0_and_1_and_a_moved_scene_keeps_them(version: Version) -> None:
    for seed in range(12):
        scene, waypoints = draw_scene(seed)
        one = columns(score_waypoints(scene, waypoints, version))
        assert (one >= 0).all()
        assert (one <= 1).all()
        turned_scene = turned(scene, 0.7 + seed, np.array([31.0, -12.0]))
        other = columns(score_waypoints(turned_scene, waypoints, version))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_trajectory_scores_alone_as_it_scores_in_a_batch(version: Version) -> None:
    for seed in range(6):
        scene, waypoints = draw_scene(seed)
        batch = columns(score_waypoints(scene, waypoints, version))
        alone = [columns(score_waypoints(scene, one[None], version))[0] for one in waypoints]
        np.testing.assert_allclose(batch, alone, rtol=0, atol=1e-9)


def test_traffic_of_its_own_for_each_proposal_equals_shared_traffic() -> None:
    scene, waypoints = draw_scene(5)
    poses = np.repeat(scene.tracks.poses[None], len(waypoints), 0)
    own = replace(scene, tracks=replace(scene.tracks, poses=poses))
    shared, separate = (score_waypoints(each, waypoints, "epdms_v2") for each in (scene, own))
    np.testing.assert_allclose(columns(shared), columns(separate), rtol=0, atol=1e-9)


def test_more_objects_never_raise_a_collision_score() -> None:
    names = ("no_at_fault_collisions", "time_to_collision_within_bound")
    for seed in range(10):
        scene, waypoints = draw_scene(seed)
        empty = score_waypoints(replace(scene, tracks=Tracks.none()), waypoints, "epdms_v2")
        full = score_waypoints(scene, waypoints, "epdms_v2")
        assert all((full.sub[name] <= empty.sub[name]).all() for name in names)


def straight_road(speed: float, tracks: Tracks | None = None) -> Scene:
    ring = np.array([(-50, -6), (200, -6), (200, 6), (-50, 6)], float)
    start = np.zeros(11)
    start[3] = speed
    line = np.stack([np.arange(-50.0, 201.0), np.zeros(251)], -1)
    reference = np.zeros((41, 3))
    reference[:, 0] = np.arange(41) * 0.1 * speed
    return Scene(
        start=start,
        map=Map((ring, ring), ("roadblock", "lane"), (False, True)),
        centre_line=line,
        tracks=tracks or Tracks.none(),
        reference=reference,
    )


def steady(speed: float) -> np.ndarray:
    waypoints = np.zeros((1, 8, 3))
    waypoints[0, :, 0] = np.arange(1, 9) * 0.5 * speed
    return waypoints


def one_object(x: float, y: float, speed: float = 0.0, is_agent: bool = True) -> Tracks:
    poses = np.zeros((1, 51, 3))
    poses[0, :, 0], poses[0, :, 1] = x + speed * np.arange(51) * 0.1, y
    return Tracks(poses, np.array([[4.0, 1.8]]), np.array([speed]), np.array([is_agent]))


@pytest.mark.parametrize("version", VERSIONS)
def test_driving_straight_at_the_reference_speed_scores_1(version: Version) -> None:
    scores = score_waypoints(straight_road(8.0), steady(8.0), version)
    assert scores.total == pytest.approx(1.0, abs=1e-12)
    assert scores.states[0, -1, 0] == pytest.approx(32.0, abs=1e-9)


def test_half_the_speed_makes_more_than_half_of_the_progress() -> None:
    scores = score_waypoints(straight_road(8.0), steady(4.0), "epdms_v2")
    assert 0.5 < scores.sub["ego_progress"][0] < 0.7


def test_a_cone_costs_half_and_a_car_everything() -> None:
    for is_agent, expected in ((False, 0.5), (True, 0.0)):
        scene = straight_road(8.0, one_object(25.0, 0.0, is_agent=is_agent))
        sub = score_waypoints(scene, steady(8.0), "epdms_v2").sub
        assert sub["no_at_fault_collisions"][0] == expected


def test_a_car_that_runs_into_the_rear_costs_nothing() -> None:
    scene = straight_road(5.0, one_object(-20.0, 0.0, speed=11.0))
    assert score_waypoints(scene, steady(5.0), "epdms_v2").sub["no_at_fault_collisions"][0] == 1.0


def test_a_violation_takes_the_progress_in_v1_only() -> None:
    scene = straight_road(8.0, one_object(25.0, 0.0))
    v1, v2 = (score_waypoints(scene, steady(8.0), version) for version in VERSIONS)
    assert (v1.sub["ego_progress"][0], v1.total[0]) == (0.0, 0.0)
    assert v2.total[0] == 0.0


def test_time_to_collision_looks_nine_tenths_of_a_second_ahead() -> None:
    # the front is 4.049 m before the rear axle: at 43.249 m after 4.0 + 0.9 s at 8 m/s. v2 stops
    # where its last look ahead ends at 4 s, so at 36.049 m
    for version, front in (("pdms_v1", 43.249), ("epdms_v2", 36.049)):
        for gap, expected in ((-0.05, 0.0), (0.05, 1.0)):
            scene = straight_road(8.0, one_object(front + gap + 2.0, 0.0))
            sub = score_waypoints(scene, steady(8.0), version).sub  # type: ignore[arg-type]
            assert sub["time_to_collision_within_bound"][0] == expected


@pytest.mark.parametrize(("metres", "expected"), [(1.9, 1.0), (2.1, 0.5), (5.9, 0.5), (6.1, 0.0)])
def test_driving_direction_turns_at_2_and_6_metres_within_a_second(
    metres: float, expected: float
) -> None:
    # a window of 11 samples covers 11 steps, so 1.1 s of driving
    speed = metres / 1.1
    scene = straight_road(speed)
    against = replace(scene, map=replace(scene.map, on_route=(False, False)))
    sub = score_waypoints(against, steady(speed), "epdms_v2").sub
    assert sub["driving_direction_compliance"][0] == expected


def test_lane_keeping_fails_after_20_samples_off_the_line() -> None:
    scene = straight_road(8.0)
    shifted = replace(scene, centre_line=scene.centre_line + np.array([0.0, 0.6]))
    assert score_waypoints(shifted, steady(8.0), "epdms_v2").sub["lane_keeping"][0] == 0.0
    close = replace(scene, centre_line=scene.centre_line + np.array([0.0, 0.4]))
    assert score_waypoints(close, steady(8.0), "epdms_v2").sub["lane_keeping"][0] == 1.0


def test_extended_comfort_adds_to_the_weights() -> None:
    scene = straight_road(8.0)
    now = score_waypoints(scene, steady(8.0), "epdms_v2")
    calm = with_extended_comfort(now, now, 0.5)
    assert calm.total[0] == pytest.approx(1.0)
    jerky = score_waypoints(scene, steady(2.0), "epdms_v2")
    assert with_extended_comfort(now, jerky, 0.5).total[0] == pytest.approx(14 / 16)
    with pytest.raises(ValueError, match=r"0\.55"):
        with_extended_comfort(now, now, 0.6)


def test_the_human_filter_forgives_what_the_human_failed() -> None:
    scene = straight_road(8.0, one_object(25.0, 0.0))
    scores = score_waypoints(scene, steady(8.0), "epdms_v2")
    filtered = with_human_filter(
        scores, {"no_at_fault_collisions": 0.0, "time_to_collision_within_bound": 0.0}
    )
    assert scores.total[0] == 0.0
    assert filtered.total[0] == pytest.approx(1.0)


def test_second_stage_scenes_count_by_their_distance_and_uniformly_if_far() -> None:
    weights = second_stage_weights(np.zeros(2), np.array([[0.0, 0.0], [0.4, 0.0]]))
    close, distant = 1.0, np.exp(-0.16 / 0.2)
    np.testing.assert_allclose(weights, [close / (close + distant), distant / (close + distant)])
    assert second_stage_weights(np.zeros(2), np.full((4, 2), 50.0)).tolist() == [0.25] * 4
    assert two_stage_score(0.5, np.array([1.0, 0.5]), np.array([0.5, 0.5])) == 0.375
    assert benchmark_score([(0.5, 0.7), (1.0, 1.0)]) == pytest.approx(80.0)


def test_the_smoothing_matrix_equals_scipys_filter() -> None:
    from scipy.signal import savgol_filter  # here: every worker collects this file

    series = np.random.default_rng(0).normal(size=41)
    for window, order, derivative in ((8, 2, 0), (15, 2, 1), (5, 3, 2), (41, 2, 0)):
        expected = savgol_filter(series, window, order, deriv=derivative, delta=0.1)
        ours = savitzky_golay(41, window, order, derivative, 0.1) @ series
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-10)


def test_steering_stops_at_60_degrees() -> None:
    state = np.zeros((1, 11))
    for _ in range(40):
        state = bicycle_step(state, np.zeros(1), np.full(1, 5.0))
    assert state[0, 7] == pytest.approx(np.pi / 3, abs=1e-12)


def test_a_feasible_line_is_tracked_exactly() -> None:
    start = np.zeros(11)
    start[2:4] = 0.4, 8.0
    states = simulate(interpolate_waypoints(steady(8.0), start[:3]), start)
    expected = 32.0 * np.array([np.cos(0.4), np.sin(0.4)])
    np.testing.assert_allclose(states[0, -1, :2], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (np.full((1, 8, 3), np.nan), "not finite"),
        (np.zeros((1, 6, 3)), "every 0.5 s up to 4 s"),
        (np.zeros((8, 3)), r"expected \[B, 8, 3\]"),
    ],
)
def test_waypoints_that_cannot_be_graded_are_refused(broken: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        score_waypoints(straight_road(8.0), broken, "epdms_v2")


def test_waypoints_that_jump_backwards_lose_progress_and_comfort() -> None:
    back = steady(8.0)
    back[0, -1, 0] = 2.0
    whole, hacked = (
        score_waypoints(straight_road(8.0), w, "epdms_v2") for w in (steady(8.0), back)
    )
    assert hacked.sub["ego_progress"][0] < whole.sub["ego_progress"][0]


def test_broken_scenes_are_refused_with_what_was_expected() -> None:
    bow_tie = np.array([(0, 0), (2, 2), (2, 0), (0, 2)], float)
    with pytest.raises(ValueError, match="crosses itself"):
        Map((bow_tie,), ("lane",), (True,))
    scene = straight_road(8.0)
    with pytest.raises(ValueError, match="without a route"):
        replace(scene, centre_line=scene.centre_line[:1])
    gap = one_object(10.0, 0.0)
    gap.poses[0, 20] = np.nan
    with pytest.raises(ValueError, match="mark samples without the object"):
        replace(gap, poses=gap.poses)
    seen = np.ones((1, 51), bool)
    seen[0, 20] = False
    assert replace(gap, seen=seen).seen is not None


def test_a_point_on_the_border_is_outside() -> None:
    square = Polygons([np.array([(0, 0), (2, 0), (2, 2), (0, 2)], float)])
    points = np.array([(1, 1), (0, 1), (2, 1), (1, 0), (1, 2), (0, 0), (3, 1)], float)
    assert square.contain(points)[0].tolist() == [True, *[False] * 6]


def test_the_scores_import_no_heavy_package() -> None:
    code = (
        "import sys, vla_rl.envs.driving.scores, vla_rl.envs.driving.scores.bench2drive\n"
        "heavy = {'torch', 'scipy', 'shapely', 'cv2', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def lane(corners_a_side: int, turn: float, centre: np.ndarray) -> np.ndarray:
    """Return a rectangle of 60 m x 3.5 m with several corners on each long side, turned."""
    along = np.linspace(-30.0, 30.0, corners_a_side)
    ring = np.concatenate(
        [
            np.stack([along, np.full(corners_a_side, -1.75)], 1),
            np.stack([along[::-1], np.full(corners_a_side, 1.75)], 1),
        ]
    )
    turned = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    return np.asarray(ring @ turned.T + centre)


def test_a_long_straight_lane_is_a_polygon_at_any_turn() -> None:
    assert len(Polygons([lane(6, 2.322, np.zeros(2))])) == 1


@pytest.mark.parametrize("reach_m", [50.0, 5_000.0, 1e6])
def test_lanes_of_many_corners_are_polygons_wherever_they_are(reach_m: float) -> None:
    rng = np.random.default_rng(0)
    for corners in (6, 12, 30, 60):
        for _ in range(40):
            centre = rng.uniform(-reach_m, reach_m, 2)
            ring = lane(corners, rng.uniform(0.0, 2 * np.pi), centre)
            (inside, outside) = Polygons([ring]).contain(np.stack([centre, centre + 100.0]))[0]
            assert (inside, outside) == (True, False)


@pytest.mark.parametrize("reach_m", [0.0, 50.0, 1e6])
def test_a_ring_that_crosses_itself_is_refused_at_any_turn(reach_m: float) -> None:
    rng = np.random.default_rng(1)
    for corners in (2, 6, 30):
        for _ in range(20):
            ring = lane(corners, rng.uniform(0.0, 2 * np.pi), rng.uniform(-1, 1, 2) * reach_m)
            ring[[0, corners - 1]] = ring[[corners - 1, 0]]  # a bow tie, or one spike across
            with pytest.raises(ValueError, match="polygon 0 crosses itself"):
                Polygons([ring])


@pytest.mark.parametrize("depth_m", [1e-3, 1e-6, 1e-9])
def test_a_crossing_far_smaller_than_a_car_is_still_refused(depth_m: float) -> None:
    # the last corner reaches over the lower side by a little
    ring = np.array([[0.0, 0.0], [10.0, 0.0], [10.0, 5.0], [6.0, -depth_m], [4.0, 5.0], [0.0, 5.0]])
    with pytest.raises(ValueError, match="crosses itself"):
        Polygons([ring])


GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parent / "golden" / "reference_scores.json").read_text()
)
COLUMNS = {
    "epdms_v2": (
        "no_at_fault_collisions",
        "drivable_area_compliance",
        "driving_direction_compliance",
        "traffic_light_compliance",
        "ego_progress",
        "time_to_collision_within_bound",
        "lane_keeping",
        "history_comfort",
    ),
    "pdms_v1": (
        "no_at_fault_collisions",
        "drivable_area_compliance",
        "driving_direction_compliance",
        "ego_progress",
        "time_to_collision_within_bound",
        "comfort",
    ),
}


@pytest.mark.parametrize("version", ["epdms_v2", "pdms_v1"])
def test_every_sub_score_and_the_total_equal_navsims(version: Version) -> None:
    for seed, expected in enumerate(GOLDEN[version]):
        scene, waypoints = draw_scene(seed)
        scores = score_waypoints(scene, waypoints, version)
        columns = [scores.sub[name] for name in COLUMNS[version]]
        ours = np.stack([*columns, scores.total], -1)
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-9, err_msg=f"scene {seed}")


def test_the_golden_scenes_contain_every_violation() -> None:
    rows = np.array(GOLDEN["epdms_v2"]).reshape(-1, 9)
    assert [set(np.unique(rows[:, i])) for i in (0, 1, 2, 3)] == [
        {0.0, 0.5, 1.0},
        {0.0, 1.0},
        {0.0, 0.5, 1.0},
        {0.0, 1.0},
    ]
    assert all(0.2 < rows[:, i].mean() < 0.95 for i in (4, 5, 6, 7))


def test_the_humans_sub_scores_equal_navsims() -> None:
    for seed, expected in enumerate(GOLDEN["human_v2"]):
        ours = human_sub_scores(draw_scene(seed)[0], "epdms_v2")
        given = [ours[name] for name in COLUMNS["epdms_v2"]]
        np.testing.assert_allclose(given, expected, rtol=0, atol=1e-9)


def test_the_driven_motion_equals_navsims_simulation() -> None:
    for seed, expected in enumerate(GOLDEN["final_states"]):
        scene, waypoints = draw_scene(seed)
        states = score_poses(
            scene, interpolate_waypoints(waypoints, scene.start[:3]), "pdms_v1"
        ).states
        np.testing.assert_allclose(states[:, -1], expected, rtol=0, atol=1e-9)


def test_extended_comfort_equals_navsims() -> None:
    for seed, expected in enumerate(GOLDEN["extended_comfort"]):
        scene, waypoints = draw_scene(seed)
        states = simulate(interpolate_waypoints(waypoints, scene.start[:3]), scene.start)
        assert extended_comfort(states[:3], states[1:4], 0.5).tolist() == expected


def test_smoothness_as_published_equals_the_tool_of_bench2drive() -> None:
    ours = [comfort_as_published(draw_ride(seed)) for seed in range(len(GOLDEN["smoothness"]))]
    np.testing.assert_allclose(ours, GOLDEN["smoothness"], rtol=0, atol=1e-9)
