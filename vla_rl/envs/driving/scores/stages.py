"""EPDMS beyond one frame: extended comfort, the human filter, and two stages.

Formulas: navsim 0a380a9, navsim/evaluate/pdm_score.py:171-219 and
.../scoring/scene_aggregator.py.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from vla_rl.envs.driving.scores.comfort import extended_comfort
from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.pdm import PdmScores, Version, score_waypoints, total_of
from vla_rl.envs.driving.scores.scene import Scene

SIGMA_SQUARED: Final = 0.1
"""Width of the kernel that weights second-stage scenes, in square metres."""


def with_extended_comfort(now: PdmScores, before: PdmScores, apart_s: float) -> PdmScores:
    """Add extended comfort to `now`, from the plans of a frame up to 0.55 s before it.

    The total is then divided by 16 instead of 14.
    """
    comfort = extended_comfort(now.states, before.states, apart_s)
    sub = {**now.sub, "extended_comfort": comfort}
    return now._replace(sub=sub, total=total_of(sub, now.version))


def human_sub_scores(scene: Scene, version: Version) -> dict[str, float]:
    """Grade the human's own drive, by its own progress and without its past.

    Raises: ValueError if the scene has no human trajectory.
    """
    if scene.human is None:
        raise ValueError(
            "the scene has no human trajectory, which the human filter needs; export it, or grade "
            "without the filter."
        )
    # the benchmark grades the human alone, so neither the reference nor the history is used
    alone = replace(scene, history=None, reference=None)
    return score_waypoints(alone, scene.human[None], version).sub_of(0)


def with_human_filter(scores: PdmScores, human: dict[str, float]) -> PdmScores:
    """Forgive what the human failed too: sub-scores become 1 where the human's are 0.

    Extended comfort is not filtered, as in the reference. For recorded frames only; scores
    published before 2025-09-29 used another filter.
    """
    sub = {
        name: np.ones_like(values) if human.get(name) == 0.0 else values
        for name, values in scores.sub.items()
    }
    return scores._replace(sub=sub, total=total_of(sub, scores.version))


def second_stage_weights(end: Floats, starts: Floats) -> Floats:
    """Weight second-stage scenes by how near they start to the first stage's end: [S].

    exp(-d^2 / (2 * 0.1)), normalised; uniform if all are far away.

    Args:
        end: [2], where the first stage's predicted trajectory ended (not the graded motion).
        starts: [S, 2], where the scenes of the second stage start.
    """
    weights = np.exp(-((starts - end) ** 2).sum(-1) / (2 * SIGMA_SQUARED))
    total = weights.sum()
    if np.isnan(total) or np.isclose(total, 0.0):
        return np.full(len(starts), 1.0 / len(starts))
    return np.asarray(weights / total)


def two_stage_score(first: float, second: Floats, weights: Floats) -> float:
    """Return the first stage's score times the weighted mean of the second stage's."""
    return float(first * (weights * second).sum())


def benchmark_score(groups: list[tuple[float, float]]) -> float:
    """Return the mean over scenes of the mean of both frames' two-stage scores, in percent.

    Args:
        groups: the scores of the frames at t and t - 0.5 s of each scene.
    """
    if not groups:
        raise ValueError("there are no scenes, expected at least one.")
    return 100.0 * float(np.mean(groups))
