"""NavSim's PDM score, version 1 (PDMS) and version 2 (EPDMS), of whole batches of trajectories.

    scores = score_waypoints(scene, waypoints, "epdms_v2")     # waypoints: [B, 8, 3]
    scores.total, scores.sub["ego_progress"]

Formulas: navsim main 0a380a9 (v2) and branch v1.1 (v1), .../scoring/pdm_scorer.py. A proposal
never changes another one's scores: progress is measured by the scene's reference and the proposal
itself, as the benchmark does for the one trajectory that it grades.

EPDMS beyond one frame (extended comfort, the human filter, two stages): navsim/evaluate/pdm_score.py:171-219
and .../scoring/scene_aggregator.py.

A reward is `total`, one sub-score, or a weighted sum of several:

    weights = parse_reward("ego_progress=0.5,lane_keeping=0.5", "epdms_v2")
    reward = weigh_reward(weights, {"total": 0.8, "ego_progress": 0.9, ...})
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from vla_rl.envs.driving.scores import sub_scores
from vla_rl.envs.driving.scores.comfort import extended_comfort, is_comfortable
from vla_rl.envs.driving.scores.geometry import Floats, box_corners, directions
from vla_rl.envs.driving.scores.motion import interpolate_waypoints, simulate
from vla_rl.envs.driving.scores.scene import HEADING, NUM_STEPS, YAW_RATE, Scene, Tracks
from vla_rl.envs.driving.scores.sub_scores import no_at_fault_collision, time_to_collision

Version = Literal["pdms_v1", "epdms_v2"]

NUM_WAYPOINTS: Final = 8

MULTIPLIERS: Final[dict[str, tuple[str, ...]]] = {
    "pdms_v1": ("no_at_fault_collisions", "drivable_area_compliance"),
    "epdms_v2": (
        "no_at_fault_collisions",
        "drivable_area_compliance",
        "driving_direction_compliance",
        "traffic_light_compliance",
    ),
}
"""Sub-scores that the rest is multiplied by."""

WEIGHTS: Final[dict[str, dict[str, float]]] = {
    "pdms_v1": {"ego_progress": 5.0, "time_to_collision_within_bound": 5.0, "comfort": 2.0},
    "epdms_v2": {
        "ego_progress": 5.0,
        "time_to_collision_within_bound": 5.0,
        "lane_keeping": 2.0,
        "history_comfort": 2.0,
    },
}
"""Weights of the other sub-scores. v2's extended comfort (2.0) compares two frames and is added by
`with_extended_comfort`; a single frame's score is divided by 14, as the reference does."""


class PdmScores(NamedTuple):
    """Scores of a batch of trajectories.

    Attributes:
        version: the version of the score.
        total: [B], in [0, 1].
        sub: [B] each, by the reference's names.
        states: [B, 41, 11], the motions that were graded.

    Example:
        Of two plans, the second of which leaves the road:

        PdmScores("pdms_v1", total=np.array([0.93, 0.0]), states=...,  # [2, 41, 11]
            sub={"drivable_area_compliance": np.array([1.0, 0.0]), "ego_progress": ..., ...})
    """

    version: Version
    total: Floats
    sub: dict[str, Floats]
    states: Floats

    def get_sub_scores(self, number: int) -> dict[str, float]:
        """Return the sub-scores of one trajectory, by name."""
        return {name: float(values[number]) for name, values in self.sub.items()}


def score_waypoints(scene: Scene, waypoints: Floats, version: Version) -> PdmScores:
    """Drive and grade trajectories.

    Args:
        waypoints: [B, 8, 3], x, y and heading of the rear axle at 0.5 to 4.0 s in the ego frame.

    Raises: ValueError if they have another shape or rate, or are not finite.
    """
    given = check_finite_waypoints(waypoints)
    return score_poses(scene, interpolate_waypoints(given, scene.start[:3]), version)


def check_finite_waypoints(waypoints: Floats) -> Floats:
    """Return the waypoints [B, 8, 3] as float64.

    Raises: ValueError if they have another shape or rate, or are not finite.
    """
    given = np.asarray(waypoints, np.float64)
    if given.ndim != 3 or given.shape[1:] != (NUM_WAYPOINTS, 3):
        raise ValueError(
            f"waypoints have shape {given.shape}, expected [B, {NUM_WAYPOINTS}, 3]: x, y and "
            "heading every 0.5 s up to 4 s; resample other rates first."
        )
    if not np.isfinite(given).all():
        bad = np.flatnonzero(~np.isfinite(given).all((1, 2)))
        raise ValueError(
            f"waypoints of trajectories {bad[:8].tolist()} are not finite; clip or drop the "
            "policy's outputs before they are graded."
        )
    return given


def score_poses(scene: Scene, poses: Floats, version: Version) -> PdmScores:
    """Drive and grade proposals [B, 41, 3] of 10 Hz in the scene's frame."""
    if scene.reference is None:
        return score_states(scene, simulate(poses, scene.start, scene.vehicle), version)
    both = np.concatenate([scene.reference[None], poses])
    states = simulate(both, scene.start, scene.vehicle)
    return _grade_motions(scene, states[1:], states[:1], version)


def score_states(scene: Scene, states: Floats, version: Version) -> PdmScores:
    """Grade motions [B, 41, 11]."""
    reference = states[:0]
    if scene.reference is not None:
        reference = simulate(scene.reference[None], scene.start, scene.vehicle)
    return _grade_motions(scene, states, reference, version)


def _grade_motions(scene: Scene, states: Floats, reference: Floats, version: Version) -> PdmScores:
    """Grade motions beside the reference's [0 or 1, 41, 11], which only progress is measured by."""
    if version not in get_args(Version):
        raise ValueError(f"the version is {version!r}, expected {' or '.join(get_args(Version))}.")
    poses, count = scene.tracks.poses, len(states)
    tracks = scene.tracks
    if len(reference) and poses.ndim == 4:  # traffic that reacts: the reference meets every future
        reference = np.repeat(reference, count, axis=0)
        tracks = replace(tracks, poses=np.concatenate([poses, poses]))
    raw, metres = _compute_sub_scores(scene, tracks, np.concatenate([states, reference]), version)
    multiplier = _multiply(raw, MULTIPLIERS[version])
    best = (metres * multiplier)[count:] if len(reference) else np.zeros(1)
    sub = {name: values[:count] for name, values in raw.items()}
    sub["ego_progress"] = _normalise_progress(metres[:count], multiplier[:count], best, version)
    return PdmScores(version, combine_sub_scores(sub, version), sub, states)


def combine_sub_scores(sub: dict[str, Floats], version: Version) -> Floats:
    """Combine sub-scores; extended comfort counts if it is among them."""
    # a frame without a neighbour within 0.55 s has no extended comfort, and its score is divided by
    # 14 instead of 16
    weights = dict(WEIGHTS[version])
    if version == "epdms_v2" and "extended_comfort" in sub:
        weights["extended_comfort"] = 2.0
    weighted = sum(weight * sub[name] for name, weight in weights.items())
    return np.asarray(_multiply(sub, MULTIPLIERS[version]) * weighted / sum(weights.values()))


def _normalise_progress(
    metres: Floats, multiplier: Floats, best: Floats, version: Version
) -> Floats:
    """Normalise progress, pdm_scorer.py:223-238 in v2; v1 multiplies before it divides.

    Args:
        metres, multiplier: [B].
        best: [1] or [B], the reference's metres times its multiplier.
    """
    norm = np.maximum(metres * multiplier, best)
    # where nobody made 5 m, at a red light for example, standing is no fault
    enough = norm > sub_scores.NEEDED_PROGRESS
    safe = np.where(enough, norm, 1.0)
    if version == "pdms_v1":
        short = np.where(multiplier == 0.0, 0.0, 1.0)
        return np.where(enough, metres * multiplier / safe, short)
    return np.where(enough, np.clip(metres / safe, 0.0, 1.0), 1.0)


def _multiply(sub: dict[str, Floats], names: tuple[str, ...]) -> Floats:
    return np.asarray(np.prod([sub[name] for name in names], axis=0))


def _compute_sub_scores(
    scene: Scene, tracks: Tracks, states: Floats, version: Version
) -> tuple[dict[str, Floats], Floats]:
    """Return all sub-scores but progress, and the metres of progress."""
    car, is_v2 = scene.vehicle, version == "epdms_v2"
    centres = states[..., :2] + car.rear_axle_to_centre * directions(states[..., HEADING])
    corners = box_corners(centres, states[..., HEADING], car.half_length, car.half_width)
    positions = sub_scores.locate(states, centres, corners, scene.map)
    at_risk = positions.several_lanes | positions.off_road
    # v1 projects from every step; v2 stops where the last projection would pass 4 s
    num_starts = NUM_STEPS + 1 - (9 if is_v2 else 0)
    near_risk = at_risk | positions.axle_in_intersection
    sub = {
        "no_at_fault_collisions": no_at_fault_collision(states, centres, tracks, at_risk, car),
        "drivable_area_compliance": sub_scores.drivable_area(positions),
        "driving_direction_compliance": sub_scores.driving_direction(
            centres, positions, spare_intersections=is_v2
        ),
        "time_to_collision_within_bound": time_to_collision(
            states, centres, tracks, near_risk, num_starts, car
        ),
    }
    if is_v2:
        sub["traffic_light_compliance"] = sub_scores.traffic_lights(
            states, centres, scene.red_lights, car
        )
        sub["lane_keeping"] = sub_scores.lane_keeping(centres, positions, scene.line)
        sub["history_comfort"] = _history_comfort(scene, states)
    else:
        sub["comfort"] = np.asarray(is_comfortable(states, car, is_v2=False).all(-1), np.float64)
    return sub, sub_scores.measure_progress(centres, scene.line)


def _history_comfort(scene: Scene, states: Floats) -> Floats:
    """Grade comfort with the recorded past before it; without a past it is 1, as in the reference.

    The reference drops the newest sample of the past, so the one at -0.1 s is missing, and its
    interpolation forgets the past's yaw rate and acceleration.
    """
    if scene.history is None or len(scene.history) < 2:
        return np.ones(len(states))
    past = scene.history[:-1].copy()
    past[:, YAW_RATE:] = 0.0
    repeated = np.broadcast_to(past, (len(states), *past.shape))
    whole = np.concatenate([repeated, states], axis=1)
    return np.asarray(is_comfortable(whole, scene.vehicle, is_v2=True).all(-1), np.float64)


SIGMA_SQUARED: Final = 0.1
"""Width of the kernel that weights second-stage scenes, in square metres."""


def with_extended_comfort(now: PdmScores, before: PdmScores, apart_s: float) -> PdmScores:
    """Add extended comfort to `now`, from the plans of a frame up to 0.55 s before it.

    The total is then divided by 16 instead of 14.
    """
    comfort = extended_comfort(now.states, before.states, apart_s)
    sub = {**now.sub, "extended_comfort": comfort}
    return now._replace(sub=sub, total=combine_sub_scores(sub, now.version))


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
    return score_waypoints(alone, scene.human[None], version).get_sub_scores(0)


def with_human_filter(scores: PdmScores, human: dict[str, float]) -> PdmScores:
    """Forgive what the human failed too: sub-scores become 1 where the human's are 0.

    Extended comfort is not filtered, as in the reference. For recorded frames only; scores
    published before 2025-09-29 used another filter.
    """
    # only a 0 is forgiven: where the human has 1/2, the trajectory keeps its own
    sub = {
        name: np.ones_like(values) if human.get(name) == 0.0 else values
        for name, values in scores.sub.items()
    }
    return scores._replace(sub=sub, total=combine_sub_scores(sub, scores.version))


def second_stage_weights(end: Floats, starts: Floats) -> Floats:
    """Weight second-stage scenes by how near they start to the first stage's end: [S].

    exp(-d^2 / (2 * 0.1)), normalised; uniform if all are far away.

    Args:
        end: [2], where the first stage's predicted trajectory ended (not the graded motion).
        starts: [S, 2], where the scenes of the second stage start.
    """
    weights = np.exp(-((starts - end) ** 2).sum(-1) / (2 * SIGMA_SQUARED))
    # far away means a few metres: exp(-d^2 / 0.2) is below 1e-8 from 2 m on
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


def parse_reward(text: str, version: Version) -> dict[str, float]:
    """Return the weight of each part of a reward such as "total" or "total=1,lane_keeping=0.5".

    A name without a weight has weight 1.

    Raises: ValueError for an unknown name, or a weight that is no number.
    """
    known = ("total", *MULTIPLIERS[version], *WEIGHTS[version])
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, weight = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise ValueError(f"reward names {name!r}, expected one of {', '.join(known)}.")
        if name in weights:
            raise ValueError(f"reward names {name!r} twice; give it one weight.")
        try:
            weights[name] = float(weight) if equals else 1.0
        except ValueError:
            raise ValueError(f"the weight of {name} is {weight!r}, expected a number.") from None
    return weights


def weigh_reward(weights: Mapping[str, float], score: Mapping[str, float]) -> float:
    """Return the sum of the weighted parts of a score."""
    return sum(weight * score[name] for name, weight in weights.items())


def measure_backward(waypoints: Floats) -> Floats:
    """Return how far each waypoint lies behind the one before it, along that one's heading: [B, 8].

    0 if it lies ahead.
    """
    # policies that learn from PDMS were seen to let the last waypoint jump back
    poses = np.concatenate([np.zeros_like(waypoints[:, :1]), waypoints], axis=1)
    steps, heading = np.diff(poses[..., :2], axis=1), poses[:, :-1, 2]
    ahead = steps[..., 0] * np.cos(heading) + steps[..., 1] * np.sin(heading)
    return np.asarray(np.maximum(-ahead, 0.0))
