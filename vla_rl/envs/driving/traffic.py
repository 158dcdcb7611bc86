"""Other road users: cars and cyclists that follow paths by IDM, walkers that cross, cones.

IDM: Treiber et al. 2000, arXiv:cond-mat/0002177, eq. 3. All of them step at once, at 10 Hz.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from vla_rl.envs.driving.paths import Floats, curvatures, ways
from vla_rl.envs.driving.roads import Roads

STEP_S: Final = 0.1
LOOK_AHEAD: Final = 40
"""Metres of its path in which a driver watches for others."""

HEADWAY_S: Final = 1.2
GAP: Final = 2.0
ACCEL: Final = 1.8
BRAKE: Final = 3.0
HARDEST_BRAKE: Final = 6.0
WATCHED_SIDE: Final = 1.9
"""Others whose centre is nearer than this to the path ahead are in the way."""

CORNER_ACCEL: Final = 2.2
"""Lateral acceleration that drivers accept in bends."""

CAR, CYCLIST, WALKER, CONE = range(4)
SIZES: Final = np.array([(4.6, 1.9, 1.5), (1.8, 0.7, 1.7), (0.6, 0.6, 1.75), (0.4, 0.4, 0.8)])
"""Length, width and height of each kind."""


@dataclass
class Traffic:
    """State of all road users.

    The first one is the car's place: a driver in recordings, or moved from outside.

    Attributes:
        kinds: [N]; along, speeds: [N], metres along the path and metres per second.
        points, tangents, limits: [N, K, 2] and [N, K], each one's path and speed limit by metre.
        stops: [N], metres to the stop line, or infinity; phases: [N], False for the car's phase.
        wanted: [N], desired speeds.
    """

    kinds: np.ndarray
    along: Floats
    speeds: Floats
    points: Floats
    tangents: Floats
    limits: Floats
    stops: Floats
    phases: np.ndarray
    wanted: Floats
    lengths: np.ndarray

    def copy(self) -> "Traffic":
        """Return traffic that starts from this moment and shares what never changes."""
        return replace(self, along=self.along.copy(), speeds=self.speeds.copy())

    def poses(self) -> Floats:
        """Return centres and headings: [N, 3]."""
        rows = np.arange(len(self.along))
        whole = np.minimum(self.along.astype(int), self.lengths - 2)
        share = (self.along - whole)[:, None]
        place = self.points[rows, whole] * (1 - share) + self.points[rows, whole + 1] * share
        way = self.tangents[rows, whole] * (1 - share) + self.tangents[rows, whole + 1] * share
        return np.concatenate([place, np.arctan2(way[:, 1], way[:, 0])[:, None]], -1)

    def sizes(self) -> Floats:
        """Return lengths, widths and heights: [N, 3]."""
        return np.asarray(SIZES[self.kinds])

    def step(self, poses: Floats, speeds: Floats, is_red: bool, crossing_red: bool) -> None:
        """Advance all by 0.1 s.

        Args:
            poses: [N, 3], where all are now, the car included.
            speeds: [N], with the car's.
            is_red, crossing_red: the lights of the car's phase and of the other one.
        """
        accel = self._accelerations(poses, speeds, np.where(self.phases, crossing_red, is_red))
        moving = self.kinds <= CYCLIST
        after = np.where(moving, np.maximum(self.speeds + accel * STEP_S, 0.0), self.wanted)
        self.along += (self.speeds + after) / 2 * STEP_S
        self.along = np.minimum(self.along, self.lengths - 1.001)
        self.speeds = after

    def _accelerations(self, poses: Floats, speeds: Floats, red: np.ndarray) -> Floats:
        rows = np.arange(len(self.along))
        whole = self.along.astype(int)
        window = np.minimum(whole[:, None] + np.arange(1, LOOK_AHEAD), self.lengths[:, None] - 1)
        ahead = self.points[rows[:, None], window]
        away = np.abs(ahead[:, :, None, 0] - poses[None, None, :, 0])
        away = np.maximum(away, np.abs(ahead[:, :, None, 1] - poses[None, None, :, 1]))
        blocked = (away < WATCHED_SIDE) & ~np.eye(len(rows), dtype=bool)[:, None]
        first = np.where(blocked.any(1), blocked.argmax(1), 10 * LOOK_AHEAD)
        half = SIZES[self.kinds, 0] / 2
        gaps = first + 1.0 - half[:, None] - half[None] + 1.0
        leader = gaps.argmin(-1)
        gap = np.maximum(gaps[rows, leader], 0.2)
        heading = poses[leader, 2] - poses[:, 2]
        front = speeds[leader] * np.maximum(np.cos(heading), 0.0)
        to_line = self.stops - self.along - half
        waits = red & (to_line > 0.0) & (to_line < gap)
        gap, front = np.where(waits, np.maximum(to_line, 0.2), gap), np.where(waits, 0.0, front)
        v = self.speeds
        near = self.limits[rows, np.minimum(whole + 6, self.lengths - 1)]
        limit = np.minimum(np.minimum(self.wanted, self.limits[rows, whole]), near)
        wished = GAP + np.maximum(
            v * HEADWAY_S + v * (v - front) / (2 * np.sqrt(ACCEL * BRAKE)), 0.0
        )
        free = 1.0 - (v / np.maximum(limit, 0.5)) ** 4
        return np.asarray(np.maximum(ACCEL * (free - (wished / gap) ** 2), -HARDEST_BRAKE))


def drawn_traffic(roads: Roads, rng: np.random.Generator) -> Traffic:
    """Draw road users: the car first, at its start, and up to eleven others."""
    start = float(np.hypot(*(roads.route - np.zeros(2)).T).argmin())
    rows = [
        _Row(
            CAR,
            roads.route,
            start,
            rng.uniform(0.5, 1.0) * roads.speed_limit,
            roads.speed_limit,
            roads.stop,
            False,
        )
    ]
    taken = [roads.route[int(start)]]
    for path in roads.paths:
        for _ in range(int(rng.integers(0, 3))):
            place = float(rng.uniform(5, len(path.points) - 30))
            spot = path.points[int(place)]
            if min(np.hypot(*(spot - other)) for other in taken) < 11.0:
                continue
            if len(rows) >= 9:
                break
            taken.append(spot)
            kind = CYCLIST if rng.random() < 0.15 else CAR
            wanted = float(
                rng.uniform(3, 5) if kind == CYCLIST else rng.uniform(0.6, 1.1) * roads.speed_limit
            )
            rows.append(
                _Row(kind, path.points, place, 0.8 * wanted, wanted, path.stop, path.crosses)
            )
    for one, other in roads.crossings:
        if rng.random() < 0.5:
            ends = (one, other) if rng.random() < 0.5 else (other, one)
            reach = float(np.hypot(*(ends[1] - ends[0])))
            steps = np.arange(0.0, reach + 12.0)[:, None]
            walk = ends[0] + (ends[1] - ends[0]) / reach * steps
            pace = float(rng.uniform(0.9, 1.6))
            rows.append(_Row(WALKER, walk, float(rng.uniform(0, 3)), pace, pace, None, False))
    if rng.random() < 0.25:
        place = int(start) + int(rng.integers(18, 45))
        side = ways(roads.route)[place]
        spot = roads.route[place] + np.array([side[1], -side[0]]) * float(rng.uniform(1.5, 1.9))
        rows.append(
            _Row(
                CONE,
                spot + np.zeros((3, 2)) + side * np.arange(3)[:, None],
                0.0,
                0.0,
                0.0,
                None,
                False,
            )
        )
    return _stacked(rows, roads.speed_limit)


@dataclass
class _Row:
    kind: int
    path: Floats
    along: float
    speed: float
    wanted: float
    stop: float | None
    crosses: bool


def _stacked(rows: list[_Row], speed_limit: float) -> Traffic:
    longest = max(len(row.path) for row in rows)

    def padded(values: Floats) -> Floats:
        missing = longest - len(values)
        return np.concatenate([values, np.repeat(values[-1:], missing, 0)])

    corner = [
        np.minimum(
            np.sqrt(CORNER_ACCEL / np.maximum(curvatures(row.path), 1e-3)),
            max(row.wanted, speed_limit),
        )
        for row in rows
    ]
    speeds = [min(row.speed, float(corner[i][int(row.along)])) for i, row in enumerate(rows)]
    return Traffic(
        kinds=np.array([row.kind for row in rows]),
        along=np.array([row.along for row in rows], np.float64),
        speeds=np.array(speeds, np.float64),
        points=np.stack([padded(row.path) for row in rows]),
        tangents=np.stack([padded(ways(row.path)) for row in rows]),
        limits=np.stack([padded(limit) for limit in corner]),
        stops=np.array([np.inf if row.stop is None else row.stop for row in rows]),
        phases=np.array([row.crosses for row in rows], bool),
        wanted=np.array([row.wanted for row in rows], np.float64),
        lengths=np.array([len(row.path) for row in rows]),
    )
