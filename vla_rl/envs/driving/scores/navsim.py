"""NavSim's table over recorded scenes, of one stage or two.

    graded = [grade(read_recorded(file), waypoints, "epdms_v2") for file in list_recorded(folder)]
    print(make_navsim_table(graded, "epdms_v2", read_two_stages(folder)).text)

A recorded scene is a scene file with its token, its position in a log, and what the car's cameras saw:
token, log_name, time_s, is_synthetic, command [4], cameras [C] and pictures [C], the cameras' files
relative to the scene's folder. `export_scenes.py` of `vla-rl export navsim DIR` writes such folders
from a navsim install.

Formulas: navsim 0a380a9, navsim/planning/script/run_pdm_score_one_stage.py, run_pdm_score.py and
.../scoring/scene_aggregator.py. The others follow what was recorded, as navsim's non-reactive traffic
does; its reactive traffic needs its own simulation and is not reproduced.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from vla_rl.envs.driving.scores.comfort import extended_comfort
from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.pdm import (
    PdmScores,
    Version,
    benchmark_score,
    combine_sub_scores,
    human_sub_scores,
    score_waypoints,
    second_stage_weights,
    with_human_filter,
)
from vla_rl.envs.driving.scores.scene import Scene
from vla_rl.envs.driving.scores.scene_files import get_texts, parse_scene, read_arrays
from vla_rl.util.foreign_data import find_files, reading_file

NUM_COMMANDS: Final = 4
"""Left, straight, right, unknown."""

TWO_STAGES_FILE: Final = "two_stages.json"
"""File of a folder with the frames of both stages: a list of [now, before, [[now, before], ...]]."""

_FIELDS: Final = ("token", "log_name", "time_s", "is_synthetic", "command", "cameras", "pictures")


@dataclass(frozen=True)
class RecordedScene:
    """One frame of a log.

    Args:
        token: name of the frame.
        log_name: name of its log.
        time_s: time in the log.
        is_synthetic: True for frames of the second stage, which were rendered.
        command: [4], one-hot vector of left, straight, right, unknown.
        images: file of each camera.
        scene: what trajectories are graded in.

    Example:
        RecordedScene(token="0a1b2c3d4e5f6071", log_name="2021.06.14.16.48.02_veh-12_04057_04438",
            time_s=1623682100.5, is_synthetic=False, command=np.array([0.0, 1.0, 0.0, 0.0]),
            images={"cam_f0": Path("navtest_scenes/pictures/0a1b2c3d4e5f6071_cam_f0.jpg")}, scene=...)
    """

    token: str
    log_name: str
    time_s: float
    is_synthetic: bool
    command: Floats
    images: Mapping[str, Path]
    scene: Scene


class TwoStages(NamedTuple):
    """Frames of one two-stage group.

    Attributes:
        now: token of the first stage's frame.
        before: token of the frame 0.5 s before it.
        second: tokens of the second stage's frames, each with the one before it.

    Example:
        TwoStages(now="0a1b", before="09f2", second=(("s1_now", "s1_before"), ("s2_now", "s2_before")))
    """

    now: str
    before: str
    second: tuple[tuple[str, str], ...]


def list_recorded(folder: Path) -> list[Path]:
    """Return the scene files of a folder, by name. Raises: ValueError if there are none."""
    found = find_files(folder, "*.npz") if folder.is_dir() else []
    if not found:
        raise ValueError(
            f"{folder} has no scene files (*.npz), expected the folder that export_scenes.py wrote."
        )
    return found


def read_recorded(path: Path) -> RecordedScene:
    """Read a recorded scene. Raises: ValueError naming the file."""
    arrays = read_arrays(path)
    missing = [name for name in _FIELDS if name not in arrays]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}: it is a scene, but not a recorded one; write it "
            "with export_scenes.py."
        )
    with reading_file(path, "", "write it with export_scenes.py"):
        command = np.asarray(arrays["command"], np.float64)
        if command.shape != (NUM_COMMANDS,):
            raise ValueError(f"the command has shape {command.shape}, expected (4,), one-hot")
        cameras, files = (get_texts(arrays[name], name) for name in ("cameras", "pictures"))
        (token,), (log_name,) = (get_texts(arrays[name], name) for name in ("token", "log_name"))
        return RecordedScene(
            token=token,
            log_name=log_name,
            time_s=float(arrays["time_s"]),
            is_synthetic=bool(arrays["is_synthetic"]),
            command=command,
            images={
                camera: path.parent / file for camera, file in zip(cameras, files, strict=True)
            },
            scene=parse_scene(arrays, path),
        )


def read_two_stages(folder: Path) -> list[TwoStages]:
    """Return the two-stage groups of a folder; empty if its split has none.

    Raises: ValueError naming the file, if it is damaged.
    """
    path = folder / TWO_STAGES_FILE
    if not path.exists():
        return []
    with reading_file(path, " is damaged", "export the scenes again"):
        return [
            TwoStages(now, before, tuple((first, second) for first, second in pairs))
            for now, before, pairs in json.loads(path.read_text(encoding="utf-8"))
        ]


MOST_APART_S: Final = 0.55
"""Frames of a log that are further apart than this are no neighbours."""


@dataclass(frozen=True)
class GradedScene:
    """One scene's trajectory with its scores.

    Args:
        recorded: the scene.
        scores: scores of the one trajectory.
        end: [2], where the predicted trajectory ends, in the map's frame.

    Example:
        GradedScene(recorded, scores, end=np.array([664512.3, 3998041.7]))
    """

    recorded: RecordedScene
    scores: PdmScores
    end: Floats

    @property
    def start_position(self) -> Floats:
        """Start of the car: [2]."""
        return self.recorded.scene.start[:2]


@dataclass(frozen=True)
class NavsimTable:
    """Mean scores over scenes, 0 to 1.

    Attributes:
        version: version of the score.
        num_scenes: scenes that were graded.
        stages: mean of every sub-score and of `score` in each stage.
        score: the benchmark's number: of one stage, its mean; of two, the combined one.

    Example:
        Of one stage:

        NavsimTable("epdms_v2", num_scenes=12146, stages=({"ego_progress": 0.87, ..., "score": 0.84},),
            score=0.84)
    """

    version: Version
    num_scenes: int
    stages: tuple[Mapping[str, float], ...]
    score: float

    @property
    def text(self) -> str:
        """The table as text, in percent."""
        names = ("one stage",) if len(self.stages) == 1 else ("stage one", "stage two")
        head = f"{self.version}, {self.num_scenes} scenes".ljust(34)
        rows = [head + "".join(f"{name:>11}" for name in names)]
        for part in self.stages[0]:
            cells = "".join(f"{100 * stage[part]:11.2f}" for stage in self.stages)
            rows.append(f"{part:34}{cells}")
        if len(self.stages) == 2:
            rows.append(f"{'score, both stages':34}{100 * self.score:11.2f}")
        return "\n".join(rows)


def grade(
    recorded: RecordedScene, waypoints: Floats, version: Version, human_filter: bool = True
) -> GradedScene:
    """Grade one trajectory [8, 3].

    Args:
        human_filter: forgive what the human failed too, in recorded scenes and version 2, as the
            benchmark does.
    """
    scene = recorded.scene
    scores = score_waypoints(scene, waypoints[None], version)
    # frames of the second stage are rendered, so no human drove in them
    if human_filter and version == "epdms_v2" and not recorded.is_synthetic:
        scores = with_human_filter(scores, human_sub_scores(scene, version))
    cos, sin = np.cos(scene.start[2]), np.sin(scene.start[2])
    # the end of the plan and not of the graded motion, as the reference weights the second stage
    x, y = waypoints[-1, :2]
    end = scene.start[:2] + np.array([cos * x - sin * y, sin * x + cos * y])
    return GradedScene(recorded, scores, end)


def make_navsim_table(
    graded: Sequence[GradedScene], version: Version, two_stages: Sequence[TwoStages] = ()
) -> NavsimTable:
    """Return the benchmark's table; of two stages if the frames of both are named.

    Raises: ValueError if there are no scenes, or if a frame of a stage was not graded.
    """
    if not graded:
        raise ValueError("no scene was graded, expected at least one.")
    by_token = {each.recorded.token: each for each in graded}
    # version 1 knows one stage, also where a split has two
    if version == "pdms_v1" or not two_stages:
        rows = _grade_one_stage(graded, version)
        stage = _average_rows(rows)
        return NavsimTable(version, len(graded), (stage,), stage["score"])
    firsts: list[dict[str, float]] = []
    seconds: list[dict[str, float]] = []
    products: list[tuple[float, float]] = []
    for group in two_stages:
        first, second = _grade_group(group, by_token)
        firsts += first
        seconds += second
        both = zip(first, second, strict=True)
        now, before = (one["score"] * two["score"] for one, two in both)
        products.append((now, before))
    return NavsimTable(
        version,
        len(graded),
        (_average_rows(firsts), _average_rows(seconds)),
        benchmark_score(products) / 100,
    )


def _grade_one_stage(graded: Sequence[GradedScene], version: Version) -> list[dict[str, float]]:
    """Return each scene's row; extended comfort counts if the log has a frame just before."""
    ordered = sorted(graded, key=lambda each: (each.recorded.log_name, each.recorded.time_s))
    before: dict[str, GradedScene] = {}
    if version == "epdms_v2":
        # frames of the second stage have times of a log that they are no part of
        recorded = [each for each in ordered if not each.recorded.is_synthetic]
        for one, other in pairwise(recorded):
            if one.recorded.log_name == other.recorded.log_name and _time_apart(other, one) <= (
                MOST_APART_S
            ):
                before[other.recorded.token] = one
    return [
        _make_row(each, _compare_comfort(each, before[each.recorded.token]))
        if each.recorded.token in before
        else _make_row(each)
        for each in ordered
    ]


def _grade_group(
    group: TwoStages, by_token: Mapping[str, GradedScene]
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the rows of a group's two frames, and of the second stage behind each of them."""
    wanted = [group.now, group.before, *(token for pair in group.second for token in pair)]
    missing = [token for token in wanted if token not in by_token]
    if missing:
        raise ValueError(
            f"{len(missing)} frames of the stages of {group.now} were not graded, such as "
            f"{missing[0]}; export and grade all of them, or remove two_stages.json."
        )
    now, before = by_token[group.now], by_token[group.before]
    # both frames of a pair get the same extended comfort, as in the reference
    comfort = _compare_comfort(now, before)
    first = [_make_row(now, comfort), _make_row(before, comfort)]
    pairs = [(by_token[one], by_token[other]) for one, other in group.second]
    second = []
    for number, frame in enumerate((now, before)):
        weights = second_stage_weights(
            frame.end, np.array([pair[number].start_position for pair in pairs])
        )
        rows = [_make_row(pair[number], _compare_comfort(*pair)) for pair in pairs]
        second.append(
            {
                name: float(sum(w * row[name] for w, row in zip(weights, rows, strict=True)))
                for name in rows[0]
            }
        )
    return first, second


def _make_row(graded: GradedScene, comfort: Floats | None = None) -> dict[str, float]:
    sub, version = dict(graded.scores.sub), graded.scores.version
    if comfort is not None:
        sub["extended_comfort"] = comfort
    row = {name: float(values[0]) for name, values in sub.items()}
    return {**row, "score": float(combine_sub_scores(sub, version)[0])}


def _compare_comfort(now: GradedScene, before: GradedScene) -> Floats:
    return extended_comfort(now.scores.states, before.scores.states, _time_apart(now, before))


def _time_apart(now: GradedScene, before: GradedScene) -> float:
    return now.recorded.time_s - before.recorded.time_s


def _average_rows(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each part over the rows that have it, the score last."""
    # only frames with a neighbour have extended comfort, and its mean is over those
    names = dict.fromkeys(name for row in rows for name in row if name != "score")
    return {
        name: float(np.mean([row[name] for row in rows if name in row]))
        for name in (*names, "score")
    }
