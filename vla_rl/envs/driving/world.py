"""A driving scene from an integer: roads, the others on them, signals, what was recorded.

Training and held-out scenes are drawn from different keys, so that no number of either gives a
scene of the other. Cars and cyclists follow paths by IDM (Treiber et al. 2000,
arXiv:cond-mat/0002177, eq. 3), walkers cross, cones stand. All of them step at once, at 10 Hz.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal, get_args

import numpy as np

from vla_rl.envs.driving.roads import LAYOUTS, Roads, compute_curvatures, tangents
from vla_rl.envs.driving.scores import PACIFICA, Map, RedLights, Scene, Tracks
from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.scene import AX, NUM_STEPS, STATE_SIZE, STEER, VX, YAW_RATE
from vla_rl.envs.image_env import is_whole

TRAFFIC_STEP_S: Final = 0.1
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

    The first one is the car's position: a driver in recordings, or moved from outside.

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
        position = self.points[rows, whole] * (1 - share) + self.points[rows, whole + 1] * share
        way = self.tangents[rows, whole] * (1 - share) + self.tangents[rows, whole + 1] * share
        return np.concatenate([position, np.arctan2(way[:, 1], way[:, 0])[:, None]], -1)

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
        after = np.where(moving, np.maximum(self.speeds + accel * TRAFFIC_STEP_S, 0.0), self.wanted)
        self.along += (self.speeds + after) / 2 * TRAFFIC_STEP_S
        self.along = np.minimum(self.along, self.lengths - 1.001)
        self.speeds = after

    def _accelerations(self, poses: Floats, speeds: Floats, red: np.ndarray) -> Floats:
        rows = np.arange(len(self.along))
        whole = self.along.astype(int)
        window = np.minimum(whole[:, None] + np.arange(1, LOOK_AHEAD), self.lengths[:, None] - 1)
        ahead = self.points[rows[:, None], window]
        # all pairs at once: twelve road users took 29,000 steps a second in a prototype, which no
        # loop over them in Python reaches
        away = np.abs(ahead[:, :, None, 0] - poses[None, None, :, 0])
        away = np.maximum(away, np.abs(ahead[:, :, None, 1] - poses[None, None, :, 1]))
        blocked = (away < WATCHED_SIDE) & ~np.eye(len(rows), dtype=bool)[:, None]
        first = np.where(blocked.any(1), blocked.argmax(1), 10 * LOOK_AHEAD)
        half = SIZES[self.kinds, 0] / 2
        gaps = first + 1.0 - half[:, None] - half[None] + 1.0
        leader = gaps.argmin(-1)
        # IDM divides by the gap, and boxes that touch have none
        gap = np.maximum(gaps[rows, leader], 0.2)
        heading = poses[leader, 2] - poses[:, 2]
        # who comes towards the driver, or crosses, is an obstacle that stands, whatever its speed
        front = speeds[leader] * np.maximum(np.cos(heading), 0.0)
        to_line = self.stops - self.along - half
        waits = red & (to_line > 0.0) & (to_line < gap)
        gap, front = np.where(waits, np.maximum(to_line, 0.2), gap), np.where(waits, 0.0, front)
        v = self.speeds
        # a driver brakes before the bend, not in it
        near = self.limits[rows, np.minimum(whole + 6, self.lengths - 1)]
        limit = np.minimum(np.minimum(self.wanted, self.limits[rows, whole]), near)
        wished = GAP + np.maximum(
            v * HEADWAY_S + v * (v - front) / (2 * np.sqrt(ACCEL * BRAKE)), 0.0
        )
        free = 1.0 - (v / np.maximum(limit, 0.5)) ** 4
        return np.asarray(np.maximum(ACCEL * (free - (wished / gap) ** 2), -HARDEST_BRAKE))


def draw_traffic(roads: Roads, rng: np.random.Generator) -> Traffic:
    """Draw road users: the car first, at its start, and up to eleven others."""
    start = float(np.hypot(*(roads.route - np.zeros(2)).T).argmin())
    limit = roads.speed_limit
    speed = rng.uniform(0.5, 1.0) * limit
    rows = [_RoadUser(CAR, roads.route, start, speed, limit, roads.stop, False)]
    taken = [roads.route[int(start)]]
    for path in roads.paths:
        for _ in range(int(rng.integers(0, 3))):
            position = float(rng.uniform(5, len(path.points) - 30))
            spot = path.points[int(position)]
            # nearer than this, two cars at speed would begin the scene with a hard brake
            if min(np.hypot(*(spot - other)) for other in taken) < 11.0:
                continue
            if len(rows) >= 9:
                break
            taken.append(spot)
            kind = CYCLIST if rng.random() < 0.15 else CAR
            wanted = float(rng.uniform(3, 5) if kind == CYCLIST else rng.uniform(0.6, 1.1) * limit)
            rows.append(
                _RoadUser(
                    kind, path.points, position, 0.8 * wanted, wanted, path.stop, path.crosses
                )
            )
    for one, other in roads.crossings:
        if rng.random() < 0.5:
            ends = (one, other) if rng.random() < 0.5 else (other, one)
            reach = float(np.hypot(*(ends[1] - ends[0])))
            steps = np.arange(0.0, reach + 12.0)[:, None]
            walk = ends[0] + (ends[1] - ends[0]) / reach * steps
            pace = float(rng.uniform(0.9, 1.6))
            rows.append(_RoadUser(WALKER, walk, float(rng.uniform(0, 3)), pace, pace, None, False))
    if rng.random() < 0.25:
        position = int(start) + int(rng.integers(18, 45))
        side = tangents(roads.route)[position]
        spot = roads.route[position] + np.array([side[1], -side[0]]) * float(rng.uniform(1.5, 1.9))
        cones = spot + np.zeros((3, 2)) + side * np.arange(3)[:, None]
        rows.append(_RoadUser(CONE, cones, 0.0, 0.0, 0.0, None, False))
    return _stack_users(rows, limit)


@dataclass
class _RoadUser:
    kind: int
    path: Floats
    along: float
    speed: float
    wanted: float
    stop: float | None
    crosses: bool


def _stack_users(rows: list[_RoadUser], speed_limit: float) -> Traffic:
    longest = max(len(row.path) for row in rows)

    def padded(values: Floats) -> Floats:
        missing = longest - len(values)
        return np.concatenate([values, np.repeat(values[-1:], missing, 0)])

    corner = [
        np.minimum(
            np.sqrt(CORNER_ACCEL / np.maximum(compute_curvatures(row.path), 1e-3)),
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
        tangents=np.stack([padded(tangents(row.path)) for row in rows]),
        limits=np.stack([padded(limit) for limit in corner]),
        stops=np.array([np.inf if row.stop is None else row.stop for row in rows]),
        phases=np.array([row.crosses for row in rows], bool),
        wanted=np.array([row.wanted for row in rows], np.float64),
        lengths=np.array([len(row.path) for row in rows]),
    )


Split = Literal["train", "held_out"]

NUM_SCENES: Final = 1 << 31
"""Scenes of each split."""

NUM_PAST_STEPS: Final = 15
"""Recorded steps before the scene starts: 1.5 s."""

# time to collision looks 0.9 s beyond the 4 s that are graded
NUM_FUTURE_STEPS: Final = NUM_STEPS + 10
_SPLIT_KEYS: Final = {"train": 71, "held_out": 72}


@dataclass(frozen=True)
class Signal:
    """A signal of the car's approach: red or green at first, the other one from `turns_at_s` on.

    Example:
        Signal(is_red_first=True, turns_at_s=3.2), green from 3.2 s on
    """

    is_red_first: bool
    turns_at_s: float

    def is_red(self, time_s: float) -> bool:
        """Return if the car's light is red."""
        return self.is_red_first == (time_s < self.turns_at_s)


@dataclass
class World:
    """Roads and their users at one moment.

    Attributes:
        kind: name of the layout.
        light: brightness of the images.
        start: [11], the car's state at 0 s, as the scores lay it out.
        recording: [66, N, 3], poses of all at 10 Hz from -1.5 s to 5.0 s, the car driven by IDM.
        speeds: [66, N], of the same.

    Example:
        World(kind="four_way", light=0.9, roads=Roads(command="left", ...), traffic=..., speeds=...)
    """

    kind: str
    light: float
    roads: Roads
    traffic: Traffic
    signal: Signal
    start: Floats
    recording: Floats
    speeds: Floats

    @cached_property
    def map(self) -> Map:
        """The polygons, as the scores read them."""
        return self.roads.as_map()

    @cached_property
    def tracks(self) -> Tracks:
        """The recorded future of all others."""
        poses = self.recording[NUM_PAST_STEPS:, 1:].transpose(1, 0, 2)
        return Tracks(
            poses=np.ascontiguousarray(poses),
            sizes=self.traffic.sizes()[1:, :2],
            speeds=self.speeds[NUM_PAST_STEPS, 1:],
            is_agent=self.traffic.kinds[1:] != CONE,
        )

    @cached_property
    def red_lights(self) -> RedLights:
        """The connector of the route while its light is red."""
        if self.roads.signal_area is None:
            return RedLights()
        red = [self.signal.is_red(step * TRAFFIC_STEP_S) for step in range(NUM_STEPS + 1)]
        return RedLights((self.roads.signal_area,), np.array([red]))

    def scene(self, reference: Floats | None = None) -> Scene:
        """Return the scene as the scores read it, without or with the reference's poses."""
        states = make_states(self.recording[:, 0], self.speeds[:, 0])
        relative = _to_frame(
            states[NUM_PAST_STEPS, :3], states[NUM_PAST_STEPS + 5 : NUM_PAST_STEPS + 41 : 5, :3]
        )
        return Scene(
            start=self.start,
            map=self.map,
            centre_line=self.roads.route,
            tracks=self.tracks,
            red_lights=self.red_lights,
            reference=reference,
            history=states[:NUM_PAST_STEPS],
            human=relative,
        )


def draw_world(number: int, split: Split = "train", kind: str | None = None) -> World:
    """Draw scene `number` of a split.

    Args:
        number: 0 to 2**31 - 1.
        kind: name of a layout; None: drawn.

    Raises: ValueError for another number, split or kind.
    """
    if not 0 <= number < NUM_SCENES:
        raise ValueError(f"the scene is {number}, expected 0 to {NUM_SCENES - 1}.")
    if split not in get_args(Split):
        raise ValueError(f"the split is {split!r}, expected {' or '.join(get_args(Split))}.")
    if kind is not None and kind not in LAYOUTS:
        raise ValueError(f"the kind is {kind!r}, expected one of {', '.join(LAYOUTS)}.")
    rng = np.random.default_rng((_SPLIT_KEYS[split], number))
    # drawn also where a kind is named, so that naming the kind that a scene has anyway changes
    # nothing
    drawn = str(rng.choice(list(LAYOUTS)))
    roads = LAYOUTS[kind or drawn](rng)
    traffic = draw_traffic(roads, rng)
    signal = Signal(bool(rng.random() < 0.6), float(rng.uniform(0.5, 9.0)))
    light = float(rng.uniform(0.6, 1.1))
    poses, speeds = [], []
    for step in range(-NUM_PAST_STEPS, NUM_FUTURE_STEPS + 1):
        if step == 0:
            now = traffic.copy()
        poses.append(traffic.poses())
        speeds.append(traffic.speeds.copy())
        has_signal, red = roads.stop is not None, signal.is_red(step * TRAFFIC_STEP_S)
        traffic.step(poses[-1], speeds[-1], has_signal and red, has_signal and not red)
    now.speeds = speeds[NUM_PAST_STEPS].copy()
    recording, all_speeds = np.array(poses), np.array(speeds)
    start = make_states(recording[:, 0], all_speeds[:, 0])[NUM_PAST_STEPS]
    return World(kind or drawn, light, roads, now, signal, start, recording, all_speeds)


def make_states(centres: Floats, speeds: Floats) -> Floats:
    """Return the states [T, 11] of a car whose box moves along `centres` [T, 3] at 10 Hz."""
    states = np.zeros((len(centres), STATE_SIZE))
    headings = np.unwrap(centres[:, 2])
    back = PACIFICA.rear_axle_to_centre * np.stack([np.cos(headings), np.sin(headings)], -1)
    states[:, :2], states[:, 2] = centres[:, :2] - back, headings
    states[:, VX] = speeds
    states[:, AX] = np.gradient(speeds, TRAFFIC_STEP_S)
    states[:, YAW_RATE] = np.gradient(headings, TRAFFIC_STEP_S)
    # a standing car has no yaw rate that tells its steering angle
    moving = np.maximum(speeds, 0.5)
    states[:, STEER] = np.arctan(PACIFICA.wheel_base * states[:, YAW_RATE] / moving)
    return states


def _to_frame(origin: Floats, poses: Floats) -> Floats:
    offset = poses - origin
    cos, sin = np.cos(origin[2]), np.sin(origin[2])
    x = cos * offset[:, 0] + sin * offset[:, 1]
    y = cos * offset[:, 1] - sin * offset[:, 0]
    return np.stack([x, y, offset[:, 2]], -1)


def choose_scene(
    options: dict[str, Any] | None, rng: np.random.Generator, num_scenes: int = NUM_SCENES
) -> int:
    """Return the scene that the options name, or draw one.

    Raises: ValueError for another option or number.
    """
    unknown = set(options or {}) - {"init_state_id"}
    if unknown:
        raise ValueError(
            f"reset options {sorted(unknown)} are unknown, expected only 'init_state_id'."
        )
    named = (options or {}).get("init_state_id")
    if named is None:
        return int(rng.integers(num_scenes))
    # A table of numbers may give 3.0; but 3.5 was scene 3, without a word.
    if isinstance(named, float) and named.is_integer():
        named = int(named)
    if not is_whole(named) or not 0 <= named < num_scenes:
        raise ValueError(f"init_state_id is {named!r}, expected 0 to {num_scenes - 1}.")
    return int(named)
