"""The action `profiles`: a path and the speeds along it, scaled to [-1, 1], and the trajectory they
make.

A chunk of eight rows is one plan of 4 s; no row stands for a waypoint. Row k holds

    ahead   DCT coefficient k of the accelerations in eight spans of 0.5 s, from the present speed on
    left    DCT coefficient k of the sideways shifts of the eight waypoints
    turn    bearing of the place where the path is RADII[k] metres away from the car, to the left

A change of `ahead` in row 0 is a steady pull or brake along the same path; one of `turn` is another
path at the same speeds. Tokens that are drawn independently of each other thus differ as whole
trajectories do, where moves (`moves.py`) differ by jitter. A bearing is also a column of the front
camera's picture, whatever the path before it, where headings and curvatures add up their errors.
Coefficients of a cosine transform for action tokens: FAST (Pertsch et al. 2025, arXiv:2501.09747).
"""

from typing import Final

import numpy as np

from vla_rl.envs.driving.moves import NUM_WAYPOINTS
from vla_rl.envs.driving.paths import Floats

RADII: Final = np.array([4.0, 8.0, 12.0, 17.0, 23.0, 30.0, 40.0, 52.0])
"""Distances from the car in metres at which a plan has a bearing."""

TURN: Final = np.array([0.4, 0.7, 0.95, 1.2, 1.5, 1.6, 1.6, 1.6])
"""Bearings at 1, radians to the left. They grow with the power 1.5 of the action, so that steps are
fine where the road is straight."""

AHEAD: Final = np.array([12.0, 8.0, 6.0, 5.0, 4.0, 3.0, 2.0, 2.0])
"""Coefficients of the accelerations at 1, m/s^2. Row 0 at 1 is 4.2 m/s^2 for 4 s."""

LEFT: Final = np.array([2.0, 1.2, 0.8, 0.6, 0.4, 0.4, 0.3, 0.3])
"""Coefficients of the shifts at 1, metres. They grow with the power 2 of the action."""

_TURN_POWER: Final = 1.5
_LEFT_POWER: Final = 2.0
_GRID: Final = np.arange(0.0, 62.0, 0.5)
_SPAN_S: Final = 0.5
_STEADY: Final = 0.05
"""Weight of a change between two accelerations, beside an error of a metre."""


def waypoints_of_profiles(actions: np.ndarray, speed: float) -> Floats:
    """Return x, y and heading of each waypoint in the car's frame: float64 [8, 3].

    Args:
        actions: [8, 3] in [-1, 1].
        speed: present speed in m/s. It never falls below 0: a plan does not reverse.
    """
    ahead, left, turn = np.clip(np.asarray(actions, np.float64), -1.0, 1.0).T
    reached = metres_of(ahead, speed)
    bearings = TURN * signed_power(turn, _TURN_POWER)
    bearing, slope = _VALUES @ bearings, _SLOPES @ bearings
    x, y = _GRID * np.cos(bearing), _GRID * np.sin(bearing)
    heading = bearing + np.arctan(_GRID * slope)
    along = np.concatenate([[0.0], np.cumsum(np.hypot(np.diff(x), np.diff(y)))])
    x, y, heading = (np.interp(reached, along, each) for each in (x, y, heading))
    shift = (LEFT * signed_power(left, _LEFT_POWER)) @ COSINES
    return np.stack([x - shift * np.sin(heading), y + shift * np.cos(heading), heading], -1)


def profiles_of_poses(poses: np.ndarray, path: np.ndarray, speed: float) -> np.ndarray:
    """Return the plan that follows poses, without sideways shifts: float32 [8, 3].

    Args:
        poses: [9, 3], now and at 0.5 to 4.0 s, of any frame.
        path: [K, 3], poses along the same path from now on and as far as it is known, which may be
            farther than it is driven. Its part after it first comes nearer to the car again is not
            used.
        speed: present speed in m/s.
    """
    distances = np.hypot(*np.diff(poses[:, :2], axis=0).T)
    ahead = pulls_of(np.cumsum(distances), speed)
    turn = signed_power(_bearings(path) / TURN, 1.0 / _TURN_POWER)
    actions = np.stack([ahead, np.zeros(NUM_WAYPOINTS), turn], -1)
    return np.asarray(np.clip(actions, -1.0, 1.0), np.float32)


def metres_of(ahead: Floats, speed: float) -> Floats:
    """Return the metres along the path until each waypoint, [8], of the first numbers of the rows."""
    speeds = speed + np.concatenate([[0.0], np.cumsum((AHEAD * ahead) @ COSINES * _SPAN_S)])
    speeds = np.maximum(speeds, 0.0)
    return np.asarray(np.cumsum((speeds[:-1] + speeds[1:]) / 2 * _SPAN_S))


def pulls_of(metres: Floats, speed: float) -> Floats:
    """Return the first numbers of the rows that reach these metres at each waypoint, [8]."""
    wanted = metres - speed * _SPAN_S * np.arange(1, NUM_WAYPOINTS + 1)
    return np.asarray(COSINES @ (_ACCELERATIONS @ wanted) / AHEAD)


def spline_at(values: Floats, metres: Floats) -> Floats:
    """Return the spline that is 0 at 0 and `values` at RADII, at other distances."""
    return np.asarray(np.interp(metres, _GRID, _VALUES @ values))


def _bearings(path: Floats) -> Floats:
    """Return the bearings at the radii; beyond the path's end, that of its end."""
    offset = path[1:, :2] - path[0, :2]
    radius = np.hypot(*offset.T)
    kept = (np.maximum.accumulate(radius) <= radius) & (radius > 1.0)
    if not kept.any():
        return np.zeros(len(RADII))
    bearing = np.unwrap(np.arctan2(offset[kept, 1], offset[kept, 0]) - path[0, 2])
    bearing -= 2 * np.pi * np.round(bearing[0] / (2 * np.pi))
    return np.asarray(np.interp(RADII, np.append(0.0, radius[kept]), np.append(0.0, bearing)))


def signed_power(values: Floats, power: float) -> Floats:
    """Return powers with the sign of the values."""
    return np.asarray(np.sign(values) * np.abs(values) ** power)


def _cosines() -> Floats:
    """Return the orthonormal DCT-II: row k is the k-th cosine over the eight waypoints."""
    place = np.pi * (np.arange(NUM_WAYPOINTS) + 0.5) / NUM_WAYPOINTS
    rows = np.sqrt(2.0 / NUM_WAYPOINTS) * np.cos(np.arange(NUM_WAYPOINTS)[:, None] * place)
    rows[0] /= np.sqrt(2.0)
    return np.asarray(rows)


def _accelerations() -> Floats:
    """Return the matrix [8, 8] that fits accelerations to the metres they add until each span's end.

    Least squares, with little change between spans: exact accelerations of noisy metres swing.
    """
    spans = np.subtract.outer(np.arange(NUM_WAYPOINTS), np.arange(NUM_WAYPOINTS)) + 0.5
    added = np.maximum(spans, 0.0) * _SPAN_S**2
    change = _STEADY * np.diff(np.eye(NUM_WAYPOINTS), axis=0)
    return np.asarray(np.linalg.pinv(np.concatenate([added, change]))[:, :NUM_WAYPOINTS])


def _spline() -> tuple[Floats, Floats]:
    """Return the natural cubic spline through 0 at 0 and values at the radii, as matrices.

    They map the values to those on the grid, and to the slopes there: [G, 8] each. Beyond the last
    radius the value stays.
    """
    knots = np.append(0.0, RADII)
    count, width = len(knots), np.diff(knots)
    system, right = np.zeros((count, count)), np.zeros((count, count))
    system[0, 0] = system[-1, -1] = 1.0
    for at in range(1, count - 1):
        before, after = width[at - 1], width[at]
        system[at, at - 1 : at + 2] = before, 2 * (before + after), after
        right[at, at - 1 : at + 2] = 6 / before, -6 / before - 6 / after, 6 / after
    bends, same = np.linalg.solve(system, right), np.eye(count)
    place = np.minimum(_GRID, knots[-1])
    left = np.clip(np.searchsorted(knots, place, side="right") - 1, 0, count - 2)
    span = width[left][:, None]
    a, b = (knots[left + 1] - place)[:, None] / span, (place - knots[left])[:, None] / span
    near, far = bends[left], bends[left + 1]
    values = a * same[left] + b * same[left + 1]
    values += ((a**3 - a) * near + (b**3 - b) * far) * span**2 / 6
    slopes = (same[left + 1] - same[left]) / span
    slopes += ((3 * b**2 - 1) * far - (3 * a**2 - 1) * near) * span / 6
    slopes[knots[-1] < _GRID] = 0.0
    return values[:, 1:], slopes[:, 1:]


COSINES: Final = _cosines()
_ACCELERATIONS: Final = _accelerations()
_VALUES, _SLOPES = _spline()
