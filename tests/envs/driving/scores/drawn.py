"""Scenes, rides and routes that are drawn from a number.

`golden/` holds what the benchmarks' own code computed for them.
"""

import functools

import numpy as np

from vla_rl.envs.driving.scores import Map, RedLights, Scene, Tracks
from vla_rl.envs.driving.scores.bench2drive import SCENARIO_TYPES, FirstJunction, RouteRecord
from vla_rl.envs.driving.scores.comfort import Ride
from vla_rl.envs.driving.scores.motion import interpolate_waypoints

LANE = 3.5


def rectangle(x0: float, x1: float, y0: float, y1: float) -> np.ndarray:
    return np.array([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], float)


def moved(points: np.ndarray, angle: float, shift: np.ndarray) -> np.ndarray:
    """Turn and shift positions, and headings if there are three columns."""
    cos, sin = np.cos(angle), np.sin(angle)
    result = np.array(points, float)
    result[..., 0] = cos * points[..., 0] - sin * points[..., 1] + shift[0]
    result[..., 1] = sin * points[..., 0] + cos * points[..., 1] + shift[1]
    if points.shape[-1] > 2:
        result[..., 2] = points[..., 2] + angle
    return result


def road(rng: np.random.Generator) -> tuple[list[np.ndarray], list[str], list[bool]]:
    """A three-lane road with an intersection 20 to 60 m ahead."""
    start = float(rng.uniform(20, 60))
    end = start + float(rng.uniform(10, 20))
    spans = [(-40.0, start, "lane"), (start, end, "connector"), (end, 140.0, "lane")]
    middle_is_ours = bool(rng.random() < 0.8)
    rings, layers, on_route = [], [], []
    for number, ours in ((-1, True), (0, middle_is_ours), (1, False)):
        for x0, x1, layer in spans:
            edge = (number - 0.5) * LANE
            rings.append(rectangle(x0, x1, edge, edge + LANE))
            layers.append(layer)
            on_route.append(ours)
    for x0, x1, layer in spans:
        rings.append(rectangle(x0, x1, -1.5 * LANE, 1.5 * LANE))
        layers.append("roadblock" if layer == "lane" else "intersection")
        on_route.append(False)
    rings.append(rectangle(-10.0, 10.0, -1.5 * LANE - 6, -1.5 * LANE + 0.5))
    layers.append("car_park")
    on_route.append(False)
    return rings, layers, on_route


def traffic(rng: np.random.Generator, count: int) -> Tracks:
    poses, sizes, speeds, kinds, seen = [], [], [], [], []
    times = np.arange(51) * 0.1
    for _ in range(count):
        kind = rng.choice(["car", "walker", "cone"], p=[0.6, 0.2, 0.2])
        x, y = rng.uniform(-25, 60), rng.normal(0, 3.0)
        heading = rng.choice([0.0, np.pi]) + rng.normal(0, 0.2)
        speed = 0.0 if kind == "cone" or rng.random() < 0.2 else rng.uniform(0.5, 12)
        if kind == "walker":
            heading, speed = rng.uniform(-np.pi, np.pi), rng.uniform(0.0, 2.0)
        turn = rng.normal(0, 0.05)
        headings = heading + turn * times
        steps = 0.1 * speed * np.stack([np.cos(headings), np.sin(headings)], -1)
        positions = np.array([x, y]) + np.cumsum(steps, 0) - steps
        poses.append(np.concatenate([positions, headings[:, None]], -1))
        sizes.append({"car": (4.6, 1.9), "walker": (0.7, 0.7), "cone": (0.4, 0.4)}[kind])
        speeds.append(speed)
        kinds.append(kind != "cone")
        first, last = (0, 51) if rng.random() < 0.7 else (rng.integers(0, 20), rng.integers(30, 51))
        seen.append((np.arange(51) >= first) & (np.arange(51) < last))
    return Tracks(
        np.array(poses).reshape(count, 51, 3),
        np.array(sizes, float).reshape(count, 2),
        np.array(speeds, float),
        np.array(kinds, bool),
        np.array(seen, bool).reshape(count, 51),
    )


def draw_waypoints(rng: np.random.Generator, count: int, speed: float) -> np.ndarray:
    times = np.arange(1, 9) * 0.5
    accel = rng.uniform(-3.0, 2.0, (count, 1))
    turn = rng.choice([0.0, 1.0], (count, 1)) * rng.normal(0, 0.08, (count, 1))
    stop = np.where(accel < 0, speed / np.maximum(-accel, 1e-6), np.inf)
    clipped = np.minimum(times, stop)
    distance = speed * clipped + accel * clipped**2 / 2
    heading = turn * clipped
    side = rng.choice([0.0, 1.0], (count, 1)) * rng.normal(0, 0.6, (count, 1)) * times
    x = distance * np.cos(heading / 2)
    y = distance * np.sin(heading / 2) + side
    return np.stack([x, y, heading], -1)


@functools.cache
def draw_scene(seed: int, count: int = 6) -> tuple[Scene, np.ndarray]:
    """A scene and waypoints of `count` trajectories in it, the same for every test."""
    rng = np.random.default_rng((20, seed))
    rings, layers, on_route = road(rng)
    angle, shift = float(rng.uniform(-np.pi, np.pi)), rng.uniform(-500, 500, 2)
    speed = float(rng.choice([0.0, 1.0, 1.0]) * rng.uniform(0, 13))
    waypoints = draw_waypoints(rng, count, speed)
    start = np.zeros(11)
    start[:3] = moved(np.array([0.0, rng.normal(0, 0.3), rng.normal(0, 0.03)]), angle, shift)
    start[3], start[5], start[7] = speed, rng.uniform(-1, 1), rng.normal(0, 0.02)
    start[9] = speed * np.tan(start[7]) / 3.089
    history = np.zeros((15, 11))
    past = np.arange(-15, 0) * 0.1
    roughness = rng.choice([0.2, 12.0])
    history[:, 3] = np.maximum(speed + past * start[5], 0)
    history[:, 5] = start[5] + roughness * 0.3 * np.sin(7 * past)
    history[:, 10] = rng.normal(0, 0.5)
    history[:, 0] = start[0] + past * speed * np.cos(start[2])
    history[:, 1] = start[1] + past * speed * np.sin(start[2])
    history[:, 2] = start[2] + past * start[9]
    history[:, 9] = start[9]
    line_x = np.arange(-30.0, 130.0, 2.5)
    line = moved(np.stack([line_x, 0.25 * np.sin(line_x / 15)], -1), angle, shift)
    tracks = traffic(rng, int(rng.integers(0, 9)))
    tracks = Tracks(
        moved(tracks.poses, angle, shift),
        tracks.sizes,
        tracks.speeds,
        tracks.is_agent,
        tracks.seen,
    )
    rings = [moved(ring, angle, shift) for ring in rings]
    is_red = np.zeros((1, 41), bool)
    is_red[0, int(rng.integers(0, 41)) :] = rng.random() < 0.4
    reference = draw_waypoints(np.random.default_rng((21, seed)), 1, speed)
    scene = Scene(
        start=start,
        map=Map(tuple(rings), tuple(layers), tuple(on_route)),  # type: ignore[arg-type]
        centre_line=line,
        tracks=tracks,
        red_lights=RedLights((rings[4],), is_red),
        reference=interpolate_waypoints(reference, start[:3])[0],
        history=history,
        human=draw_waypoints(np.random.default_rng((22, seed)), 1, speed)[0],
    )
    waypoints.setflags(write=False)
    return scene, waypoints


def draw_ride(seed: int) -> Ride:
    rng = np.random.default_rng((30, seed))
    length = int(rng.integers(10, 140))
    times = np.arange(length) * 0.1
    heading = np.cumsum(rng.normal(0, 0.02, length) * rng.choice([0.0, 1.0]))
    heading = heading + 0.5 * np.sin(times * rng.uniform(0, 1)) * rng.choice([0.0, 1.0])
    forward = np.stack([np.cos(heading), np.sin(heading)], -1)
    right = np.stack([-forward[:, 1], forward[:, 0]], -1)
    along = rng.choice([0.3, 2.5]) * np.sin(times * float(rng.uniform(0.2, 2)))
    across = rng.normal(0, 0.3, (length, 1))
    rate = np.rad2deg(np.gradient(heading, 0.1)) * float(rng.choice([0.02, 1.0]))
    return Ride(along[:, None] * forward + across * right, forward, right, rate)


KINDS = ("red_light", "stop_infraction", "collisions_vehicle", "scenario_timeouts")
ALL_TYPES = sorted(set().union(*SCENARIO_TYPES.values()))


def draw_routes(
    seed: int,
) -> tuple[dict[str, str], dict[str, FirstJunction], list[RouteRecord]]:
    """Types, first junctions and records of 60 routes, a fifth of which were not driven.

    The first routes have one type of each ability and were driven: the tool divides by their number.
    """
    rng = np.random.default_rng((31, seed))
    types, junctions, records = {}, {}, []
    surely = [min(of_ability) for of_ability in SCENARIO_TYPES.values()]
    for number in range(60):
        route_id = str(1700 + 3 * number)
        drawn = str(rng.choice(ALL_TYPES))
        types[route_id] = surely[number] if number < len(surely) else drawn
        num_points = int(rng.integers(40, 200))
        point = int(rng.integers(1, num_points - 10))
        junctions[route_id] = FirstJunction(point, num_points)
        # a third of the failures ends where the rule decides
        near = 100.0 * (point + 8 + int(rng.integers(-1, 2))) / num_points
        completion = min(near if rng.random() < 0.33 else round(rng.uniform(0, 100), 2), 100.0)
        infractions = {kind: int(rng.random() < 0.2) for kind in KINDS}
        done = rng.random() < 0.5
        status = str(rng.choice(["Completed", "Perfect"])) if done else "Failed - Agent timed out"
        was_driven = number < len(surely) or rng.random() < 0.8
        if was_driven:
            at = 100.0 if done else completion
            records.append(RouteRecord(route_id, status, at, infractions))
    return types, junctions, records
