"""NavSim's PDM score, version 1 (PDMS) and version 2 (EPDMS), of whole batches of trajectories.

    scores = score_waypoints(scene, waypoints, "epdms_v2")     # waypoints: [B, 8, 3]
    scores.total, scores.sub["ego_progress"]

Formulas: navsim main 0a380a9 (v2) and branch v1.1 (v1), .../scoring/pdm_scorer.py. A proposal
never changes another one's scores: progress is measured by the scene's reference and the proposal
itself, as the benchmark does for the one trajectory that it grades.
"""

from dataclasses import replace
from typing import Final, Literal, NamedTuple, get_args

import numpy as np

from vla_rl.envs.driving.scores import lanes
from vla_rl.envs.driving.scores.collisions import no_at_fault_collision, time_to_collision
from vla_rl.envs.driving.scores.comfort import is_comfortable
from vla_rl.envs.driving.scores.geometry import Floats, box_corners, directions
from vla_rl.envs.driving.scores.motion import poses_of_waypoints, simulate
from vla_rl.envs.driving.scores.scene import Scene, Tracks
from vla_rl.envs.driving.scores.vehicle import HEADING, NUM_STEPS, YAW_RATE

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
`stages.with_extended_comfort`; a single frame's score is divided by 14, as the reference does."""


class PdmScores(NamedTuple):
    """Scores of a batch of trajectories.

    Attributes:
        version: the version of the score.
        total: [B], in [0, 1].
        sub: [B] each, by the reference's names.
        states: [B, 41, 11], the motions that were graded.
    """

    version: Version
    total: Floats
    sub: dict[str, Floats]
    states: Floats

    def sub_of(self, number: int) -> dict[str, float]:
        """Return the sub-scores of one trajectory, by name."""
        return {name: float(values[number]) for name, values in self.sub.items()}


def score_waypoints(scene: Scene, waypoints: Floats, version: Version) -> PdmScores:
    """Drive and grade trajectories.

    Args:
        waypoints: [B, 8, 3], x, y and heading of the rear axle at 0.5 to 4.0 s in the ego frame.

    Raises: ValueError if they have another shape or rate, or are not finite.
    """
    given = finite_waypoints(waypoints)
    return score_poses(scene, poses_of_waypoints(given, scene.start[:3]), version)


def finite_waypoints(waypoints: Floats) -> Floats:
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
    return _graded(scene, states[1:], states[:1], version)


def score_states(scene: Scene, states: Floats, version: Version) -> PdmScores:
    """Grade motions [B, 41, 11]."""
    reference = states[:0]
    if scene.reference is not None:
        reference = simulate(scene.reference[None], scene.start, scene.vehicle)
    return _graded(scene, states, reference, version)


def _graded(scene: Scene, states: Floats, reference: Floats, version: Version) -> PdmScores:
    """Grade motions beside the reference's [0 or 1, 41, 11], which only progress is measured by."""
    if version not in get_args(Version):
        raise ValueError(f"the version is {version!r}, expected {' or '.join(get_args(Version))}.")
    poses, count = scene.tracks.poses, len(states)
    tracks = scene.tracks
    if len(reference) and poses.ndim == 4:  # traffic that reacts: the reference meets every future
        reference = np.repeat(reference, count, axis=0)
        tracks = replace(tracks, poses=np.concatenate([poses, poses]))
    raw, metres = _sub_scores(scene, tracks, np.concatenate([states, reference]), version)
    multiplier = _product(raw, MULTIPLIERS[version])
    best = (metres * multiplier)[count:] if len(reference) else np.zeros(1)
    sub = {name: values[:count] for name, values in raw.items()}
    sub["ego_progress"] = _progress(metres[:count], multiplier[:count], best, version)
    return PdmScores(version, total_of(sub, version), sub, states)


def total_of(sub: dict[str, Floats], version: Version) -> Floats:
    """Combine sub-scores; extended comfort counts if it is among them."""
    weights = dict(WEIGHTS[version])
    if version == "epdms_v2" and "extended_comfort" in sub:
        weights["extended_comfort"] = 2.0
    weighted = sum(weight * sub[name] for name, weight in weights.items())
    return np.asarray(_product(sub, MULTIPLIERS[version]) * weighted / sum(weights.values()))


def _progress(metres: Floats, multiplier: Floats, best: Floats, version: Version) -> Floats:
    """Normalise progress, pdm_scorer.py:223-238 in v2; v1 multiplies before it divides.

    Args:
        metres, multiplier: [B].
        best: [1] or [B], the reference's metres times its multiplier.
    """
    norm = np.maximum(metres * multiplier, best)
    enough = norm > lanes.NEEDED_PROGRESS
    safe = np.where(enough, norm, 1.0)
    if version == "pdms_v1":
        short = np.where(multiplier == 0.0, 0.0, 1.0)
        return np.where(enough, metres * multiplier / safe, short)
    return np.where(enough, np.clip(metres / safe, 0.0, 1.0), 1.0)


def _product(sub: dict[str, Floats], names: tuple[str, ...]) -> Floats:
    return np.asarray(np.prod([sub[name] for name in names], axis=0))


def _sub_scores(
    scene: Scene, tracks: Tracks, states: Floats, version: Version
) -> tuple[dict[str, Floats], Floats]:
    """Return all sub-scores but progress, and the metres of progress."""
    car, is_v2 = scene.vehicle, version == "epdms_v2"
    centres = states[..., :2] + car.rear_axle_to_centre * directions(states[..., HEADING])
    corners = box_corners(centres, states[..., HEADING], car.half_length, car.half_width)
    places = lanes.places_of(states, centres, corners, scene.map)
    at_risk = places.several_lanes | places.off_road
    # v1 projects from every step; v2 stops where the last projection would pass 4 s
    num_starts = NUM_STEPS + 1 - (9 if is_v2 else 0)
    near_risk = at_risk | places.axle_in_intersection
    sub = {
        "no_at_fault_collisions": no_at_fault_collision(states, centres, tracks, at_risk, car),
        "drivable_area_compliance": lanes.drivable_area(places),
        "driving_direction_compliance": lanes.driving_direction(
            centres, places, spare_intersections=is_v2
        ),
        "time_to_collision_within_bound": time_to_collision(
            states, centres, tracks, near_risk, num_starts, car
        ),
    }
    if is_v2:
        sub["traffic_light_compliance"] = lanes.traffic_lights(
            states, centres, scene.red_lights, car
        )
        sub["lane_keeping"] = lanes.lane_keeping(centres, places, scene.line)
        sub["history_comfort"] = _history_comfort(scene, states)
    else:
        sub["comfort"] = np.asarray(is_comfortable(states, car, is_v2=False).all(-1), np.float64)
    return sub, lanes.progress_in_metres(centres, scene.line)


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
