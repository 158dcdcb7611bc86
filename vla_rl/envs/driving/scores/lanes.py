"""Sub-scores of the car's place on the map, from drivable area to progress.

Formulas: navsim 0a380a9, .../scoring/pdm_scorer.py.
"""

from typing import Final, NamedTuple

import numpy as np

from vla_rl.envs.driving.scores.geometry import Bools, Floats, directions, project_to_polyline
from vla_rl.envs.driving.scores.scene import DRIVABLE_LAYERS, LANE_LAYERS, Map, RedLights
from vla_rl.envs.driving.scores.vehicle import HEADING, Vehicle

WINDOW: Final = 11
"""Samples of the sliding window of driving direction: 1 s and both of its ends."""

FAIR_DISTANCE: Final = 2.0
WRONG_DISTANCE: Final = 6.0
LANE_DEVIATION: Final = 0.5
LANE_SAMPLES: Final = 20
NEEDED_PROGRESS: Final = 5.0


class Places(NamedTuple):
    """Places of the car over its motion, each bool [B, 41]."""

    several_lanes: Bools
    off_road: Bools
    off_route: Bools
    centre_in_intersection: Bools
    axle_in_intersection: Bools


def places_of(states: Floats, centres: Floats, corners: Floats, area: Map) -> Places:
    """Locate motions on the map, pdm_scorer.py `_calculate_ego_area`.

    Args:
        states: [B, 41, 11]; centres: [B, 41, 2]; corners: [B, 41, 4, 2].
    """
    inside = area.polygons.contain(np.concatenate([corners, centres[..., None, :]], axis=-2))
    corner_in, centre_in = inside[..., :4], inside[..., 4]
    lanes = area.mask(*LANE_LAYERS)
    in_lane = corner_in[lanes].sum(-1)
    on_route = np.array(area.on_route, bool) & lanes
    return Places(
        several_lanes=((in_lane > 0).sum(0) > 1) & np.all(in_lane != 4, axis=0),
        off_road=np.asarray(~corner_in[area.mask(*DRIVABLE_LAYERS)].any(0).all(-1)),
        off_route=~np.asarray(centre_in[on_route].any(0)),
        centre_in_intersection=np.asarray(centre_in[area.mask("intersection")].any(0)),
        axle_in_intersection=np.asarray(area.intersections.contain(states[..., :2]).any(0)),
    )


def drivable_area(places: Places) -> Floats:
    """Return 1 if all corners stay on the road, else 0: [B]; pdm_scorer.py:422-429."""
    return np.asarray(1.0 - places.off_road.any(-1))


def driving_direction(centres: Floats, places: Places, spare_intersections: bool) -> Floats:
    """Grade the longest drive against the route within 1 s: 1 below 2 m, 1/2 below 6 m, 0: [B].

    pdm_scorer.py:431-474.

    Args:
        spare_intersections: leave intersections out, as v2 does.
    """
    against = np.zeros((len(centres), centres.shape[1]))
    against[:, 1:] = np.linalg.norm(np.diff(centres, axis=1), axis=-1)
    wrong = places.off_route
    if spare_intersections:
        wrong = wrong & ~places.centre_in_intersection
    padded = np.zeros((len(centres), centres.shape[1] + WINDOW - 1))
    padded[:, WINDOW - 1 :] = np.where(wrong, against, 0.0)
    windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW, axis=1)
    most = windows.sum(-1).max(-1)
    return np.where(most < FAIR_DISTANCE, 1.0, np.where(most < WRONG_DISTANCE, 0.5, 0.0))


def traffic_lights(states: Floats, centres: Floats, lights: RedLights, vehicle: Vehicle) -> Floats:
    """Return 0 if the car touches the area of a red light, else 1: [B]; pdm_scorer.py:582-613."""
    scores = np.ones(len(states))
    if not lights.is_red.any():
        return scores
    halves = np.array([vehicle.half_length, vehicle.half_width])
    axes = directions(states[..., HEADING])
    meets = lights.polygons.meet_boxes(centres.reshape(-1, 2), axes.reshape(-1, 2), halves)
    touched = meets.reshape(len(lights.rings), *centres.shape[:2]) & lights.is_red[:, None]
    scores[touched.any((0, 2))] = 0.0
    return scores


def lane_keeping(centres: Floats, places: Places, line: Floats) -> Floats:
    """Return 0 after 2 s in a row more than 0.5 m from the centre line, else 1: [B].

    pdm_scorer.py:615-654. Samples in an intersection are left out: they neither count nor end a
    run.
    """
    _, away = project_to_polyline(centres.reshape(-1, 2), line)
    far = away.reshape(centres.shape[:2]) > LANE_DEVIATION
    run, longest = np.zeros(len(centres), int), np.zeros(len(centres), int)
    for step in range(centres.shape[1]):
        counted = ~places.centre_in_intersection[:, step]
        run = np.where(counted, np.where(far[:, step], run + 1, 0), run)
        longest = np.maximum(longest, run)
    return (longest < LANE_SAMPLES).astype(np.float64)


def progress_in_metres(centres: Floats, line: Floats) -> Floats:
    """Return how far the car came along the centre line, at least 0: [B]; pdm_scorer.py:476-490."""
    starts, _ = project_to_polyline(centres[:, 0], line)
    ends, _ = project_to_polyline(centres[:, -1], line)
    return np.maximum(ends - starts, 0.0)
