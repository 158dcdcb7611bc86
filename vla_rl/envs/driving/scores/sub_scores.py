"""Sub-scores of a motion, from collisions to progress: the car among the others, the car on the map.

Formulas: navsim 0a380a9, .../scoring/pdm_scorer.py and pdm_scorer_utils.py. Collisions count that the
car is to blame for, or that are less than a second away.
"""

from typing import Final, NamedTuple

import numpy as np

from vla_rl.envs.driving.scores.geometry import (
    Bools,
    Floats,
    box_corners,
    boxes_overlap,
    directions,
    project_to_polyline,
    segments_hit_boxes,
)
from vla_rl.envs.driving.scores.scene import (
    DRIVABLE_LAYERS,
    HEADING,
    INTERVAL_S,
    LANE_LAYERS,
    VX,
    VY,
    Map,
    RedLights,
    Tracks,
    Vehicle,
)

STOPPED_SPEED: Final = 5e-2
TTC_STOPPED_SPEED: Final = 5e-3
BEHIND_COSINE: Final = np.cos(np.deg2rad(150))
AHEAD_COSINE: Final = np.cos(np.deg2rad(30))
LOOK_AHEAD: Final = (0, 3, 6, 9)
"""Samples ahead at which time to collision compares."""


def no_at_fault_collision(
    states: Floats, centres: Floats, tracks: Tracks, at_risk: Bools, vehicle: Vehicle
) -> Floats:
    """Grade collisions: 1 none at fault, 1/2 with a thing, 0 with a road user: [B].

    pdm_scorer.py:363-420. The kind of a collision is decided where the two first touch; one that
    is not the car's fault is ignored from then on.

    Args:
        states: [B, 41, 11]; centres: [B, 41, 2], of the car's box.
        at_risk: [B, 41], the car is in several lanes or off the road.
    """
    steps = states.shape[1]
    pairs = _find_overlaps(centres, states[..., HEADING], tracks, np.arange(steps), vehicle)
    proposal, track, step = _keep_first_of_pairs(*pairs)
    state, centre = states[proposal, step], centres[proposal, step]
    poses = _get_track_poses(tracks, proposal, track, step)
    speed = np.hypot(state[:, VX], state[:, VY])
    cosine = _compute_heading_cosine(poses[:, :2], state)
    corners = box_corners(centre, state[:, HEADING], vehicle.half_length, vehicle.half_width)
    front = segments_hit_boxes(
        corners[:, 0], corners[:, 3], poses[:, :2], directions(poses[:, 2]), tracks.sizes[track] / 2
    )
    # overlapping a stopped car from the side counts too: the reference asks how fast the other is,
    # not who drove into whom
    stands = ~tracks.is_agent[track] | (tracks.speeds[track] <= STOPPED_SPEED)
    moving_fault = ~(cosine < BEHIND_COSINE) & (front | at_risk[proposal, step])
    # nobody who stands is to blame
    at_fault = (speed > STOPPED_SPEED) & (stands | moving_fault)
    scores = np.ones(len(states))
    worth = np.where(tracks.is_agent[track], 0.0, 0.5)
    np.minimum.at(scores, proposal[at_fault], worth[at_fault])
    return scores


def time_to_collision(
    states: Floats,
    centres: Floats,
    tracks: Tracks,
    at_risk: Bools,
    num_starts: int,
    vehicle: Vehicle,
) -> Floats:
    """Return 1 if no collision lies within 0.9 s at the speed and heading of any step: [B].

    pdm_scorer.py:492-580. Objects are compared at the times that the car is projected to.

    Args:
        at_risk: [B, 41], the car is in several lanes, off the road or in an intersection.
        num_starts: steps to project from: 41 in v1, 32 in v2.
    """
    speeds = np.hypot(states[:, :num_starts, VX], states[:, :num_starts, VY])
    headings = states[:, :num_starts, HEADING]
    moves = directions(headings) * speeds[..., None]
    found: list[Floats] = []
    for order, ahead in enumerate(LOOK_AHEAD):
        projected = centres[:, :num_starts] + moves * (ahead * INTERVAL_S)
        times = np.arange(num_starts) + ahead
        proposal, track, step = _find_overlaps(projected, headings, tracks, times, vehicle)
        moving = speeds[proposal, step] >= TTC_STOPPED_SPEED
        column = np.full(len(step), order)
        found.append(np.stack([proposal, track, step, column], -1)[moving])
    rows = np.concatenate(found)
    proposal, track, moment = _keep_first_of_pairs(
        rows[:, 0], rows[:, 1], rows[:, 2] * len(LOOK_AHEAD) + rows[:, 3]
    )
    step, order_of = moment // len(LOOK_AHEAD), moment % len(LOOK_AHEAD)
    poses = _get_track_poses(tracks, proposal, track, step + np.array(LOOK_AHEAD)[order_of])
    cosine = _compute_heading_cosine(poses[:, :2], states[proposal, step])
    bad = (cosine > AHEAD_COSINE) | (at_risk[proposal, step] & ~(cosine < BEHIND_COSINE))
    scores = np.ones(len(states))
    scores[proposal[bad]] = 0.0
    return scores


def _find_overlaps(
    centres: Floats, headings: Floats, tracks: Tracks, times: np.ndarray, vehicle: Vehicle
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return proposal, track and step of every box that meets another: three arrays [M].

    Args:
        centres: [B, S, 2]; headings: [B, S]; times: [S], samples of the tracks to compare with.
    """
    poses = tracks.poses if tracks.poses.ndim == 4 else tracks.poses[None]
    poses = poses[:, :, times]
    halves = tracks.sizes / 2
    reach = np.hypot(*halves.T) + np.hypot(vehicle.half_length, vehicle.half_width)
    offset = poses[..., :2] - centres[:, None]
    # most pairs are far apart: circles around the boxes first, and the boxes where circles meet
    near = (offset**2).sum(-1) <= (reach**2)[:, None]
    near &= tracks.seen_or_all[:, times]
    proposal, track, step = np.nonzero(near)
    others = poses[np.minimum(proposal, len(poses) - 1), track, step]
    meet = boxes_overlap(
        centres[proposal, step],
        directions(headings[proposal, step]),
        np.array([vehicle.half_length, vehicle.half_width]),
        others[:, :2],
        directions(others[:, 2]),
        halves[track],
    )
    return proposal[meet], track[meet], step[meet]


def _keep_first_of_pairs(
    proposal: np.ndarray, track: np.ndarray, moment: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # a track counts once, when it is first met; what the reference finds not to be the car's fault
    # it ignores from then on
    order = np.lexsort((moment, track, proposal))
    proposal, track, moment = proposal[order], track[order], moment[order]
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(proposal) != 0) | (np.diff(track) != 0)
    return proposal[first], track[first], moment[first]


def _get_track_poses(
    tracks: Tracks, proposal: np.ndarray, track: np.ndarray, time: np.ndarray
) -> Floats:
    if tracks.poses.ndim == 4:
        return np.asarray(tracks.poses[proposal, track, time])
    return np.asarray(tracks.poses[track, time])


def _compute_heading_cosine(points: Floats, states: Floats) -> Floats:
    """Return the cosine between the car's heading and the way from its rear axle to `points`."""
    offset = points - states[:, :2]
    distance = np.maximum(np.hypot(*offset.T), 1e-300)
    return np.asarray((directions(states[:, HEADING]) * offset).sum(-1) / distance)


DIRECTION_WINDOW: Final = 11
"""Samples of the sliding window of driving direction: 1 s and both of its ends."""

FAIR_DISTANCE: Final = 2.0
WRONG_DISTANCE: Final = 6.0
LANE_DEVIATION: Final = 0.5
LANE_SAMPLES: Final = 20
NEEDED_PROGRESS: Final = 5.0


class MapPositions(NamedTuple):
    """Lanes and crossings under the car over its motion, each bool [B, 41].

    Example:
        Of one motion that leaves the road at its end:

        MapPositions(off_road=np.arange(41)[None] > 37, several_lanes=..., ...)
    """

    several_lanes: Bools
    off_road: Bools
    off_route: Bools
    centre_in_intersection: Bools
    axle_in_intersection: Bools


def locate(states: Floats, centres: Floats, corners: Floats, area: Map) -> MapPositions:
    """Locate motions on the map, pdm_scorer.py `_calculate_ego_area`.

    Args:
        states: [B, 41, 11]; centres: [B, 41, 2]; corners: [B, 41, 4, 2].
    """
    inside = area.polygons.contain(np.concatenate([corners, centres[..., None, :]], axis=-2))
    corner_in, centre_in = inside[..., :4], inside[..., 4]
    lanes = area.mask(*LANE_LAYERS)
    in_lane = corner_in[lanes].sum(-1)
    on_route = np.array(area.on_route, bool) & lanes
    return MapPositions(
        # a car with all corners in one lane is in that lane, whatever other lanes overlap it there
        several_lanes=((in_lane > 0).sum(0) > 1) & np.all(in_lane != 4, axis=0),
        off_road=np.asarray(~corner_in[area.mask(*DRIVABLE_LAYERS)].any(0).all(-1)),
        off_route=~np.asarray(centre_in[on_route].any(0)),
        centre_in_intersection=np.asarray(centre_in[area.mask("intersection")].any(0)),
        axle_in_intersection=np.asarray(area.intersections.contain(states[..., :2]).any(0)),
    )


def drivable_area(positions: MapPositions) -> Floats:
    """Return 1 if all corners stay on the road, else 0: [B]; pdm_scorer.py:422-429."""
    return np.asarray(1.0 - positions.off_road.any(-1))


def driving_direction(
    centres: Floats, positions: MapPositions, spare_intersections: bool
) -> Floats:
    """Grade the longest drive against the route within 1 s: 1 below 2 m, 1/2 below 6 m, 0: [B].

    pdm_scorer.py:431-474.

    Args:
        spare_intersections: leave intersections out, as v2 does.
    """
    against = np.zeros((len(centres), centres.shape[1]))
    against[:, 1:] = np.linalg.norm(np.diff(centres, axis=1), axis=-1)
    wrong = positions.off_route
    if spare_intersections:
        wrong = wrong & ~positions.centre_in_intersection
    # zeros before the start, so that the window is as long there as later
    padded = np.zeros((len(centres), centres.shape[1] + DIRECTION_WINDOW - 1))
    padded[:, DIRECTION_WINDOW - 1 :] = np.where(wrong, against, 0.0)
    windows = np.lib.stride_tricks.sliding_window_view(padded, DIRECTION_WINDOW, axis=1)
    most = windows.sum(-1).max(-1)
    return np.where(most < FAIR_DISTANCE, 1.0, np.where(most < WRONG_DISTANCE, 0.5, 0.0))


def traffic_lights(states: Floats, centres: Floats, lights: RedLights, vehicle: Vehicle) -> Floats:
    """Return 0 if the car touches the area of a red light, else 1: [B]; pdm_scorer.py:582-613."""
    scores = np.ones(len(states))
    # most scenes have no red light
    if not lights.is_red.any():
        return scores
    halves = np.array([vehicle.half_length, vehicle.half_width])
    axes = directions(states[..., HEADING])
    meets = lights.polygons.meet_boxes(centres.reshape(-1, 2), axes.reshape(-1, 2), halves)
    touched = meets.reshape(len(lights.rings), *centres.shape[:2]) & lights.is_red[:, None]
    scores[touched.any((0, 2))] = 0.0
    return scores


def lane_keeping(centres: Floats, positions: MapPositions, line: Floats) -> Floats:
    """Return 0 after 2 s in a row more than 0.5 m from the centre line, else 1: [B].

    pdm_scorer.py:615-654. Samples in an intersection are left out: they neither count nor end a
    run.
    """
    _, away = project_to_polyline(centres.reshape(-1, 2), line)
    is_distant = away.reshape(centres.shape[:2]) > LANE_DEVIATION
    run, longest = np.zeros(len(centres), int), np.zeros(len(centres), int)
    for step in range(centres.shape[1]):
        counted = ~positions.centre_in_intersection[:, step]
        run = np.where(counted, np.where(is_distant[:, step], run + 1, 0), run)
        longest = np.maximum(longest, run)
    return (longest < LANE_SAMPLES).astype(np.float64)


def measure_progress(centres: Floats, line: Floats) -> Floats:
    """Return how far the car came along the centre line, at least 0: [B]; pdm_scorer.py:476-490."""
    starts, _ = project_to_polyline(centres[:, 0], line)
    ends, _ = project_to_polyline(centres[:, -1], line)
    return np.maximum(ends - starts, 0.0)
