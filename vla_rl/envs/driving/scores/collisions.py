"""Collisions that the car is to blame for, and those that are less than a second away.

Formulas: navsim 0a380a9, .../scoring/pdm_scorer.py and pdm_scorer_utils.py.
"""

from typing import Final

import numpy as np

from vla_rl.envs.driving.scores.geometry import (
    Bools,
    Floats,
    box_corners,
    boxes_meet,
    directions,
    segments_meet_boxes,
)
from vla_rl.envs.driving.scores.scene import Tracks
from vla_rl.envs.driving.scores.vehicle import HEADING, INTERVAL_S, VX, VY, Vehicle

STOPPED_SPEED: Final = 5e-2
TTC_STOPPED_SPEED: Final = 5e-3
BEHIND: Final = np.cos(np.deg2rad(150))
AHEAD: Final = np.cos(np.deg2rad(30))
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
    pairs = _meetings(centres, states[..., HEADING], tracks, np.arange(steps), vehicle)
    proposal, track, step = _first_of_each_pair(*pairs)
    state, centre = states[proposal, step], centres[proposal, step]
    poses = _track_poses(tracks, proposal, track, step)
    speed = np.hypot(state[:, VX], state[:, VY])
    cosine = _heading_cosine(poses[:, :2], state)
    corners = box_corners(centre, state[:, HEADING], vehicle.half_length, vehicle.half_width)
    front = segments_meet_boxes(
        corners[:, 0], corners[:, 3], poses[:, :2], directions(poses[:, 2]), tracks.sizes[track] / 2
    )
    stands = ~tracks.is_agent[track] | (tracks.speeds[track] <= STOPPED_SPEED)
    moving_fault = ~(cosine < BEHIND) & (front | at_risk[proposal, step])
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
        proposal, track, step = _meetings(projected, headings, tracks, times, vehicle)
        moving = speeds[proposal, step] >= TTC_STOPPED_SPEED
        column = np.full(len(step), order)
        found.append(np.stack([proposal, track, step, column], -1)[moving])
    rows = np.concatenate(found)
    proposal, track, moment = _first_of_each_pair(
        rows[:, 0], rows[:, 1], rows[:, 2] * len(LOOK_AHEAD) + rows[:, 3]
    )
    step, order_of = moment // len(LOOK_AHEAD), moment % len(LOOK_AHEAD)
    poses = _track_poses(tracks, proposal, track, step + np.array(LOOK_AHEAD)[order_of])
    cosine = _heading_cosine(poses[:, :2], states[proposal, step])
    bad = (cosine > AHEAD) | (at_risk[proposal, step] & ~(cosine < BEHIND))
    scores = np.ones(len(states))
    scores[proposal[bad]] = 0.0
    return scores


def _meetings(
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
    near = (offset**2).sum(-1) <= (reach**2)[:, None]
    near &= tracks.seen_or_all[:, times]
    proposal, track, step = np.nonzero(near)
    others = poses[np.minimum(proposal, len(poses) - 1), track, step]
    meet = boxes_meet(
        centres[proposal, step],
        directions(headings[proposal, step]),
        np.array([vehicle.half_length, vehicle.half_width]),
        others[:, :2],
        directions(others[:, 2]),
        halves[track],
    )
    return proposal[meet], track[meet], step[meet]


def _first_of_each_pair(
    proposal: np.ndarray, track: np.ndarray, moment: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.lexsort((moment, track, proposal))
    proposal, track, moment = proposal[order], track[order], moment[order]
    first = np.ones(len(order), bool)
    first[1:] = (np.diff(proposal) != 0) | (np.diff(track) != 0)
    return proposal[first], track[first], moment[first]


def _track_poses(
    tracks: Tracks, proposal: np.ndarray, track: np.ndarray, time: np.ndarray
) -> Floats:
    if tracks.poses.ndim == 4:
        return np.asarray(tracks.poses[proposal, track, time])
    return np.asarray(tracks.poses[track, time])


def _heading_cosine(points: Floats, states: Floats) -> Floats:
    """Return the cosine between the car's heading and the way from its rear axle to `points`."""
    offset = points - states[:, :2]
    distance = np.maximum(np.hypot(*offset.T), 1e-300)
    return np.asarray((directions(states[:, HEADING]) * offset).sum(-1) / distance)
