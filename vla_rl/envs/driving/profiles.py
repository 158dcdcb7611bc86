"""The action `profiles`: a path and the speeds along it, scaled to [-1, 1], and the trajectory they
make.

A chunk of eight rows is one plan of 4 s; no row stands for a waypoint. Row k holds

    ahead   DCT coefficient k of the accelerations in eight spans of 0.5 s, from the present speed on
    left    DCT coefficient k of the sideways shifts of the eight waypoints
    turn    curvature of the path at distance NODES[k], linear in between

A change of `ahead` in row 0 is a steady pull or brake along the same path; one of `turn` is another
path at the same speeds. Tokens that are drawn independently of each other thus differ as whole
trajectories do, where moves (`moves.py`) differ by jitter. Coefficients of a cosine transform for
action tokens: FAST (Pertsch et al. 2025, arXiv:2501.09747).
"""

from typing import Final

import numpy as np

from vla_rl.envs.driving.moves import NUM_WAYPOINTS
from vla_rl.envs.driving.paths import Floats

NODES: Final = np.array([0.0, 3.0, 7.0, 12.0, 18.0, 26.0, 36.0, 50.0])
"""Distances in metres at which a plan has a curvature; the last one holds from there on."""

CURVATURE: Final = 0.25
"""Curvature at 1, in 1/m to the left. It grows with the square of the action: fine steps where the
road is straight, coarse ones in tight turns."""

AHEAD: Final = np.array([12.0, 8.0, 6.0, 5.0, 4.0, 3.0, 2.0, 2.0])
"""Coefficients of the accelerations at 1, m/s^2. Row 0 at 1 is 4.2 m/s^2 for 4 s."""

LEFT: Final = np.array([2.0, 1.2, 0.8, 0.6, 0.4, 0.4, 0.3, 0.3])
"""Coefficients of the shifts at 1, metres. They grow with the square of the action, too."""

_GRID: Final = 0.5
_LENGTHS: Final = np.arange(0.0, 70.0, _GRID)
_SMOOTH: Final = 0.5
_SPAN_S: Final = 0.5


def _cosines() -> Floats:
    """Return the orthonormal DCT-II: row k is the k-th cosine over the eight waypoints."""
    place = np.pi * (np.arange(NUM_WAYPOINTS) + 0.5) / NUM_WAYPOINTS
    rows = np.sqrt(2.0 / NUM_WAYPOINTS) * np.cos(np.arange(NUM_WAYPOINTS)[:, None] * place)
    rows[0] /= np.sqrt(2.0)
    return np.asarray(rows)


COSINES: Final = _cosines()


def _reached() -> Floats:
    """Return the metres that 1 m/s^2 in span j adds until the end of span i: [8, 8]."""
    spans = np.subtract.outer(np.arange(NUM_WAYPOINTS), np.arange(NUM_WAYPOINTS)) + 0.5
    return np.asarray(np.maximum(spans, 0.0) * _SPAN_S**2)


_REACHED: Final = _reached()
_STEADY: Final = 0.05


def waypoints_of_profiles(actions: np.ndarray, speed: float) -> np.ndarray:
    """Return x, y and heading of each waypoint in the car's frame: float64 [8, 3].

    Args:
        actions: [8, 3] in [-1, 1].
        speed: present speed in m/s. It never falls below 0: a plan does not reverse.
    """
    ahead, left, turn = np.clip(np.asarray(actions, np.float64), -1.0, 1.0).T
    speeds = speed + np.concatenate([[0.0], np.cumsum((AHEAD * ahead) @ COSINES * _SPAN_S)])
    speeds = np.maximum(speeds, 0.0)
    reached = np.minimum(np.cumsum((speeds[:-1] + speeds[1:]) / 2 * _SPAN_S), _LENGTHS[-1])
    shift = (LEFT * _square(left)) @ COSINES
    curvature = np.interp(_LENGTHS + _GRID / 2, NODES, CURVATURE * _square(turn))
    heading = np.concatenate([[0.0], np.cumsum(curvature * _GRID)])
    middle = (heading[:-1] + heading[1:]) / 2
    x = np.concatenate([[0.0], np.cumsum(np.cos(middle) * _GRID)])
    y = np.concatenate([[0.0], np.cumsum(np.sin(middle) * _GRID)])
    lengths = np.append(_LENGTHS, _LENGTHS[-1] + _GRID)
    at = [np.interp(reached, lengths, values) for values in (x, y, heading)]
    return np.stack([at[0] - shift * np.sin(at[2]), at[1] + shift * np.cos(at[2]), at[2]], -1)


def profiles_of_poses(poses: np.ndarray, path: np.ndarray, speed: float) -> np.ndarray:
    """Return the plan that follows poses: float32 [8, 3].

    Args:
        poses: [9, 3], now and at 0.5 to 4.0 s, of any frame.
        path: [K, 3], poses along the same path from now on and as far as it is known, which may be
            farther than it is driven; no two at the same place.
        speed: present speed in m/s.
    """
    steps = np.hypot(*np.diff(path[:, :2], axis=0).T)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    heading = np.unwrap(path[:, 2])
    kept = along <= NODES[-1] + 10.0
    curvature = _curvatures(along[kept], (heading - heading[0])[kept])
    turn = _root(np.clip(curvature / CURVATURE, -1.0, 1.0))
    distances = np.hypot(*np.diff(poses[:, :2], axis=0).T)
    ahead = np.clip(COSINES @ _accelerations(distances, speed) / AHEAD, -1.0, 1.0)
    actions = np.stack([ahead, np.zeros(NUM_WAYPOINTS), turn], -1)
    planned = waypoints_of_profiles(actions, speed)
    cos, sin = np.cos(poses[0, 2]), np.sin(poses[0, 2])
    offset = (poses[1:, :2] - poses[0, :2]) @ np.array([[cos, -sin], [sin, cos]])
    missing = offset - planned[:, :2]
    shift = np.cos(planned[:, 2]) * missing[:, 1] - np.sin(planned[:, 2]) * missing[:, 0]
    actions[:, 1] = _root(np.clip(COSINES @ shift / LEFT, -1.0, 1.0))
    return np.asarray(np.clip(actions, -1.0, 1.0), np.float32)


def _square(values: Floats) -> Floats:
    """Return squares with the sign of the values."""
    return np.asarray(values * np.abs(values))


def _root(values: Floats) -> Floats:
    return np.asarray(np.sign(values) * np.sqrt(np.abs(values)))


def _accelerations(distances: Floats, speed: float) -> Floats:
    """Fit eight accelerations to the distances: least squares, and little change between spans."""
    change = _STEADY * np.diff(np.eye(NUM_WAYPOINTS), axis=0)
    system = np.concatenate([_REACHED, change])
    wanted = np.concatenate([np.cumsum(distances - speed * _SPAN_S), np.zeros(len(change))])
    return np.asarray(np.linalg.lstsq(system, wanted, rcond=None)[0])


def _curvatures(along: Floats, heading: Floats) -> Floats:
    """Fit curvatures at the nodes to the headings: least squares, and little change between nodes."""
    fine = np.arange(0.0, along[-1] + 0.25, 0.25)
    hats = np.stack([np.interp(fine, NODES, row) for row in np.eye(len(NODES))], -1)
    turned = 0.25 * (np.cumsum(hats, axis=0) - (hats + hats[0]) / 2)
    basis = np.stack([np.interp(along, fine, column) for column in turned.T], -1)
    change = _SMOOTH * np.diff(np.eye(len(NODES)), axis=0)
    system = np.concatenate([basis, change])
    wanted = np.concatenate([heading, np.zeros(len(change))])
    return np.asarray(np.linalg.lstsq(system, wanted, rcond=None)[0])
