"""Six kinds of random roads: straight, curve, T, four-way, roundabout, merge."""

from collections.abc import Callable
from typing import Final

import numpy as np

from vla_rl.envs.driving.paths import Floats, arc, bend, joined, line, shifted, strip
from vla_rl.envs.driving.roads import LANE_WIDTH, Roads, TrafficPath

Rng = np.random.Generator
HALF: Final = LANE_WIDTH / 2
BEHIND: Final = -40.0
AHEAD: Final = 130.0


def straight(rng: Rng) -> Roads:
    """Draw a straight road with one or two lanes each way."""
    return _single_road(rng, line((BEHIND, HALF), (AHEAD, HALF)), float(rng.uniform(9, 14)))


def curve(rng: Rng) -> Roads:
    """Draw a road that bends to one side after some metres."""
    start, radius = float(rng.uniform(5, 30)), float(rng.uniform(25, 70))
    side = float(rng.choice([-1.0, 1.0]))
    angle = float(rng.uniform(0.5, 1.4))
    centre = np.array([start, HALF + side * radius])
    bow = arc(centre, radius, -side * np.pi / 2, side * (angle - np.pi / 2))
    way = np.array([np.cos(side * angle), np.sin(side * angle)])
    rest = bow[-1] + way * np.arange(1.0, 80.0)[:, None]
    middle = joined(line((BEHIND, HALF), (start, HALF)), bow, rest)
    return _single_road(rng, middle, float(rng.uniform(8, 12)))


def _single_road(rng: Rng, middle: Floats, speed_limit: float) -> Roads:
    """Build a road around its middle line, with the car in the lane right of it."""
    num_lanes = int(rng.integers(1, 3))
    roads = Roads("straight", speed_limit, joined(shifted(middle, -HALF)))
    for number in range(num_lanes):
        path = joined(shifted(middle, -HALF - number * LANE_WIDTH))
        back = joined(shifted(middle, HALF + number * LANE_WIDTH)[::-1])
        for lane, ours in ((path, True), (back, False)):
            roads.add_lane(lane, ours)
            roads.draw_edges(lane, number > 0, number < num_lanes - 1)
            roads.paths.append(TrafficPath(lane))
    outer = HALF + num_lanes * LANE_WIDTH
    at = int(rng.integers(60, 90))
    roads.crossings.append((shifted(middle, outer)[at], shifted(middle, -outer)[at]))
    return roads


def tee(rng: Rng) -> Roads:
    """Draw a junction of three arms."""
    missing = str(rng.choice(["left", "straight", "right"]))
    return _junction(rng, [turn for turn in ("left", "straight", "right") if turn != missing])


def four_way(rng: Rng) -> Roads:
    """Draw a junction of four arms."""
    return _junction(rng, ["left", "straight", "right"])


_ANGLES: Final = {"left": np.pi / 2, "straight": 0.0, "right": -np.pi / 2, "back": np.pi}


def _junction(rng: Rng, turns: list[str]) -> Roads:
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
        far, near = centre + out * 100.0 + right, centre + out * size + right
        return line(tuple(far), tuple(near)) if incoming else line(tuple(near), tuple(far))

    def crossing(origin: str, goal: str) -> Floats:
        before, after = lane(origin, True), lane(goal, False)
        return bend(before[-1], -arms[origin], after[0], arms[goal])

    whole = joined(lane("back", True), crossing("back", command), lane(command, False))
    roads = Roads(command, float(rng.uniform(8, 12)), whole)
    for name in arms:
        for incoming in (True, False):
            path = lane(name, incoming)
            roads.add_lane(path, (name == "back") if incoming else (name == command))
            roads.draw_edges(path, True, False)
    corners = [
        centre + a * size + s * np.array([-a[1], a[0]]) * LANE_WIDTH * 1.05
        for a in sorted(arms.values(), key=lambda a: np.arctan2(a[1], a[0]))
        for s in (-1, 1)
    ]
    roads.add(np.array(corners), "intersection")
    has_signal = bool(rng.random() < 0.6)
    for origin in arms:
        for goal in arms:
            if origin == goal:
                continue
            ours = (origin, goal) == ("back", command)
            path = crossing(origin, goal)
            roads.add(strip(path, HALF), "connector", ours)
            before = joined(lane(origin, True), path[:1])
            stop = float(len(before) - 1) if has_signal else None
            crosses = origin in ("left", "right")
            way = joined(lane(origin, True), path, lane(goal, False))
            roads.paths.insert(0 if ours else len(roads.paths), TrafficPath(way, stop, crosses))
            if ours and has_signal:
                roads.stop, roads.signal_area = stop, strip(path, HALF)
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
        return arc(centre, radius, start, end)

    def arm(angle: float, incoming: bool) -> tuple[Floats, Floats]:
        out = np.array([np.cos(angle), np.sin(angle)])
        way = -out if incoming else out
        side = np.array([way[1], -way[0]]) * HALF
        far, near = centre + out * 100.0 + side, centre + out * (radius + 8.0) + side
        turn = angle + (slip if incoming else -slip)
        on_ring = centre + radius * np.array([np.cos(turn), np.sin(turn)])
        tangent = np.array([-np.sin(turn), np.cos(turn)])
        if incoming:
            return line(tuple(far), tuple(near)), bend(near, way, on_ring, tangent)
        return line(tuple(near), tuple(far)), bend(on_ring, tangent, near, way)

    ahead, entry = arm(np.pi, True)
    away, leave = arm(goal, False)
    ours = ring(np.pi + slip, goal - slip)
    roads = Roads(command, float(rng.uniform(7, 10)), joined(ahead, entry, ours, leave, away))
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
        roads.paths.append(TrafficPath(joined(path, join, part, leave, out)))
    return roads


def merge(rng: Rng) -> Roads:
    """Draw a ramp that joins a road of two lanes from the right."""
    start, length = float(rng.uniform(-5, 10)), float(rng.uniform(40, 60))
    main = [line((BEHIND - 40, y), (AHEAD + 30, y)) for y in (LANE_WIDTH, 2 * LANE_WIDTH)]
    ramp = joined(line((BEHIND, 0.0), (start + length - 30, 0.0)))
    slide = bend(
        ramp[-1], np.array([1.0, 0.0]), np.array([start + length, LANE_WIDTH]), np.array([1.0, 0.0])
    )
    after = line((start + length + 1, LANE_WIDTH), (AHEAD + 20, LANE_WIDTH))
    roads = Roads("left", float(rng.uniform(10, 14)), joined(ramp, slide, after))
    roads.paths.append(TrafficPath(roads.route))
    for number, path in enumerate(main):
        roads.add_lane(path, number == 0)
        roads.draw_edges(path, number == 0, number == 1)
        roads.paths.append(TrafficPath(joined(path)))
    beside = line((BEHIND, 0.0), (start + length + 10, 0.0))
    roads.add_lane(beside, True)
    roads.draw_edges(beside, True, False)
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
