"""Boxes, polygons and polylines in the plane, over whole batches.

Touching counts as meeting, and a point on a polygon's border is outside of it, as in shapely's
`intersects` and `contains`, which the reference scorer calls.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_EPSILON: Final = float(np.finfo(np.float64).eps)


def directions(headings: Floats) -> Floats:
    """Return the unit vectors along `headings`: [..., 2]."""
    return np.stack([np.cos(headings), np.sin(headings)], axis=-1)


def turn_left(vectors: Floats) -> Floats:
    """Return `vectors` [..., 2] turned by 90 degrees counter-clockwise."""
    return np.stack([-vectors[..., 1], vectors[..., 0]], axis=-1)


def box_corners(centres: Floats, headings: Floats, half_length: float, half_width: float) -> Floats:
    """Return corners of boxes, [..., 4, 2]: front left, rear left, rear right, front right."""
    forward = directions(headings) * half_length
    left = turn_left(directions(headings)) * half_width
    signs = ((1, 1), (-1, 1), (-1, -1), (1, -1))
    return np.stack([centres + f * forward + s * left for f, s in signs], axis=-2)


def boxes_overlap(
    centres: Floats,
    axes: Floats,
    halves: Floats,
    other_centres: Floats,
    other_axes: Floats,
    other_halves: Floats,
) -> Bools:
    """Return if boxes share a point, by separating axes.

    Args:
        centres, other_centres: [M, 2].
        axes, other_axes: [M, 2], unit vectors along the boxes' lengths.
        halves, other_halves: [M, 2], half the length and half the width.
    """
    offset = other_centres - centres
    meets = np.ones(len(offset), bool)
    for axis in (axes, turn_left(axes), other_axes, turn_left(other_axes)):
        reach = _reach(axes, halves, axis) + _reach(other_axes, other_halves, axis)
        meets &= np.abs((offset * axis).sum(-1)) <= reach
    return meets


def segments_hit_boxes(
    starts: Floats, ends: Floats, centres: Floats, axes: Floats, halves: Floats
) -> Bools:
    """Return if segments share a point with boxes, by separating axes: [...]."""
    middle, half = (starts + ends) / 2 - centres, (ends - starts) / 2
    meets: Bools = np.ones(np.broadcast_shapes(middle.shape, axes.shape)[:-1], bool)
    for axis, size in ((axes, halves[..., 0]), (turn_left(axes), halves[..., 1])):
        along = np.abs((middle * axis).sum(-1))
        meets &= along <= size + np.abs((half * axis).sum(-1))
    normal = turn_left(half)
    across = np.abs((axes * normal).sum(-1)) * halves[..., 0]
    across = across + np.abs((turn_left(axes) * normal).sum(-1)) * halves[..., 1]
    return np.asarray(meets & (np.abs((middle * normal).sum(-1)) <= across))


def _reach(axes: Floats, halves: Floats, onto: Floats) -> Floats:
    along = np.abs((axes * onto).sum(-1)) * halves[..., 0]
    return np.asarray(along + np.abs((turn_left(axes) * onto).sum(-1)) * halves[..., 1])


class Polygons:
    """Simple polygons that points and boxes are compared with.

    Args:
        rings: corners of each polygon, [k, 2] with k >= 3; the last one is joined to the first.

    Raises: ValueError if a ring has too few corners, a number that is not finite, or crosses
        itself.
    """

    def __init__(self, rings: Sequence[Floats]) -> None:
        self.rings = [_check_ring(np.asarray(ring, np.float64), i) for i, ring in enumerate(rings)]
        self._lows = [ring.min(0) for ring in self.rings]
        self._highs = [ring.max(0) for ring in self.rings]

    def __len__(self) -> int:
        return len(self.rings)

    def contain(self, points: Floats) -> Bools:
        """Return which polygon strictly contains which of `points` [..., 2]: [P, ...]."""
        flat = points.reshape(-1, 2)
        x, y = np.ascontiguousarray(flat[:, 0]), np.ascontiguousarray(flat[:, 1])
        inside = np.zeros((len(self.rings), len(flat)), bool)
        for i, ring in enumerate(self.rings):
            (x0, y0), (x1, y1) = self._lows[i], self._highs[i]
            # most points lie outside of a polygon's box, and need no look at its edges
            near = np.flatnonzero((x > x0) & (x < x1) & (y > y0) & (y < y1))
            if len(near):
                inside[i, near] = _strictly_inside(ring, x[near], y[near])
        return inside.reshape(len(self.rings), *points.shape[:-1])

    def meet_boxes(self, centres: Floats, axes: Floats, halves: Floats) -> Bools:
        """Return which polygon shares a point with which box: [P, M]."""
        radius = float(np.hypot(*halves))
        meets = np.zeros((len(self.rings), len(centres)), bool)
        for i, ring in enumerate(self.rings):
            around = (centres >= self._lows[i] - radius) & (centres <= self._highs[i] + radius)
            near = np.flatnonzero(around.all(-1))
            if not len(near):
                continue
            edges = segments_hit_boxes(
                ring, np.roll(ring, -1, 0), centres[near, None], axes[near, None], halves
            )
            x, y = centres[near].T
            meets[i, near] = edges.any(-1) | _strictly_inside(ring, x, y)
        return meets


# Written out instead of asked of shapely: users of the reference met wrong zeros of the drivable
# area with an old NumPy (navsim's issues 137, 146, 178 and 201), and `shapely.vectorized` is gone
# since 2.1.
def _strictly_inside(ring: Floats, x: Floats, y: Floats) -> Bools:
    ends = np.roll(ring, -1, 0)
    odd, on_border = np.zeros(len(x), bool), np.zeros(len(x), bool)
    for (x0, y0), (x1, y1) in zip(ring, ends, strict=True):
        side = (x1 - x0) * (y - y0) - (x - x0) * (y1 - y0)
        above = (y0 > y) != (y1 > y)
        odd ^= above & ((side > 0) == (y1 > y0))
        exact = side == 0
        if exact.any():
            between = (np.minimum(x0, x1) <= x) & (x <= np.maximum(x0, x1))
            on_border |= exact & between & (np.minimum(y0, y1) <= y) & (y <= np.maximum(y0, y1))
    return np.asarray(odd & ~on_border)


def _check_ring(ring: Floats, number: int) -> Floats:
    if ring.ndim != 2 or ring.shape[-1] != 2 or not np.isfinite(ring).all():
        raise ValueError(
            f"polygon {number} has shape {ring.shape}, expected finite corners [k, 2] with k >= 3."
        )
    # shapely's rings repeat their first corner at the end
    if len(ring) > 1 and np.array_equal(ring[0], ring[-1]):
        ring = ring[:-1]
    if len(ring) < 3:
        raise ValueError(f"polygon {number} has {len(ring)} different corners, expected >= 3.")
    starts, ends = ring, np.roll(ring, -1, 0)
    first, second = np.triu_indices(len(ring), 2)
    apart = ~((first == 0) & (second == len(ring) - 1))
    first, second = first[apart], second[apart]
    if _cross(starts[first], ends[first], starts[second], ends[second]).any():
        raise ValueError(
            f"polygon {number} crosses itself; split it into simple polygons before scoring."
        )
    return ring


def _cross(a: Floats, b: Floats, c: Floats, d: Floats) -> Bools:
    """Return if the segments from a to b and from c to d cross: the ends of each lie on different
    sides of the other, by more than rounding.
    """
    return (_side(a, b, c) * _side(a, b, d) < 0) & (_side(c, d, a) * _side(c, d, b) < 0)


def _side(p: Floats, q: Floats, r: Floats) -> Floats:
    """Return 1 where r is left of the line from p to q, -1 where it is right of it, and 0 where it is
    so near that corners which are rounded to float64 do not tell.
    """
    along, across = q - p, r - p
    left, right = along[:, 0] * across[:, 1], along[:, 1] * across[:, 0]
    # a corner of size s is s * ulp / 2 off when it is rounded, and each factor is a difference of two
    size = np.maximum(np.maximum(np.abs(p), np.abs(q)), np.abs(r)).max(-1)
    reach = np.abs(along).sum(-1) + np.abs(across).sum(-1)
    noise = _EPSILON * (2.0 * size * reach + np.abs(left) + np.abs(right))
    area = left - right
    return np.asarray(np.where(np.abs(area) <= noise, 0.0, np.sign(area)))


def project_to_polyline(points: Floats, line: Floats) -> tuple[Floats, Floats]:
    """Project `points` [M, 2] onto the polyline [K, 2].

    Returns: arc lengths of the nearest points (the first one if there are several), and
        distances to them, each [M].
    """
    if not len(points):
        return np.zeros(0), np.zeros(0)
    starts, steps = line[:-1], np.diff(line, axis=0)
    # recorded lines repeat points, whose segment has no length to divide by
    squared = np.maximum((steps**2).sum(-1), 1e-300)
    lengths = np.sqrt(squared)
    before = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
    # segments too far from all points to be the nearest of any: most of a long route
    middle = points.mean(0)
    reach = np.sqrt(((points - middle) ** 2).sum(-1).max())
    share = (((middle - starts) * steps).sum(-1) / squared).clip(0.0, 1.0)
    to_middle = np.hypot(*(middle - starts - share[:, None] * steps).T)
    near = to_middle <= to_middle.min() + 2 * reach + 1e-9
    starts, steps, squared = starts[near], steps[near], squared[near]
    lengths, before = lengths[near], before[near]
    offset_x = points[:, :1] - starts[:, 0]
    offset_y = points[:, 1:] - starts[:, 1]
    along = (offset_x * (steps[:, 0] / squared) + offset_y * (steps[:, 1] / squared)).clip(0.0, 1.0)
    away_x, away_y = offset_x - along * steps[:, 0], offset_y - along * steps[:, 1]
    distances = away_x * away_x + away_y * away_y
    best = distances.argmin(-1)
    rows = np.arange(len(points))
    return (
        before[best] + along[rows, best] * lengths[best],
        np.sqrt(distances[rows, best]),
    )
