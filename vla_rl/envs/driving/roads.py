"""Random roads of six kinds: straight, curve, T, four-way, roundabout, merge.

The roads of one scene are polygons, the car's route, the paths of others and signals. Paths on the
ground, and the rings of corners around them, are float64 [K, 2] in metres.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.scene import Layer, Map


def make_line(start: tuple[float, float], end: tuple[float, float]) -> Floats:
    """Return a straight path with a point every metre or so."""
    count = max(int(np.hypot(end[0] - start[0], end[1] - start[1])) + 1, 2)
    return np.linspace(start, end, count)


def make_bend(start: Floats, start_way: Floats, end: Floats, end_way: Floats) -> Floats:
    """Return a cubic Bezier curve that leaves along `start_way` and arrives along `end_way`."""
    # control points 0.39 chords from the ends make a quarter turn nearly a circle
    reach = 0.55 * float(np.linalg.norm(end - start))
    corners = np.stack([start, start + start_way * reach / 1.4, end - end_way * reach / 1.4, end])
    t = np.linspace(0.0, 1.0, max(int(reach * 2), 8))[:, None]
    weights = np.concatenate([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], 1)
    curve: Floats = weights @ corners
    return curve


def make_arc(centre: Floats, radius: float, start: float, end: float) -> Floats:
    """Return the arc between two angles."""
    count = max(int(abs(end - start) * radius) + 1, 4)
    angles = np.linspace(start, end, count)
    return centre + radius * np.stack([np.cos(angles), np.sin(angles)], -1)


def join_paths(*parts: Floats) -> Floats:
    """Join paths that follow each other, with a point every metre."""
    return resample(np.concatenate(parts))


def resample(path: Floats) -> Floats:
    """Return the path with a point every metre from its start."""
    lengths = np.hypot(*np.diff(path, axis=0).T)
    # joined parts repeat the point that they share, and np.interp needs positions that increase
    kept = np.concatenate([[True], lengths > 1e-6])
    path = path[kept]
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(path, axis=0).T))])
    wanted = np.arange(0.0, along[-1], 1.0)
    return np.stack([np.interp(wanted, along, path[:, axis]) for axis in (0, 1)], -1)


def tangents(path: Floats) -> Floats:
    """Return the unit tangents of a path: [K, 2]."""
    steps = np.gradient(path, axis=0)
    return np.asarray(steps / np.maximum(np.linalg.norm(steps, axis=-1, keepdims=True), 1e-9))


def shift_path(path: Floats, left: float) -> Floats:
    """Return the path moved to its left by `left` metres."""
    unit = tangents(path)
    return path + left * np.stack([-unit[:, 1], unit[:, 0]], -1)


def ring_around(path: Floats, half_width: float) -> Floats:
    """Return the ring of corners around a path."""
    left, right = shift_path(path, half_width), shift_path(path, -half_width)
    turns = np.abs(np.diff(np.diff(path, axis=0), axis=0)).max(-1) > 1e-6
    # points in the middle of a straight piece add nothing but time to every comparison
    kept = np.concatenate([[True], turns & (np.arange(len(turns)) % 2 == 0), [True]])
    return np.concatenate([left[kept], right[kept][::-1]])


def compute_curvatures(path: Floats) -> Floats:
    """Return the absolute curvature at each point of a path with a point every metre."""
    unit = tangents(path)
    headings = np.unwrap(np.arctan2(unit[:, 1], unit[:, 0]))
    return np.asarray(np.abs(np.gradient(headings)))


LANE_WIDTH: Final = 3.5
COMMANDS: Final = ("left", "straight", "right", "unknown")
"""NavSim's driving commands, in the order of its one-hot vector."""


@dataclass(frozen=True)
class TrafficPath:
    """A path that other cars drive.

    Args:
        points: [K, 2], a point every metre.
        stop: metres along it to the stop line, or None.
        crosses: the path crosses the car's, so its light shows the other phase.

    Example:
        TrafficPath(make_line((-40.0, 1.75), (130.0, 1.75)), stop=52.0, crosses=True)
    """

    points: Floats
    stop: float | None = None
    crosses: bool = False


@dataclass
class Roads:
    """Roads around the car, which starts near the origin and looks along x.

    Attributes:
        rings, layers, on_route: the polygons of the map.
        route: [K, 2], a point every metre, from at least 10 m behind the car.
        stop: metres along the route to a stop line with a signal, or None.
        signal_area: the connector that is red while the signal is, or None.
        paths: paths of others; the first one is the route.
        crossings: pairs of points that walkers cross between.
        solid, dashed: lines to draw.
        command: one of COMMANDS.
        speed_limit: metres per second.

    Example:
        A straight road of 50 km/h with a signal 52 m ahead:

        Roads(command="straight", speed_limit=13.9, route=make_line((-10.0, 0.0), (130.0, 0.0)), stop=62.0)
    """

    command: str
    speed_limit: float
    route: Floats
    rings: list[Floats] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    on_route: list[bool] = field(default_factory=list)
    stop: float | None = None
    signal_area: Floats | None = None
    paths: list[TrafficPath] = field(default_factory=list)
    crossings: list[tuple[Floats, Floats]] = field(default_factory=list)
    solid: list[Floats] = field(default_factory=list)
    dashed: list[Floats] = field(default_factory=list)

    def add_polygon(self, ring: Floats, layer: Layer, on_route: bool = False) -> None:
        """Add one polygon."""
        self.rings.append(ring)
        self.layers.append(layer)
        self.on_route.append(on_route)

    def add_lane(
        self, path: Floats, on_route: bool, layer: Layer = "lane", width: float = LANE_WIDTH
    ) -> None:
        """Add a lane around a path, and the road under it."""
        ring = ring_around(path, width / 2)
        self.add_polygon(ring, layer, on_route)
        # roads of neighbouring lanes overlap, because a corner of the car on a border counts as off
        # the road
        self.add_polygon(ring_around(path, width / 2 + 0.15), "roadblock")

    def draw_edges(self, path: Floats, left_dashed: bool, right_dashed: bool) -> None:
        """Note the lines beside a lane."""
        for side, dashed in ((LANE_WIDTH / 2, left_dashed), (-LANE_WIDTH / 2, right_dashed)):
            (self.dashed if dashed else self.solid).append(shift_path(path, side))

    def as_map(self) -> Map:
        """Return the polygons as the scores read them."""
        return Map(tuple(self.rings), tuple(self.layers), tuple(self.on_route))


Rng = np.random.Generator
HALF: Final = LANE_WIDTH / 2
BEHIND: Final = -40.0
AHEAD: Final = 130.0


def straight(rng: Rng) -> Roads:
    """Draw a straight road with one or two lanes each way."""
    return _draw_single_road(
        rng, make_line((BEHIND, HALF), (AHEAD, HALF)), float(rng.uniform(9, 14))
    )


def curve(rng: Rng) -> Roads:
    """Draw a road that bends to one side after some metres."""
    start, radius = float(rng.uniform(5, 30)), float(rng.uniform(25, 70))
    side = float(rng.choice([-1.0, 1.0]))
    angle = float(rng.uniform(0.5, 1.4))
    centre = np.array([start, HALF + side * radius])
    bow = make_arc(centre, radius, -side * np.pi / 2, side * (angle - np.pi / 2))
    way = np.array([np.cos(side * angle), np.sin(side * angle)])
    rest = bow[-1] + way * np.arange(1.0, 80.0)[:, None]
    middle = join_paths(make_line((BEHIND, HALF), (start, HALF)), bow, rest)
    return _draw_single_road(rng, middle, float(rng.uniform(8, 12)))


def _draw_single_road(rng: Rng, middle: Floats, speed_limit: float) -> Roads:
    """Build a road around its middle line, with the car in the lane right of it."""
    num_lanes = int(rng.integers(1, 3))
    # joined once more after a shift: in a bend the points are no longer a metre apart
    roads = Roads("straight", speed_limit, join_paths(shift_path(middle, -HALF)))
    for number in range(num_lanes):
        path = join_paths(shift_path(middle, -HALF - number * LANE_WIDTH))
        back = join_paths(shift_path(middle, HALF + number * LANE_WIDTH)[::-1])
        for lane, ours in ((path, True), (back, False)):
            roads.add_lane(lane, ours)
            roads.draw_edges(lane, number > 0, number < num_lanes - 1)
            roads.paths.append(TrafficPath(lane))
    outer = HALF + num_lanes * LANE_WIDTH
    at = int(rng.integers(60, 90))
    roads.crossings.append((shift_path(middle, outer)[at], shift_path(middle, -outer)[at]))
    return roads


def tee(rng: Rng) -> Roads:
    """Draw a junction of three arms."""
    missing = str(rng.choice(["left", "straight", "right"]))
    return _draw_junction(rng, [turn for turn in ("left", "straight", "right") if turn != missing])


def four_way(rng: Rng) -> Roads:
    """Draw a junction of four arms."""
    return _draw_junction(rng, ["left", "straight", "right"])


_ANGLES: Final = {"left": np.pi / 2, "straight": 0.0, "right": -np.pi / 2, "back": np.pi}


def _draw_junction(rng: Rng, turns: list[str]) -> Roads:
    size, distance = float(rng.uniform(10, 13)), float(rng.uniform(14, 38))
    centre = np.array([distance + size, HALF])
    command = str(rng.choice(turns))
    arms = {
        name: np.array([np.cos(angle), np.sin(angle)])
        for name, angle in _ANGLES.items()
        if name in (*turns, "back")
    }

    def lane(name: str, incoming: bool) -> Floats:
        out = arms[name]
        way = -out if incoming else out
        right = np.array([way[1], -way[0]]) * HALF
        distant, inner = centre + out * 100.0 + right, centre + out * size + right
        return (
            make_line(tuple(distant), tuple(inner))
            if incoming
            else make_line(tuple(inner), tuple(distant))
        )

    def crossing(origin: str, goal: str) -> Floats:
        before, after = lane(origin, True), lane(goal, False)
        return make_bend(before[-1], -arms[origin], after[0], arms[goal])

    whole = join_paths(lane("back", True), crossing("back", command), lane(command, False))
    roads = Roads(command, float(rng.uniform(8, 12)), whole)
    for name in arms:
        for incoming in (True, False):
            path = lane(name, incoming)
            roads.add_lane(path, (name == "back") if incoming else (name == command))
            roads.draw_edges(path, True, False)
    # the ring goes round the centre once: one that crosses itself is refused as a polygon
    corners = [
        centre + a * size + s * np.array([-a[1], a[0]]) * LANE_WIDTH * 1.05
        for a in sorted(arms.values(), key=lambda a: np.arctan2(a[1], a[0]))
        for s in (-1, 1)
    ]
    roads.add_polygon(np.array(corners), "intersection")
    has_signal = bool(rng.random() < 0.6)
    for origin in arms:
        for goal in arms:
            if origin == goal:
                continue
            ours = (origin, goal) == ("back", command)
            path = crossing(origin, goal)
            roads.add_polygon(ring_around(path, HALF), "connector", ours)
            before = join_paths(lane(origin, True), path[:1])
            stop = float(len(before) - 1) if has_signal else None
            crosses = origin in ("left", "right")
            way = join_paths(lane(origin, True), path, lane(goal, False))
            roads.paths.insert(0 if ours else len(roads.paths), TrafficPath(way, stop, crosses))
            if ours and has_signal:
                roads.stop, roads.signal_area = stop, ring_around(path, HALF)
    ours_out = arms[command]
    side = np.array([-ours_out[1], ours_out[0]]) * (LANE_WIDTH + 1.0)
    middle = centre + ours_out * (size + 3.0)
    roads.crossings.append((middle + side, middle - side))
    return roads


def roundabout(rng: Rng) -> Roads:
    """Draw a roundabout of four arms, which is driven counter-clockwise."""
    radius, distance = float(rng.uniform(14, 18)), float(rng.uniform(12, 30))
    centre = np.array([distance + radius + 8.0, HALF])
    command = str(rng.choice(["left", "straight", "right"]))
    slip = 0.55
    goal = {"right": 1.5 * np.pi, "straight": 2 * np.pi, "left": 2.5 * np.pi}[command]

    def ring(start: float, end: float) -> Floats:
        return make_arc(centre, radius, start, end)

    def arm(angle: float, incoming: bool) -> tuple[Floats, Floats]:
        out = np.array([np.cos(angle), np.sin(angle)])
        way = -out if incoming else out
        side = np.array([way[1], -way[0]]) * HALF
        distant, inner = centre + out * 100.0 + side, centre + out * (radius + 8.0) + side
        turn = angle + (slip if incoming else -slip)
        on_ring = centre + radius * np.array([np.cos(turn), np.sin(turn)])
        tangent = np.array([-np.sin(turn), np.cos(turn)])
        if incoming:
            return make_line(tuple(distant), tuple(inner)), make_bend(inner, way, on_ring, tangent)
        return make_line(tuple(inner), tuple(distant)), make_bend(on_ring, tangent, inner, way)

    ahead, entry = arm(np.pi, True)
    away, leave = arm(goal, False)
    ours = ring(np.pi + slip, goal - slip)
    roads = Roads(command, float(rng.uniform(7, 10)), join_paths(ahead, entry, ours, leave, away))
    for angle in (np.pi, 1.5 * np.pi, 2 * np.pi, 2.5 * np.pi):
        for incoming in (True, False):
            path, join = arm(angle, incoming)
            is_ours = (incoming and angle == np.pi) or (not incoming and angle == goal)
            roads.add_lane(path, is_ours)
            roads.add_lane(join, is_ours, "connector", width=4.5)
            roads.draw_edges(path, True, False)
    for number in range(16):
        part = ring(number * np.pi / 8, (number + 1) * np.pi / 8)
        roads.add_lane(part, True, "connector", width=5.5)
    roads.paths.append(TrafficPath(roads.route))
    for angle in (1.5 * np.pi, 2 * np.pi, 2.5 * np.pi):
        path, join = arm(angle, True)
        out, leave = arm(angle + 1.5 * np.pi, False)
        part = ring(angle + slip, angle + 1.5 * np.pi - slip)
        roads.paths.append(TrafficPath(join_paths(path, join, part, leave, out)))
    return roads


def merge(rng: Rng) -> Roads:
    """Draw a ramp that joins a road of two lanes from the right."""
    start, length = float(rng.uniform(-5, 10)), float(rng.uniform(40, 60))
    main = [make_line((BEHIND - 40, y), (AHEAD + 30, y)) for y in (LANE_WIDTH, 2 * LANE_WIDTH)]
    ramp = join_paths(make_line((BEHIND, 0.0), (start + length - 30, 0.0)))
    slide = make_bend(
        ramp[-1], np.array([1.0, 0.0]), np.array([start + length, LANE_WIDTH]), np.array([1.0, 0.0])
    )
    after = make_line((start + length + 1, LANE_WIDTH), (AHEAD + 20, LANE_WIDTH))
    roads = Roads("left", float(rng.uniform(10, 14)), join_paths(ramp, slide, after))
    roads.paths.append(TrafficPath(roads.route))
    for number, path in enumerate(main):
        roads.add_lane(path, number == 0)
        roads.draw_edges(path, number == 0, number == 1)
        roads.paths.append(TrafficPath(join_paths(path)))
    parallel = make_line((BEHIND, 0.0), (start + length + 10, 0.0))
    roads.add_lane(parallel, True)
    roads.draw_edges(parallel, True, False)
    roads.add_lane(slide, True, "connector")
    return roads


LAYOUTS: Final[dict[str, Callable[[Rng], Roads]]] = {
    "straight": straight,
    "curve": curve,
    "tee": tee,
    "four_way": four_way,
    "roundabout": roundabout,
    "merge": merge,
}
