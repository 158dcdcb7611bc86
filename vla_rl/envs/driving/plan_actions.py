"""The directions in which eight rows of three numbers in [-1, 1] are a plan of 4 s.

`moves`: row k is the move of 0.5 s from waypoint k to the next, in the frame of waypoint k.

`profiles`: a path and the speeds along it; no row stands for a waypoint. Row k holds

    ahead   DCT coefficient k of the accelerations in eight spans of 0.5 s, from the present speed on
    left    DCT coefficient k of the sideways shifts of the eight waypoints
    turn    bearing of the position where the path is RADII[k] metres away from the car, to the left

A change of `ahead` in row 0 is a steady pull or brake along the same path; one of `turn` is another
path at the same speeds. Tokens that are drawn independently of each other thus differ as whole
trajectories do, where moves differ by jitter. A bearing is also a column of the front camera's image,
whatever the path before it, where headings and curvatures add up their errors. Coefficients of a
cosine transform for action tokens: FAST (Pertsch et al. 2025, arXiv:2501.09747).

`along_route`: speeds along the route and shifts beside it; `ahead` and `left` as in `profiles`, and

    turn    sideways shift of the path where it is RADII[k] metres along the route

Zeros keep the speed in the middle of the lane. The path leaves the car along its heading and goes
through the observed points of the route; beyond them it is straight. What is left to decide is when
to drive how fast, and when to leave the middle.
"""

from typing import Final, Literal, get_args

import numpy as np

from vla_rl.envs.driving.scores.geometry import Floats, project_to_polyline

NUM_WAYPOINTS: Final = 8
LOWEST_MOVE: Final = np.array([-1.0, -1.5, -0.6])
HIGHEST_MOVE: Final = np.array([8.0, 1.5, 0.6])
"""The moves at -1 and at 1: metres ahead, metres to the left, radians to the left."""


def decode_moves(actions: np.ndarray) -> np.ndarray:
    """Return x, y and heading of each waypoint in the car's frame: float64 [K, 3].

    Args:
        actions: [K, 3] in [-1, 1]; each is a move in the frame of the waypoint before it.
    """
    moves = LOWEST_MOVE + (np.clip(actions, -1.0, 1.0) + 1.0) / 2.0 * (HIGHEST_MOVE - LOWEST_MOVE)
    pose = np.zeros(3)
    waypoints = np.empty((len(moves), 3))
    for number, (ahead, left, turn) in enumerate(moves):
        cos, sin = np.cos(pose[2]), np.sin(pose[2])
        pose = pose + np.array([cos * ahead - sin * left, sin * ahead + cos * left, turn])
        waypoints[number] = pose
    return waypoints


def encode_moves(poses: np.ndarray) -> np.ndarray:
    """Return the actions that move along poses [K + 1, 3] of any frame: float32 [K, 3].

    Moves beyond the bounds are clipped.
    """
    steps = np.diff(poses, axis=0)
    cos, sin = np.cos(poses[:-1, 2]), np.sin(poses[:-1, 2])
    ahead = cos * steps[:, 0] + sin * steps[:, 1]
    left = cos * steps[:, 1] - sin * steps[:, 0]
    turn = (steps[:, 2] + np.pi) % (2 * np.pi) - np.pi
    scaled = (
        2.0 * (np.stack([ahead, left, turn], -1) - LOWEST_MOVE) / (HIGHEST_MOVE - LOWEST_MOVE) - 1.0
    )
    return np.asarray(np.clip(scaled, -1.0, 1.0), np.float32)


RADII: Final = np.array([4.0, 8.0, 12.0, 17.0, 23.0, 30.0, 40.0, 52.0])
"""Distances from the car in metres at which a plan has a bearing."""

TURN_SCALE: Final = np.array([0.4, 0.7, 0.95, 1.2, 1.5, 1.6, 1.6, 1.6])
"""Bearings at 1, radians to the left. They grow with the power 1.5 of the action, so that steps are
fine where the road is straight."""

AHEAD_SCALE: Final = np.array([12.0, 8.0, 6.0, 5.0, 4.0, 3.0, 2.0, 2.0])
"""Coefficients of the accelerations at 1, m/s^2. Row 0 at 1 is 4.2 m/s^2 for 4 s."""

LEFT_SCALE: Final = np.array([2.0, 1.2, 0.8, 0.6, 0.4, 0.4, 0.3, 0.3])
"""Coefficients of the shifts at 1, metres. They grow with the power 2 of the action."""

_TURN_POWER: Final = 1.5
_LEFT_POWER: Final = 2.0
_GRID: Final = np.arange(0.0, 62.0, 0.5)
_SPAN_S: Final = 0.5
_STEADY: Final = 0.05
"""Weight of a change between two accelerations, beside an error of a metre."""


def decode_profiles(actions: np.ndarray, speed: float) -> Floats:
    """Return x, y and heading of each waypoint in the car's frame: float64 [8, 3].

    Args:
        actions: [8, 3] in [-1, 1].
        speed: present speed in m/s. It never falls below 0: a plan does not reverse.
    """
    ahead, left, turn = np.clip(np.asarray(actions, np.float64), -1.0, 1.0).T
    reached = decode_distances(ahead, speed)
    bearings = TURN_SCALE * signed_power(turn, _TURN_POWER)
    bearing, slope = _SPLINE_VALUES @ bearings, _SPLINE_SLOPES @ bearings
    x, y = _GRID * np.cos(bearing), _GRID * np.sin(bearing)
    heading = bearing + np.arctan(_GRID * slope)
    along = np.concatenate([[0.0], np.cumsum(np.hypot(np.diff(x), np.diff(y)))])
    x, y, heading = (np.interp(reached, along, each) for each in (x, y, heading))
    shift = (LEFT_SCALE * signed_power(left, _LEFT_POWER)) @ COSINES
    return np.stack([x - shift * np.sin(heading), y + shift * np.cos(heading), heading], -1)


def encode_profiles(poses: np.ndarray, path: np.ndarray, speed: float) -> np.ndarray:
    """Return the plan that follows poses, without sideways shifts: float32 [8, 3].

    Args:
        poses: [9, 3], now and at 0.5 to 4.0 s, of any frame.
        path: [K, 3], poses along the same path from now on and as far as it is known, which may be
            farther than it is driven. Its part after it first comes nearer to the car again is not
            used.
        speed: present speed in m/s.
    """
    distances = np.hypot(*np.diff(poses[:, :2], axis=0).T)
    ahead = encode_distances(np.cumsum(distances), speed)
    turn = signed_power(_find_bearings(path) / TURN_SCALE, 1.0 / _TURN_POWER)
    # no shifts: path and speeds say it all, and a motion with two plans would be two labels
    actions = np.stack([ahead, np.zeros(NUM_WAYPOINTS), turn], -1)
    return np.asarray(np.clip(actions, -1.0, 1.0), np.float32)


def decode_distances(ahead: Floats, speed: float) -> Floats:
    """Return the metres along the path until each waypoint, [8], of the first numbers of the rows."""
    speeds = speed + np.concatenate([[0.0], np.cumsum((AHEAD_SCALE * ahead) @ COSINES * _SPAN_S)])
    # policies that learn from PDMS were seen to jump backwards at the last waypoint; a plan that
    # cannot reverse cannot do it
    speeds = np.maximum(speeds, 0.0)
    return np.asarray(np.cumsum((speeds[:-1] + speeds[1:]) / 2 * _SPAN_S))


def encode_distances(metres: Floats, speed: float) -> Floats:
    """Return the first numbers of the rows that reach these metres at each waypoint, [8]."""
    wanted = metres - speed * _SPAN_S * np.arange(1, NUM_WAYPOINTS + 1)
    return np.asarray(COSINES @ (_ACCELERATION_FIT @ wanted) / AHEAD_SCALE)


def interpolate_spline(values: Floats, metres: Floats) -> Floats:
    """Return the spline that is 0 at 0 and `values` at RADII, at other distances."""
    return np.asarray(np.interp(metres, _GRID, _SPLINE_VALUES @ values))


def _find_bearings(path: Floats) -> Floats:
    """Return the bearings at the radii; beyond the path's end, that of its end."""
    offset = path[1:, :2] - path[0, :2]
    radius = np.hypot(*offset.T)
    # a path that comes nearer again has two bearings at one distance; in the first metre a bearing
    # is mostly the rounding of poses
    kept = (np.maximum.accumulate(radius) <= radius) & (radius > 1.0)
    if not kept.any():
        return np.zeros(len(RADII))
    bearing = np.unwrap(np.arctan2(offset[kept, 1], offset[kept, 0]) - path[0, 2])
    bearing -= 2 * np.pi * np.round(bearing[0] / (2 * np.pi))
    return np.asarray(np.interp(RADII, np.append(0.0, radius[kept]), np.append(0.0, bearing)))


def signed_power(values: Floats, power: float) -> Floats:
    """Return powers with the sign of the values."""
    return np.asarray(np.sign(values) * np.abs(values) ** power)


def _make_cosines() -> Floats:
    """Return the orthonormal DCT-II: row k is the k-th cosine over the eight waypoints."""
    position = np.pi * (np.arange(NUM_WAYPOINTS) + 0.5) / NUM_WAYPOINTS
    rows = np.sqrt(2.0 / NUM_WAYPOINTS) * np.cos(np.arange(NUM_WAYPOINTS)[:, None] * position)
    rows[0] /= np.sqrt(2.0)
    return np.asarray(rows)


def _make_acceleration_fit() -> Floats:
    """Return the matrix [8, 8] that fits accelerations to the metres they add until each span's end.

    Least squares, with little change between spans: exact accelerations of noisy metres swing.
    """
    spans = np.subtract.outer(np.arange(NUM_WAYPOINTS), np.arange(NUM_WAYPOINTS)) + 0.5
    added = np.maximum(spans, 0.0) * _SPAN_S**2
    change = _STEADY * np.diff(np.eye(NUM_WAYPOINTS), axis=0)
    return np.asarray(np.linalg.pinv(np.concatenate([added, change]))[:, :NUM_WAYPOINTS])


def _make_spline() -> tuple[Floats, Floats]:
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
    position = np.minimum(_GRID, knots[-1])
    left = np.clip(np.searchsorted(knots, position, side="right") - 1, 0, count - 2)
    span = width[left][:, None]
    a, b = (knots[left + 1] - position)[:, None] / span, (position - knots[left])[:, None] / span
    nearer, farther = bends[left], bends[left + 1]
    values = a * same[left] + b * same[left + 1]
    values += ((a**3 - a) * nearer + (b**3 - b) * farther) * span**2 / 6
    slopes = (same[left + 1] - same[left]) / span
    slopes += ((3 * b**2 - 1) * farther - (3 * a**2 - 1) * nearer) * span / 6
    slopes[knots[-1] < _GRID] = 0.0
    return values[:, 1:], slopes[:, 1:]


COSINES: Final = _make_cosines()
_ACCELERATION_FIT: Final = _make_acceleration_fit()
_SPLINE_VALUES, _SPLINE_SLOPES = _make_spline()


SHIFT_SCALE: Final = 2 * LEFT_SCALE
"""Coefficients of the shifts at 1, metres."""

PATH_SHIFT_M: Final = 2.0
"""Shift of the path at 1, metres."""

_LINE_PIECES: Final = 10
"""Straight pieces between two points of the route."""

_LINE_BEYOND_M: Final = 60.0
"""Metres that the path goes on straight after the last point."""


def decode_along_route(actions: np.ndarray, speed: float, route: np.ndarray) -> Floats:
    """Return x, y and heading of each waypoint in the car's frame: float64 [8, 3].

    Args:
        actions: [8, 3] in [-1, 1].
        speed: present speed in m/s. It never falls below 0: a plan does not reverse.
        route: [N, 2], points of the route ahead in the car's frame.
    """
    ahead, left, turn = np.clip(np.asarray(actions, np.float64), -1.0, 1.0).T
    reached = decode_distances(ahead, speed)
    line, along = _make_route_line(route)
    headings = np.unwrap(np.arctan2(*np.gradient(line, axis=0).T[::-1]))
    x, y, heading = (np.interp(reached, along, each) for each in (*line.T, headings))
    # in proportion to the numbers, and not to a power of them as in profiles, so that sampling
    # tries a decimetre to the left or right
    shift = (SHIFT_SCALE * left) @ COSINES + PATH_SHIFT_M * interpolate_spline(turn, reached)
    return np.stack([x - shift * np.sin(heading), y + shift * np.cos(heading), heading], -1)


def encode_along_route(poses: np.ndarray, speed: float, route: np.ndarray) -> np.ndarray:
    """Return the plan that follows poses: float32 [8, 3].

    Args:
        poses: [9, 3], now and at 0.5 to 4.0 s, of any frame.
        speed: present speed in m/s.
        route: [N, 2], points of the route ahead in the car's frame.
    """
    cos, sin = np.cos(poses[0, 2]), np.sin(poses[0, 2])
    points = (poses[1:, :2] - poses[0, :2]) @ np.array([[cos, -sin], [sin, cos]])
    line, marks = _make_route_line(route)
    along, away = project_to_polyline(points, line)
    position = np.minimum(np.searchsorted(marks, along, side="right"), len(line) - 1)
    way, offset = line[position] - line[position - 1], points - line[position - 1]
    shift = np.sign(way[:, 0] * offset[:, 1] - way[:, 1] * offset[:, 0]) * away
    left, ahead = COSINES @ shift / SHIFT_SCALE, encode_distances(along, speed)
    # two of the three columns could hold a shift; all demonstrations use the same one
    plan = np.stack([ahead, left, np.zeros(NUM_WAYPOINTS)], -1)
    return np.asarray(np.clip(plan, -1.0, 1.0), np.float32)


def _make_route_line(route: np.ndarray) -> tuple[Floats, Floats]:
    """Return points of the path from the car through the route, and the metres to each of them."""
    knots = np.concatenate([np.zeros((1, 2)), np.asarray(route, np.float64)])
    # a route that ends repeats its last point
    knots = knots[np.concatenate([[True], np.hypot(*np.diff(knots, axis=0).T) > 0.1])]
    if len(knots) == 1:
        knots = np.array([[0.0, 0.0], [1.0, 0.0]])
    chords = np.diff(knots, axis=0)
    lengths = np.hypot(*chords.T)[:, None]
    directions = np.gradient(knots, axis=0)
    directions /= np.maximum(np.hypot(*directions.T)[:, None], 1e-9)
    directions[0], directions[-1] = (1.0, 0.0), chords[-1] / lengths[-1]
    # cubic Hermite pieces, whose tangents are as long as their chords
    t = np.linspace(0.0, 1.0, _LINE_PIECES, endpoint=False)[:, None, None]
    bends = (t**3 - 2 * t**2 + t) * lengths * directions[:-1] + (
        t**3 - t**2
    ) * lengths * directions[1:]
    pieces = knots[:-1] + (3 * t**2 - 2 * t**3) * chords + bends
    line = pieces.transpose(1, 0, 2).reshape(-1, 2)
    line = np.concatenate([line, knots[-1:], knots[-1:] + _LINE_BEYOND_M * directions[-1:]])
    return line, np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(line, axis=0).T))])


PlanAction = Literal["moves", "profiles", "along_route"]
"""`moves`: row k is the move from waypoint k to the next. `profiles`: row k has the k-th coefficient of
the accelerations and of the sideways shifts, and the bearing of the path at the k-th distance.
`along_route`: the same, with the shift beside the route at the k-th distance instead of a bearing."""


def check_action(action: PlanAction) -> PlanAction:
    """Return the way of planning. Raises: ValueError for another word."""
    if action not in get_args(PlanAction):
        raise ValueError(
            f"action is {action!r}, expected one of {', '.join(get_args(PlanAction))}."
        )
    return action


def decode_plan(
    rows: np.ndarray, action: PlanAction, speed: float, route: np.ndarray | None
) -> Floats:
    """Return x, y and heading of each waypoint in the car's frame: float64 [8, 3].

    Args:
        rows: [8, 3] in [-1, 1].
        speed: present speed in m/s, the first number of an observation's `state`.
        route: [10, 2], an observation's `route`, if it has one; `along_route` needs it.
    """
    if action == "moves":
        return decode_moves(rows)
    if action == "along_route":
        return decode_along_route(rows, speed, _require_route(route))
    return decode_profiles(rows, speed)


def encode_plan(
    poses: Floats, path: Floats, action: PlanAction, speed: float, route: np.ndarray | None
) -> np.ndarray:
    """Return the rows that follow poses: float32 [8, 3].

    Args:
        poses: [9, 3], now and at 0.5 to 4.0 s, of any frame.
        path: [K, 3], as `encode_profiles`'s.
        speed: present speed in m/s.
        route: as `decode_plan`'s.
    """
    if action == "moves":
        return encode_moves(poses)
    if action == "along_route":
        return encode_along_route(poses, speed, _require_route(route))
    return encode_profiles(poses, path, speed)


def _require_route(route: np.ndarray | None) -> np.ndarray:
    if route is None:
        raise ValueError(
            "action is 'along_route', but the observation has no route, expected moves or profiles."
        )
    return route
