"""NavSim's table over recorded scenes, of one stage or two.

    graded = [grade(recorded, waypoints, "epdms_v2") for ...]
    print(table_of(graded, "epdms_v2", read_two_stages(folder)).text)

Formulas: navsim 0a380a9, navsim/planning/script/run_pdm_score_one_stage.py, run_pdm_score.py and
.../scoring/scene_aggregator.py. The others follow what was recorded, as navsim's non-reactive
traffic does; its reactive traffic needs its own simulation and is not reproduced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from vla_rl.envs.driving.scores.comfort import extended_comfort
from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.pdm import PdmScores, Version, score_waypoints, total_of
from vla_rl.envs.driving.scores.recorded import RecordedScene, TwoStages
from vla_rl.envs.driving.scores.stages import (
    benchmark_score,
    human_sub_scores,
    second_stage_weights,
    with_human_filter,
)

MOST_APART_S: Final = 0.55
"""Frames of a log that are further apart than this are no neighbours."""


@dataclass(frozen=True)
class GradedScene:
    """One scene's trajectory with its scores.

    Args:
        recorded: the scene.
        scores: scores of the one trajectory.
        end: [2], where the predicted trajectory ends, in the map's frame.
    """

    recorded: RecordedScene
    scores: PdmScores
    end: Floats

    @property
    def start(self) -> Floats:
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
    if human_filter and version == "epdms_v2" and not recorded.is_synthetic:
        scores = with_human_filter(scores, human_sub_scores(scene, version))
    cos, sin = np.cos(scene.start[2]), np.sin(scene.start[2])
    x, y = waypoints[-1, :2]
    end = scene.start[:2] + np.array([cos * x - sin * y, sin * x + cos * y])
    return GradedScene(recorded, scores, end)


def table_of(
    graded: Sequence[GradedScene], version: Version, two_stages: Sequence[TwoStages] = ()
) -> NavsimTable:
    """Return the benchmark's table; of two stages if the frames of both are named.

    Raises: ValueError if there are no scenes, or if a frame of a stage was not graded.
    """
    if not graded:
        raise ValueError("no scene was graded, expected at least one.")
    by_token = {each.recorded.token: each for each in graded}
    if version == "pdms_v1" or not two_stages:
        rows = _one_stage(graded, version)
        stage = _mean(rows)
        return NavsimTable(version, len(graded), (stage,), stage["score"])
    firsts: list[dict[str, float]] = []
    seconds: list[dict[str, float]] = []
    products: list[tuple[float, float]] = []
    for group in two_stages:
        first, second = _group(group, by_token)
        firsts += first
        seconds += second
        both = zip(first, second, strict=True)
        now, before = (one["score"] * two["score"] for one, two in both)
        products.append((now, before))
    return NavsimTable(
        version, len(graded), (_mean(firsts), _mean(seconds)), benchmark_score(products) / 100
    )


def _one_stage(graded: Sequence[GradedScene], version: Version) -> list[dict[str, float]]:
    """Return each scene's row; extended comfort counts if the log has a frame just before."""
    ordered = sorted(graded, key=lambda each: (each.recorded.log_name, each.recorded.time_s))
    before: dict[str, GradedScene] = {}
    if version == "epdms_v2":
        recorded = [each for each in ordered if not each.recorded.is_synthetic]
        for one, other in pairwise(recorded):
            if one.recorded.log_name == other.recorded.log_name and _apart(other, one) <= (
                MOST_APART_S
            ):
                before[other.recorded.token] = one
    return [
        _row(each, _comfort(each, before[each.recorded.token]))
        if each.recorded.token in before
        else _row(each)
        for each in ordered
    ]


def _group(
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
    comfort = _comfort(now, before)
    first = [_row(now, comfort), _row(before, comfort)]
    pairs = [(by_token[one], by_token[other]) for one, other in group.second]
    second = []
    for number, frame in enumerate((now, before)):
        weights = second_stage_weights(frame.end, np.array([pair[number].start for pair in pairs]))
        rows = [_row(pair[number], _comfort(*pair)) for pair in pairs]
        second.append(
            {
                name: float(sum(w * row[name] for w, row in zip(weights, rows, strict=True)))
                for name in rows[0]
            }
        )
    return first, second


def _row(graded: GradedScene, comfort: Floats | None = None) -> dict[str, float]:
    sub, version = dict(graded.scores.sub), graded.scores.version
    if comfort is not None:
        sub["extended_comfort"] = comfort
    row = {name: float(values[0]) for name, values in sub.items()}
    return {**row, "score": float(total_of(sub, version)[0])}


def _comfort(now: GradedScene, before: GradedScene) -> Floats:
    return extended_comfort(now.scores.states, before.scores.states, _apart(now, before))


def _apart(now: GradedScene, before: GradedScene) -> float:
    return now.recorded.time_s - before.recorded.time_s


def _mean(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each part over the rows that have it, the score last."""
    names = dict.fromkeys(name for row in rows for name in row if name != "score")
    return {
        name: float(np.mean([row[name] for row in rows if name in row]))
        for name in (*names, "score")
    }
