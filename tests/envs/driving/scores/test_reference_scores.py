"""Our scores equal what the benchmarks' own code gave for the same scenes.

`golden/reference_scores.json` holds what navsim and Bench2Drive computed, run once by hand on the
scenes of `drawn_scenes` and the rides of `drawn_rides`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.envs.driving.scores.drawn import draw_ride, draw_scene
from vla_rl.envs.driving.scores import (
    Version,
    extended_comfort,
    human_sub_scores,
    score_poses,
    score_waypoints,
)
from vla_rl.envs.driving.scores.comfort import comfort_as_published
from vla_rl.envs.driving.scores.motion import interpolate_waypoints, simulate

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
