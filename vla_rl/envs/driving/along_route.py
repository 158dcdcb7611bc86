"""The action `along_route`: speeds along the route and shifts beside it, scaled to [-1, 1].

A chunk of eight rows is one plan of 4 s; no row stands for a waypoint. Row k holds

    ahead   DCT coefficient k of the accelerations, as in `profiles`
    left    DCT coefficient k of the sideways shifts of the eight waypoints
    turn    sideways shift of the path where it is RADII[k] metres along the route

Zeros keep the speed in the middle of the lane. The path leaves the car along its heading and goes
through the observed points of the route; beyond them it is straight. What is left to decide is when
to drive how fast, and when to leave the middle.
"""

from typing import Final

import numpy as np

from vla_rl.envs.driving.moves import NUM_WAYPOINTS
from vla_rl.envs.driving.paths import Floats
from vla_rl.envs.driving.profiles import (
    COSINES,
    LEFT,
    metres_of,
    pulls_of,
    spline_at,
)
from vla_rl.envs.driving.scores.geometry import project_to_polyline

AWAY: Final = 2 * LEFT
"""Coefficients of the shifts at 1, metres."""

ASIDE: Final = 2.0
"""Shift of the path at 1, metres."""

_PIECES: Final = 10
"""Straight pieces between two points of the route."""

_BEYOND: Final = 60.0
"""Metres that the path goes on straight after the last point."""


def waypoints_along_route(actions: np.ndarray, speed: float, route: np.ndarray) -> Floats:
    """Return x, y and heading of each waypoint in the car's frame: float64 [8, 3].

    Args:
        actions: [8, 3] in [-1, 1].
        speed: present speed in m/s. It never falls below 0: a plan does not reverse.
        route: [N, 2], points of the route ahead in the car's frame.
    """
    ahead, left, turn = np.clip(np.asarray(actions, np.float64), -1.0, 1.0).T
    reached = metres_of(ahead, speed)
    line, along = _line(route)
    headings = np.unwrap(np.arctan2(*np.gradient(line, axis=0).T[::-1]))
    x, y, heading = (np.interp(reached, along, each) for each in (*line.T, headings))
    shift = (AWAY * left) @ COSINES + ASIDE * spline_at(turn, reached)
    return np.stack([x - shift * np.sin(heading), y + shift * np.cos(heading), heading], -1)


def plan_along_route(poses: np.ndarray, speed: float, route: np.ndarray) -> np.ndarray:
    """Return the plan that follows poses: float32 [8, 3].

    Args:
        poses: [9, 3], now and at 0.5 to 4.0 s, of any frame.
        speed: present speed in m/s.
        route: [N, 2], points of the route ahead in the car's frame.
    """
    cos, sin = np.cos(poses[0, 2]), np.sin(poses[0, 2])
    points = (poses[1:, :2] - poses[0, :2]) @ np.array([[cos, -sin], [sin, cos]])
    line, marks = _line(route)
    along, away = project_to_polyline(points, line)
    place = np.minimum(np.searchsorted(marks, along, side="right"), len(line) - 1)
    way, offset = line[place] - line[place - 1], points - line[place - 1]
    shift = np.sign(way[:, 0] * offset[:, 1] - way[:, 1] * offset[:, 0]) * away
    left, ahead = COSINES @ shift / AWAY, pulls_of(along, speed)
    plan = np.stack([ahead, left, np.zeros(NUM_WAYPOINTS)], -1)
    return np.asarray(np.clip(plan, -1.0, 1.0), np.float32)


def _line(route: np.ndarray) -> tuple[Floats, Floats]:
    """Return points of the path from the car through the route, and the metres to each of them."""
    knots = np.concatenate([np.zeros((1, 2)), np.asarray(route, np.float64)])
    # a route that ends repeats its last point
    knots = knots[np.concatenate([[True], np.hypot(*np.diff(knots, axis=0).T) > 0.1])]
    if len(knots) == 1:
        knots = np.array([[0.0, 0.0], [1.0, 0.0]])
    chords = np.diff(knots, axis=0)
    lengths = np.hypot(*chords.T)[:, None]
    ways = np.gradient(knots, axis=0)
    ways /= np.maximum(np.hypot(*ways.T)[:, None], 1e-9)
    ways[0], ways[-1] = (1.0, 0.0), chords[-1] / lengths[-1]
    # cubic Hermite pieces, whose tangents are as long as their chords
    t = np.linspace(0.0, 1.0, _PIECES, endpoint=False)[:, None, None]
    bends = (t**3 - 2 * t**2 + t) * lengths * ways[:-1] + (t**3 - t**2) * lengths * ways[1:]
    pieces = knots[:-1] + (3 * t**2 - 2 * t**3) * chords + bends
    line = pieces.transpose(1, 0, 2).reshape(-1, 2)
    line = np.concatenate([line, knots[-1:], knots[-1:] + _BEYOND * ways[-1:]])
    return line, np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(line, axis=0).T))])
