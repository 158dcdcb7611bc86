"""Planned trajectories from any planner, as a .npz file of plain arrays: read and checked.

    np.savez(path, tokens=tokens, waypoints=waypoints, interval_s=0.5)

tokens: [N], names of the scenes; waypoints: [N, 8, 3], x, y and heading of the rear axle in the
car's frame, metres and radians, 0.5 to 4.0 s ahead; interval_s: seconds between two waypoints.
"""

from pathlib import Path
from typing import Final

import numpy as np

from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.pdm import finite_waypoints
from vla_rl.envs.driving.scores.scene_files import texts_in
from vla_rl.util.arrays import read_npz
from vla_rl.util.foreign_data import reading_file

INTERVAL_S: Final = 0.5
"""Time between two waypoints."""

MOST_BACKWARDS: Final = 1.0
"""Metres that a waypoint may lie behind the one before it; more is a jump, not a reverse gear."""


def read_plans(path: Path) -> dict[str, Floats]:
    """Return the waypoints [8, 3] of each scene. Raises: ValueError naming the file."""
    remedy = "expected arrays tokens, waypoints, interval_s"
    with reading_file(path, " is no file of plans", remedy):
        arrays = read_npz(path)
        tokens, waypoints = texts_in(arrays["tokens"], "tokens"), arrays["waypoints"]
        interval_s = float(arrays["interval_s"])
        num_plans = len(waypoints)
    if len(set(tokens)) != len(tokens) or len(tokens) != num_plans:
        raise ValueError(
            f"{path} has {len(tokens)} tokens, {len(set(tokens))} of them different, and "
            f"{num_plans} plans, expected one plan for each token."
        )
    with reading_file(path, "", "repair or drop them"):
        return dict(zip(tokens, checked_waypoints(waypoints, interval_s), strict=True))


def checked_waypoints(waypoints: Floats, interval_s: float = INTERVAL_S) -> Floats:
    """Return the waypoints [B, 8, 3].

    Raises: ValueError for another rate or shape, numbers that are not finite, and jumps backwards.
    """
    if abs(interval_s - INTERVAL_S) > 1e-6:
        raise ValueError(
            f"waypoints are {interval_s} s apart, expected {INTERVAL_S} s; resample them."
        )
    given = finite_waypoints(waypoints)
    back = backward_metres(given)
    jumping = np.flatnonzero(back.max(-1) > MOST_BACKWARDS)
    if len(jumping):
        first = int(jumping[0])
        raise ValueError(
            f"waypoint {int(back[first].argmax()) + 1} of trajectory {first} lies "
            f"{back[first].max():.1f} m behind the one before it, expected at most "
            f"{MOST_BACKWARDS} m; such jumps exploit the score, so drop or repair that plan "
            f"({len(jumping)} in all)."
        )
    return given


def backward_metres(waypoints: Floats) -> Floats:
    """Return how far each waypoint lies behind the one before it, along that one's heading: [B, 8].

    0 if it lies ahead.
    """
    poses = np.concatenate([np.zeros_like(waypoints[:, :1]), waypoints], axis=1)
    steps, heading = np.diff(poses[..., :2], axis=1), poses[:, :-1, 2]
    ahead = steps[..., 0] * np.cos(heading) + steps[..., 1] * np.sin(heading)
    return np.asarray(np.maximum(-ahead, 0.0))
