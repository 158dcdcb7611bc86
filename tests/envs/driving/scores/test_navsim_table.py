"""NavSim's table equals what navsim's own scripts gave for the same scenes.

`golden/navsim_tables.json` holds what navsim 0a380a9 computed, run once by hand on metric caches
made of `drawn_scenes`: `pdm_score` with the log replay of the others and the human filter, and the
tables of run_pdm_score.py and run_pdm_score_one_stage.py, for each of six plans a scene.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.envs.driving.scores.drawn_scenes import draw_scene
from vla_rl.envs.driving.scores import Scene
from vla_rl.envs.driving.scores.geometry import boxes_overlap, directions
from vla_rl.envs.driving.scores.navsim import (
    GradedScene,
    RecordedScene,
    TwoStages,
    grade,
    make_navsim_table,
    read_two_stages,
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
