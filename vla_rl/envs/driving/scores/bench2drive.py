"""Bench2Drive's table from route records: driving score, success, efficiency, smoothness.

Formulas: Bench2Drive 7ec25d1 (release 0.0.4), leaderboard/leaderboard/utils/statistics_manager.py,
tools/merge_route_json.py, tools/efficiency_smoothness_benchmark.py. Multi-ability: `abilities`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from vla_rl.envs.driving.scores.comfort import BOUNDS, savitzky_golay
from vla_rl.envs.driving.scores.geometry import Floats, directions, left_of
from vla_rl.envs.driving.scores.vehicle import AX, AY, HEADING, YAW_RATE

RouteSet = Literal["bench2drive220", "bench2drive_0.0.4_val"]

NUM_ROUTES: Final = 220
"""The divisor of the benchmark, however many routes were driven (merge_route_json.py:36)."""

PENALTIES: Final[dict[str, float]] = {
    "collisions_pedestrian": 0.5,
    "collisions_vehicle": 0.6,
    "collisions_layout": 0.65,
    "red_light": 0.7,
    "stop_infraction": 0.8,
    "scenario_timeouts": 0.7,
    "yield_emergency_vehicle_infractions": 0.7,
}
"""Factor of each event of a kind (statistics_manager.py:21-38)."""

UNPENALISED: Final = "min_speed_infractions"
"""Events that carry no penalty and spare the success; they hold the efficiency."""

FINISHED: Final = ("Completed", "Perfect")
MOST_EFFICIENT: Final = 1000.0
"""Percentages above it are dropped as faults of the measurement."""

Rates = Callable[[slice], tuple[Floats, Floats]]
"""Yaw rate and yaw acceleration of a part of a ride."""

SEGMENT: Final = 20
SMOOTHING_WINDOW: Final = 7


@dataclass(frozen=True)
class RouteRecord:
    """The record of one route.

    Args:
        route_id: its number in the route set.
        status: the leaderboard's word, such as Completed, Perfect or Failed - Agent timed out.
        completion: percentage of the route, 0 to 100.
        infractions: number of events of each kind, without those of `min_speed_infractions`.
        outside_route: percentage of the route that was driven outside of its lanes; that of several
            events is what their factors, multiplied, take away.
        speeds: the car's speeds in percent of the traffic's, one for each min-speed event.
        save_name: the leaderboard's name of the drive, and of the folder with its ride.
        composed: the leaderboard's own `score_composed`; None: it is computed from the other fields.
    """

    route_id: str
    status: str
    completion: float
    infractions: Mapping[str, int] = field(default_factory=dict)
    outside_route: float = 0.0
    speeds: Sequence[float] = ()
    save_name: str = ""
    composed: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.completion <= 100.0:
            raise ValueError(f"completion is {self.completion}, expected 0 to 100 percent.")
        if UNPENALISED in self.infractions:
            raise ValueError(f"{UNPENALISED} is not counted; give their percentages as `speeds`.")

    @property
    def driving_score(self) -> float:
        """The leaderboard's score, or else `recomputed_score`, 0 to 100."""
        return self.recomputed_score if self.composed is None else self.composed

    @property
    def recomputed_score(self) -> float:
        """Completion times the penalties of all events, 0 to 100."""
        factor = 1.0 - self.outside_route / 100.0
        for kind, count in self.infractions.items():
            factor *= PENALTIES.get(kind, 1.0) ** count
        return self.completion * factor

    @property
    def is_success(self) -> bool:
        """Finished without an infraction of any kind (merge_route_json.py:20-28)."""
        unbroken = not any(self.infractions.values()) and self.outside_route == 0.0
        return self.status in FINISHED and unbroken

    @property
    def efficiency(self) -> float | None:
        """Mean speed in percent of the traffic's; None without an event that counts."""
        kept = [speed for speed in self.speeds if speed <= MOST_EFFICIENT]
        return float(np.mean(kept)) if kept else None


@dataclass(frozen=True)
class BenchmarkTable:
    """The benchmark's table over one route set.

    Attributes:
        route_set: the set that the routes are of; tables of different sets do not compare.
        num_routes: routes that were driven; the others count as 0.
        driving_score: mean driving score, 0 to 100.
        success_rate: share of routes without any infraction, 0 to 1.
        efficiency: mean over the routes with events; None without any.
    """

    route_set: RouteSet
    num_routes: int
    driving_score: float
    success_rate: float
    efficiency: float | None


def table_of(
    records: Sequence[RouteRecord], route_set: RouteSet, route_ids: Sequence[str] | None = None
) -> BenchmarkTable:
    """Return the table over `records`, divided by 220 whatever was driven.

    Args:
        route_ids: numbers of the routes of the set; None: not compared.

    Raises: ValueError if a route is driven twice or is not of the set.
    """
    driven = [record.route_id for record in records]
    twice = sorted({one for one in driven if driven.count(one) > 1})
    if twice:
        raise ValueError(f"routes {twice[:8]} are recorded twice, expected each route once.")
    strange = sorted(set(driven) - set(driven if route_ids is None else route_ids))
    if strange:
        raise ValueError(
            f"routes {strange[:8]} are not of {route_set}; name the set that was driven."
        )
    speeds = [record.efficiency for record in records if record.efficiency is not None]
    return BenchmarkTable(
        route_set=route_set,
        num_routes=len(records),
        driving_score=sum(record.driving_score for record in records) / NUM_ROUTES,
        success_rate=sum(record.is_success for record in records) / NUM_ROUTES,
        efficiency=float(np.mean(speeds)) if speeds else None,
    )


@dataclass(frozen=True)
class Ride:
    """The log of a ride, in CARLA's frame; the formulas take its samples to be 0.1 s apart.

    Args:
        acceleration: [T, 2] in m/s^2, along the world's axes.
        forward, right: [T, 2], unit vectors of the car.
        yaw_rate: [T], degrees per second, as CARLA gives it.
    """

    acceleration: Floats
    forward: Floats
    right: Floats
    yaw_rate: Floats


def comfort_as_published(ride: Ride) -> float:
    """Return the share of comfortable segments as the benchmark's tool computes it.

    efficiency_smoothness_benchmark.py `seg_compute_comfort_metric`. The tool compares degrees per
    second with a bound in radians per second, unwraps rates as if they were angles, and calls the
    smoothed yaw rate the yaw acceleration: nearly every turn fails. `comfort_corrected` does none
    of this.
    """
    turns = np.round(np.diff(ride.yaw_rate) / (2 * np.pi))

    def rates(part: slice) -> tuple[Floats, Floats]:
        rate = ride.yaw_rate[part].copy()
        rate[1:] -= 2 * np.pi * np.cumsum(turns[part.start : part.stop - 1])
        smooth = _filtered(rate)
        return smooth, smooth

    return _share_of_segments(ride, rates)


def comfort_corrected(ride: Ride) -> float:
    """Return the share of comfortable segments with radians, and with yaw's real derivative."""

    def rates(part: slice) -> tuple[Floats, Floats]:
        rate = np.deg2rad(ride.yaw_rate[part])
        return _filtered(rate), _filtered(rate, 1)

    return _share_of_segments(ride, rates)


@dataclass(frozen=True)
class Smoothness:
    """Mean share of comfortable segments over rides, 0 to 1.

    Attributes:
        as_published: by the benchmark's tool, over every tick (0.05 s) as if it took 0.1 s.
        corrected: in radians, with yaw's real derivative, over samples that are 0.1 s apart.
    """

    as_published: float
    corrected: float


def smoothness_of(rides: Sequence[Ride]) -> Smoothness:
    """Return the smoothness of rides that were logged at every tick of 0.05 s.

    The benchmark's agents log every tick, but its tool takes the samples to be 0.1 s apart: its
    segments last 1 s, and its jerks are half the real ones.

    Raises: ValueError without a ride, or for one of fewer than 3 samples at 10 Hz.
    """
    if not rides:
        raise ValueError("there is no ride, expected the log of at least one.")
    at_10_hz = [
        Ride(each.acceleration[::2], each.forward[::2], each.right[::2], each.yaw_rate[::2])
        for each in rides
    ]
    return Smoothness(
        as_published=float(np.mean([comfort_as_published(ride) for ride in rides])),
        corrected=float(np.mean([comfort_corrected(ride) for ride in at_10_hz])),
    )


def _share_of_segments(ride: Ride, rates: Rates) -> float:
    length = len(ride.yaw_rate)
    if length <= SEGMENT:
        return float(_is_comfortable(ride, slice(0, length), rates))
    starts = range(0, length - SEGMENT + 1, SEGMENT)
    good = [_is_comfortable(ride, slice(start, start + SEGMENT), rates) for start in starts]
    return sum(good) / len(good)


def _is_comfortable(ride: Ride, part: slice, rates: Rates) -> bool:
    accel = ride.acceleration[part]
    lon = _filtered((accel * ride.forward[part]).sum(-1))
    lat = _filtered((accel * ride.right[part]).sum(-1))
    size = _filtered(np.hypot(*accel.T))
    yaw_rate, yaw_accel = rates(part)
    b = BOUNDS
    return bool(
        ((lon > b.lon_accel[0]) & (lon < b.lon_accel[1])).all()
        and (np.abs(lat) < b.lat_accel).all()
        and (np.abs(_filtered(size, 1)) < b.jerk).all()
        and (np.abs(_filtered(lon, 1)) < b.lon_jerk).all()
        and (np.abs(yaw_accel) < b.yaw_accel).all()
        and (np.abs(yaw_rate) < b.yaw_rate).all()
    )


def _filtered(values: Floats, derivative: int = 0) -> Floats:
    delta = 0.1 if derivative else 1.0
    matrix = savitzky_golay(len(values), SMOOTHING_WINDOW, 2, derivative, delta)
    return np.asarray(values @ matrix.T)


def ride_of_motion(states: Floats) -> Ride:
    """Return a motion [T, 11] of this package as CARLA would record it."""
    forward = directions(states[:, HEADING])
    left = left_of(forward)
    accel = states[:, AX, None] * forward + states[:, AY, None] * left
    mirror = np.array([1.0, -1.0])
    return Ride(
        acceleration=accel * mirror,
        forward=forward * mirror,
        right=-left * mirror,
        yaw_rate=-np.rad2deg(states[:, YAW_RATE]),
    )
