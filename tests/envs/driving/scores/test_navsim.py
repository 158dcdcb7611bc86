"""NavSim's table over recorded scenes, files of scenes, and plans from any planner."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.envs.driving.scores.drawn import draw_scene
from vla_rl.envs.driving.scores import Scene, score_waypoints
from vla_rl.envs.driving.scores.geometry import boxes_overlap, directions
from vla_rl.envs.driving.scores.navsim import (
    GradedScene,
    RecordedScene,
    TwoStages,
    grade,
    make_navsim_table,
    read_two_stages,
)
from vla_rl.envs.driving.scores.pdm import measure_backward, parse_reward, weigh_reward
from vla_rl.envs.driving.scores.scene_files import (
    check_waypoints,
    load_scene,
    read_plans,
    save_scene,
)

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "golden" / "navsim_tables.json").read_text()
)
FIRST_STAGE = (0, 1, 6, 7)
GROUPS = [
    TwoStages("0", "1", (("2", "3"), ("4", "5"))),
    TwoStages("6", "7", (("8", "9"), ("10", "11"))),
]


def without_overlaps(scene: Scene) -> Scene:
    """The scene without tracks that overlap the car at 0 s, as navsim's log replay has it."""
    tracks, car = scene.tracks, scene.vehicle
    count, way = len(tracks.sizes), directions(scene.start[2])
    centre = scene.start[:2] + car.rear_axle_to_centre * way
    meets = boxes_overlap(
        np.repeat(centre[None], count, 0),
        np.repeat(way[None], count, 0),
        np.array([car.half_length, car.half_width]),
        tracks.poses[:, 0, :2],
        directions(tracks.poses[:, 0, 2]),
        tracks.sizes / 2,
    )
    kept = ~(meets & tracks.seen_or_all[:, 0])
    return replace(
        scene,
        tracks=replace(
            tracks,
            **{
                name: getattr(tracks, name)[kept]
                for name in ("poses", "sizes", "speeds", "is_agent", "seen")
            },
        ),
    )


def graded(plan: int, numbers: tuple[int, ...] = tuple(range(12))) -> list[GradedScene]:
    """Each drawn scene with its plan of that number: 0.5 s apart in pairs, 10 s between pairs."""
    found = []
    for number in numbers:
        scene, plans = draw_scene(number)
        recorded = RecordedScene(
            token=str(number),
            log_name="log",
            time_s=10.0 * (number // 2) + (0.5 if number % 2 == 0 else 0.0),
            is_synthetic=number not in FIRST_STAGE,
            command=np.array([0.0, 1.0, 0.0, 0.0]),
            images={},
            scene=without_overlaps(scene),
        )
        found.append(grade(recorded, plans[plan], "epdms_v2"))
    return found


@pytest.mark.parametrize(
    "plan", [0, 1, *(pytest.param(plan, marks=pytest.mark.proof) for plan in range(2, 6))]
)
def test_the_tables_of_one_and_two_stages_equal_navsims(plan: int) -> None:
    expected = GOLDEN[plan]
    both = make_navsim_table(graded(plan), "epdms_v2", GROUPS)
    assert both.score == pytest.approx(expected["score"], abs=1e-9)
    assert both.stages[0] == pytest.approx(expected["stage_one"], abs=1e-9)
    assert both.stages[1] == pytest.approx(expected["stage_two"], abs=1e-9)
    one = make_navsim_table(graded(plan, FIRST_STAGE), "epdms_v2")
    assert one.stages[0] == pytest.approx(expected["one_stage"], abs=1e-9)


def test_version_one_is_the_plain_mean_and_has_no_filter() -> None:
    table = make_navsim_table(
        [grade(each.recorded, draw_scene(0)[1][0], "pdms_v1") for each in graded(0)],
        "pdms_v1",
        GROUPS,
    )
    assert len(table.stages) == 1
    assert "comfort" in table.stages[0]
    assert "pdms_v1, 12 scenes" in table.text


def test_a_group_whose_frames_were_not_graded_is_named() -> None:
    with pytest.raises(ValueError, match="6 frames of the stages of 6 were not graded, such as 6"):
        make_navsim_table(graded(0, (6, 0, 1, 2, 3, 4, 5))[1:], "epdms_v2", GROUPS)
    with pytest.raises(ValueError, match="no scene was graded"):
        make_navsim_table([], "epdms_v2")


def test_the_stages_of_a_folder_are_read_or_named_as_damaged(tmp_path: Path) -> None:
    assert read_two_stages(tmp_path) == []
    path = tmp_path / "two_stages.json"
    path.write_text(json.dumps([["0", "1", [["2", "3"], ["4", "5"]]]]))
    assert read_two_stages(tmp_path) == [GROUPS[0]]
    path.write_text(json.dumps([["0", "1"]]))
    with pytest.raises(ValueError, match=r"two_stages\.json is damaged"):
        read_two_stages(tmp_path)


def ahead(count: int = 1) -> np.ndarray:
    """Waypoints of a car that drives straight on at 10 m/s."""
    waypoints = np.zeros((count, 8, 3))
    waypoints[..., 0] = 5.0 * np.arange(1, 9)
    return waypoints


def test_plans_are_read_by_the_scenes_tokens(tmp_path: Path) -> None:
    path = tmp_path / "plans.npz"
    np.savez(path, tokens=np.array(["a", "b"]), waypoints=ahead(2), interval_s=0.5)
    plans = read_plans(path)
    assert list(plans) == ["a", "b"]
    np.testing.assert_array_equal(plans["b"], ahead()[0])


def test_a_file_that_holds_no_plans_is_named(tmp_path: Path) -> None:
    path = tmp_path / "plans.npz"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"plans\.npz is no file of plans"):
        read_plans(path)
    np.savez(path, tokens=np.array(["a", "a"]), waypoints=ahead(2), interval_s=0.5)
    with pytest.raises(ValueError, match="2 tokens, 1 of them different"):
        read_plans(path)
    np.savez(path, tokens=np.array([b"a"]), waypoints=ahead(), interval_s=0.5)
    with pytest.raises(ValueError, match=r"tokens holds \|S1, expected text"):
        read_plans(path)
    np.savez(path, tokens=np.array(["a"]), waypoints=ahead(), interval_s=0.1)
    with pytest.raises(ValueError, match=r"plans\.npz: waypoints are 0\.1 s apart"):
        read_plans(path)


def test_plans_of_another_rate_not_finite_or_jumping_back_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 40, 3\), expected \[B, 8, 3\]"):
        check_waypoints(np.zeros((1, 40, 3)))
    broken = ahead(3)
    broken[1, 2, 0] = np.nan
    with pytest.raises(ValueError, match=r"trajectories \[1\] are not finite"):
        check_waypoints(broken)
    jumping = ahead(3)
    jumping[2, 7, 0] = 30.0  # 5 m behind waypoint 7
    with pytest.raises(ValueError, match=r"waypoint 8 of trajectory 2 lies 5\.0 m behind"):
        check_waypoints(jumping)


def test_backward_metres_are_measured_along_each_waypoints_heading() -> None:
    waypoints = ahead()
    waypoints[0, :, 2] = np.pi / 2  # crab-wise: after the first, the car moves to its right
    assert measure_backward(waypoints).max() < 1e-12
    waypoints[0, 7, 1] = -3.0
    np.testing.assert_allclose(measure_backward(waypoints)[0, 7], 3.0)


def test_a_reward_weighs_the_sub_scores_that_it_names() -> None:
    score = {"total": 0.5, "ego_progress": 0.8, "lane_keeping": 1.0}
    for text, expected in (
        ("total", 0.5),
        ("ego_progress", 0.8),
        ("ego_progress=0.5, lane_keeping=-1", -0.6),
    ):
        assert weigh_reward(parse_reward(text, "epdms_v2"), score) == pytest.approx(expected)
    with pytest.raises(ValueError, match="names 'speed', expected one of total"):
        parse_reward("speed=1", "epdms_v2")
    with pytest.raises(ValueError, match="weight of total is 'much', expected a number"):
        parse_reward("total=much", "epdms_v2")
    with pytest.raises(ValueError, match="names 'total' twice"):
        parse_reward("total,total=2", "epdms_v2")


def test_a_scene_scores_from_its_file_as_it_scored_before(tmp_path: Path) -> None:
    for seed in range(4):
        scene, waypoints = draw_scene(seed)
        save_scene(tmp_path / "scene.npz", scene)
        read = load_scene(tmp_path / "scene.npz")
        for version in ("pdms_v1", "epdms_v2"):
            before = score_waypoints(scene, waypoints, version)
            after = score_waypoints(read, waypoints, version)
            np.testing.assert_array_equal(before.total, after.total)
            assert before.sub.keys() == after.sub.keys()


def test_files_that_are_no_scenes_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "scene.npz"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"scene\.npz is no scene file"):
        load_scene(path)
    np.savez(path, format=np.array(7))
    with pytest.raises(ValueError, match="format 7, expected 1"):
        load_scene(path)
    np.savez(path, format=np.array(1))
    with pytest.raises(ValueError, match="lacks start"):
        load_scene(path)
    np.savez(path, format=np.array(1), start=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="no scene file"):
        load_scene(path)


def test_a_scene_without_a_route_is_refused_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "scene.npz"
    save_scene(path, draw_scene(0)[0])
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "centre_line": arrays["centre_line"][:1]})
    with pytest.raises(ValueError, match=r"scene\.npz: .*without a route"):
        load_scene(path)
