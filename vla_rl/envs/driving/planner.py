"""A planner that sees everything: the best of 15 IDM proposals along the route.

Five speeds, as shares of the limit, times three offsets from the centre line, as in NavSim's
PDM-Closed (metric_cache_processor.py:56-69 at 0a380a9), here over the recorded future.
"""

from typing import Final, NamedTuple

import numpy as np

from vla_rl.envs.driving.roads import compute_curvatures, tangents
from vla_rl.envs.driving.scores import Scene, Version, score_poses
from vla_rl.envs.driving.scores.geometry import Floats, project_to_polyline
from vla_rl.envs.driving.scores.scene import HEADING, INTERVAL_S, NUM_STEPS, PACIFICA, VX
from vla_rl.envs.driving.world import CORNER_ACCEL, World

OFFSETS: Final = (0.0, -1.0, 1.0)
BLEND_S: Final = 3.0
"""Time in which a proposal moves to its offset."""

MIN_STEP: Final = 0.3
NUM_POINTS_AHEAD: Final = 60
"""Points of the route, one every metre, that continue a path."""


class Manner(NamedTuple):
    """How a driver follows IDM.

    Attributes:
        speed_shares: five speeds, as shares of the limit.
        min_gap: metres to the one in front when standing.
        headway_s: time to the one in front.
        accel: comfortable acceleration, m/s^2.
        brake: comfortable and hardest braking, m/s^2.

    Example:
        RACING is Manner((0.5, 1.0, 1.5, 2.0, 2.5), min_gap=0.5, headway_s=0.2, accel=4.0)
    """

    speed_shares: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    min_gap: float = 1.0
    headway_s: float = 1.5
    accel: float = 1.5
    brake: float = 3.0


CAREFUL: Final = Manner()
"""NavSim's proposals."""

IMPATIENT: Final = Manner((0.7, 0.9, 1.1, 1.3, 1.5), min_gap=0.5, headway_s=0.3, accel=2.0)
"""A driver who speeds and tailgates."""

RACING: Final = Manner((0.5, 1.0, 1.5, 2.0, 2.5), min_gap=0.5, headway_s=0.2, accel=4.0)
"""A driver who accelerates hard, speeds and tailgates."""

NUM_PROPOSALS: Final = len(CAREFUL.speed_shares) * len(OFFSETS)
FULL_SPEED: Final = NUM_PROPOSALS - len(OFFSETS)
"""Number of the fastest proposal in the middle of the lane."""


def propose(world: World, manner: Manner = CAREFUL) -> Floats:
    """Return the poses of 15 proposals at 10 Hz: [15, 41, 3]."""
    route, start = world.roads.route, world.start
    share, offset = (
        part.ravel() for part in np.meshgrid(manner.speed_shares, OFFSETS, indexing="ij")
    )
    tracks = world.tracks
    heading = np.array([np.cos(start[HEADING]), np.sin(start[HEADING])])
    centre = start[:2] + PACIFICA.rear_axle_to_centre * heading
    first, _ = project_to_polyline(np.stack([centre, start[:2]]), route)
    side_now = float(_measure_sides(start[None, :2], route)[0])
    flat = tracks.poses[..., :2].reshape(-1, 2)
    along, _ = project_to_polyline(flat, route)
    along = along.reshape(tracks.poses.shape[:2])
    side = _measure_sides(flat, route).reshape(along.shape)
    way = tangents(route)[np.minimum(along.astype(int), len(route) - 1)]
    facing = np.cos(tracks.poses[..., 2] - np.arctan2(way[..., 1], way[..., 0]))
    limits = np.minimum(
        np.sqrt(CORNER_ACCEL / np.maximum(compute_curvatures(route), 1e-3)), world.roads.speed_limit
    )
    positions, s, v = [], np.full(15, first[0]), np.full(15, start[VX])
    half = PACIFICA.half_length + tracks.sizes[:, 0] / 2
    reach = PACIFICA.half_width + tracks.sizes[:, 1] / 2 + 0.3
    for step in range(NUM_STEPS + 1):
        positions.append(s.copy())
        gap, front = np.full(15, 1e3), np.zeros(15)
        if len(reach):
            ahead = along[:, step] - s[:, None]
            blocking = np.abs(side[:, step] - offset[:, None]) < reach
            gaps = np.where(blocking & (ahead > 0), np.maximum(ahead - half, 0.1), 1e3)
            nearest = gaps.argmin(-1)
            gap = gaps[np.arange(15), nearest]
            front = (tracks.speeds * np.maximum(facing[:, step], 0.0))[nearest]
        stop = world.roads.stop
        if stop is not None and world.signal.is_red(step * INTERVAL_S):
            to_line = stop - s - PACIFICA.half_length
            waits = (to_line > -1.0) & (to_line < gap)
            gap, front = np.where(waits, np.maximum(to_line, 0.1), gap), np.where(waits, 0.0, front)
        position = np.minimum(s.astype(int), len(route) - 1)
        ahead_limit = limits[np.minimum(position + 7, len(route) - 1)]
        # IDM divides by the wanted speed
        wanted = np.maximum(share * np.minimum(limits[position], ahead_limit), 0.3)
        closing = v * (v - front) / (2 * np.sqrt(manner.accel * manner.brake))
        wished = manner.min_gap + np.maximum(v * manner.headway_s + closing, 0.0)
        pull = manner.accel * (1 - (v / wanted) ** 4 - (wished / gap) ** 2)
        after = np.maximum(v + np.clip(pull, -manner.brake, manner.accel) * INTERVAL_S, 0.0)
        s, v = s + (v + after) / 2 * INTERVAL_S, after
    back = first[0] - first[1]
    return _make_poses(route, np.array(positions).T - back, side_now, offset)


def extend_path(poses: Floats, route: Floats) -> Floats:
    """Return the path of a proposal [41, 3] and its continuation beside the route: [K, 3].

    No two poses are nearer to each other than 0.3 m. The path is the same whether the proposal
    drives it fast or slowly, or waits.
    """
    kept = [poses[0]]
    for pose in poses[1:]:
        # two poses of a car that waits have no direction between them
        if np.hypot(*(pose[:2] - kept[-1][:2])) > MIN_STEP:
            kept.append(pose)
    along, _ = project_to_polyline(poses[-1:, :2], route)
    side = float(_measure_sides(poses[-1:, :2], route)[0])
    first = int(along[0]) + 2  # a point that is ahead of the last pose
    ahead, way = (
        route[first : first + NUM_POINTS_AHEAD],
        tangents(route)[first : first + NUM_POINTS_AHEAD],
    )
    left = np.stack([-way[:, 1], way[:, 0]], -1)
    heading = np.arctan2(way[:, 1], way[:, 0])[:, None]
    return np.concatenate([kept, np.concatenate([ahead + side * left, heading], -1)])


def best_proposal(world: World, version: Version) -> tuple[Floats, Scene]:
    """Return the poses [41, 3] of the proposal that scores best, and the scene it was graded in."""
    scene, poses = world.scene(), propose(world)
    totals = score_poses(scene, poses, version).total
    # progress that is measured alone is 1 for all, so equal scores are told apart by distance
    lengths = np.linalg.norm(np.diff(poses[..., :2], axis=1), axis=-1).sum(-1)
    return poses[int(np.argmax(totals + 1e-3 * lengths))], scene


def _make_poses(route: Floats, along: Floats, side_now: float, offset: Floats) -> Floats:
    """Return poses [15, 41, 3] of rear axles at `along` [15, 41] metres of the route."""
    limit = len(route) - 1.001
    along = np.clip(along, 0.0, limit)
    whole = along.astype(int)
    share = (along - whole)[..., None]
    tangent = tangents(route)
    position = route[whole] * (1 - share) + route[whole + 1] * share
    way = tangent[whole] * (1 - share) + tangent[whole + 1] * share
    way /= np.linalg.norm(way, axis=-1, keepdims=True)
    t = np.clip(np.arange(NUM_STEPS + 1) * INTERVAL_S / BLEND_S, 0.0, 1.0)
    blend = t * t * (3 - 2 * t)
    side = side_now + (offset[:, None] - side_now) * blend
    left = np.stack([-way[..., 1], way[..., 0]], -1)
    position = position + side[..., None] * left
    moved = np.gradient(side, axis=1)
    # a car that stands does not slide to its offset, so its heading stays the route's
    forward = np.maximum(np.gradient(along, axis=1), 0.05)
    heading = np.arctan2(way[..., 1], way[..., 0]) + np.where(
        forward > 0.1, np.arctan2(moved, forward), 0.0
    )
    return np.concatenate([position, np.unwrap(heading, axis=1)[..., None]], -1)


def _measure_sides(points: Floats, route: Floats) -> Floats:
    """Return the signed distances to the left of the route."""
    along, away = project_to_polyline(points, route)
    position = np.minimum(along.astype(int), len(route) - 2)
    way = tangents(route)[position]
    offset = points - route[position]
    return np.asarray(np.sign(way[:, 0] * offset[:, 1] - way[:, 1] * offset[:, 0]) * away)
