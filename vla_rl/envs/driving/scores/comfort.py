"""Comfort of motions: NavSim's bounds on smoothed accelerations, jerks and yaw; Bench2Drive's smoothness.

Formulas and bounds: navsim 0a380a9, .../scoring/pdm_comfort_metrics.py; nuPlan's metrics of the
same names; Bench2Drive 7ec25d1, tools/efficiency_smoothness_benchmark.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from vla_rl.envs.driving.scores.geometry import Bools, Floats
from vla_rl.envs.driving.scores.scene import (
    AX,
    AY,
    HEADING,
    INTERVAL_S,
    YAW_ACCEL,
    YAW_RATE,
    Vehicle,
)

DECIMALS: Final = 8
"""The reference rounds what it compares with the bounds."""


class Bounds(NamedTuple):
    """Bounds of a comfortable drive, all exclusive."""

    lon_accel: tuple[float, float] = (-4.05, 2.40)
    lat_accel: float = 4.89
    jerk: float = 8.37
    lon_jerk: float = 4.13
    yaw_accel: float = 1.93
    yaw_rate: float = 0.95


COMFORT_BOUNDS: Final = Bounds()


@cache
def savitzky_golay(
    size: int, window: int, order: int, derivative: int = 0, delta: float = 1.0
) -> Floats:
    """Return the matrix [size, size] that smooths a series or takes its derivative.

    It equals `scipy.signal.savgol_filter` with its default ends, also for even windows, whose
    inner samples are read half a sample from the window's middle.
    """
    # a matrix filters a whole batch in one product, and spares each simulator process the import of
    # scipy
    window = min(window, size)
    if order >= window:
        raise ValueError(
            f"the order is {order}, expected less than the window of {window} samples."
        )
    half, is_even = window // 2, window % 2 == 0
    matrix = np.zeros((size, size))
    for row in range(size):
        if row < half:
            first, position = 0, float(row)
        elif row >= size - half:
            first, position = size - window, float(row - (size - window))
        else:
            first, position = row - half + is_even, (window - 1) / 2.0
        powers = np.arange(order + 1)
        basis = np.arange(window)[:, None] - position
        coefficients = np.linalg.pinv(basis**powers)[derivative]
        factorial = float(np.prod(np.arange(1, derivative + 1)))
        matrix[row, first : first + window] = coefficients * factorial / delta**derivative
    return matrix


def _smooth(values: Floats, window: int = 8) -> Floats:
    return np.round(values @ savitzky_golay(values.shape[-1], window, 2).T, DECIMALS)


def _slope(values: Floats, window: int, order: int = 2, derivative: int = 1) -> Floats:
    matrix = savitzky_golay(values.shape[-1], window, order, derivative, INTERVAL_S)
    return np.round(values @ matrix.T, DECIMALS)


def _unwrap(headings: Floats) -> Floats:
    turns = np.round(np.diff(headings, axis=-1) / (2 * np.pi))
    unwrapped = headings.copy()
    unwrapped[..., 1:] -= 2 * np.pi * np.cumsum(turns, -1)
    return unwrapped


def is_comfortable(states: Floats, vehicle: Vehicle, is_v2: bool) -> Bools:
    """Return if each of six quantities stays within its bounds: [B, 6].

    Columns: longitudinal and lateral acceleration, jerk, longitudinal jerk, yaw acceleration, yaw
    rate. pdm_comfort_metrics.py `ego_is_comfortable`.

    Args:
        states: [B, T, 11] at 10 Hz.
        is_v2: accelerations of the box's centre over windows of 8 and 15 samples, instead of v1's
            of the rear axle. v1 fits one parabola to the whole motion, so next to nothing fails.
    """
    lon, lat = states[..., AX], states[..., AY]
    magnitude, whole = np.hypot(lon, lat), states.shape[1]
    if is_v2:
        # the reference adds the yaw acceleration's share to the longitudinal axis, where physics
        # has it on the lateral one (pdm_geometry_utils.py `get_acceleration_shifted`)
        rotation = states[..., YAW_RATE] ** 2 + states[..., YAW_ACCEL]
        lon = lon + vehicle.rear_axle_to_centre * rotation
    headings = _unwrap(states[..., HEADING])
    accel_window, jerk_window = (8, 15) if is_v2 else (whole, whole)
    accel, b = _smooth(lon, accel_window), COMFORT_BOUNDS
    within = [
        ((accel > b.lon_accel[0]) & (accel < b.lon_accel[1])).all(-1),
        (np.abs(_smooth(lat, accel_window)) < b.lat_accel).all(-1),
        (np.abs(_slope(_smooth(magnitude), jerk_window)) < b.jerk).all(-1),
        (np.abs(_slope(_smooth(lon), jerk_window)) < b.lon_jerk).all(-1),
        # the reference never passes its yaw window of 15 on, so the default of 5 is used
        (np.abs(_slope(headings, 5, 3, 2)) < b.yaw_accel).all(-1),
        (np.abs(_slope(headings, 5)) < b.yaw_rate).all(-1),
    ]
    return np.stack(within, -1)


EXTENDED_BOUNDS: Final = (0.7, 0.5, 0.1, 0.1)
"""Largest root mean squares between two plans: acceleration, jerk, yaw rate, yaw acceleration."""


def extended_comfort(now: Floats, before: Floats, apart_s: float) -> Floats:
    """Return 1 if the motions of two successive plans agree where they overlap, else 0: [B].

    pdm_comfort_metrics.py `ego_is_two_frame_extended_comfort`; scene_aggregator.py:49-77.

    Args:
        now, before: [B, 41, 11], the graded motions of both plans.
        apart_s: time between their starts, above 0 and below 0.55 s.
    """
    if not 0.0 < apart_s < 0.55:
        raise ValueError(f"the plans start {apart_s} s apart, expected above 0 and below 0.55 s.")
    shift = round(apart_s / INTERVAL_S)
    if shift == 0:
        raise ValueError(f"the plans start {apart_s} s apart, expected at least one 10 Hz sample.")
    one, other = _features(now[:, :-shift]), _features(before[:, shift:])
    differences = np.sqrt(((one - other) ** 2).mean(-1))
    return np.asarray((differences <= np.array(EXTENDED_BOUNDS)).all(-1), np.float64)


def _features(states: Floats) -> Floats:
    accel = _smooth(np.hypot(states[..., AX], states[..., AY]))
    headings = _unwrap(states[..., HEADING])
    # here the reference takes the second derivative with order 2, where comfort takes order 3
    yaw = (_slope(headings, 5), _slope(headings, 5, 2, 2))
    return np.stack([accel, _slope(accel, 15), *yaw], axis=-2)


Rates = Callable[[slice], tuple[Floats, Floats]]
"""Yaw rate and yaw acceleration of a part of a ride."""

SEGMENT_SAMPLES: Final = 20
SMOOTHING_WINDOW: Final = 7


@dataclass(frozen=True)
class Ride:
    """The log of a ride, in CARLA's frame; the formulas take its samples to be 0.1 s apart.

    Args:
        acceleration: [T, 2] in m/s^2, along the world's axes.
        forward, right: [T, 2], unit vectors of the car.
        yaw_rate: [T], degrees per second, as CARLA gives it.

    Example:
        Two ticks of a car that drives north and brakes:

        Ride(acceleration=np.array([[0.0, 1.2], [0.0, 1.4]]), forward=np.array([[0.0, -1.0]] * 2),
            right=np.array([[1.0, 0.0]] * 2), yaw_rate=np.array([0.0, 0.3]))
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
        smooth = _filter(rate)
        return smooth, smooth

    return _measure_segments(ride, rates)


def comfort_corrected(ride: Ride) -> float:
    """Return the share of comfortable segments with radians, and with yaw's real derivative."""

    def rates(part: slice) -> tuple[Floats, Floats]:
        rate = np.deg2rad(ride.yaw_rate[part])
        return _filter(rate), _filter(rate, 1)

    return _measure_segments(ride, rates)


@dataclass(frozen=True)
class Smoothness:
    """Mean share of comfortable segments over rides, 0 to 1.

    Attributes:
        as_published: by the benchmark's tool, over every tick (0.05 s) as if it took 0.1 s.
        corrected: in radians, with yaw's real derivative, over samples that are 0.1 s apart.

    Example:
        Smoothness(as_published=0.12, corrected=0.71)
    """

    as_published: float
    corrected: float


def compute_smoothness(rides: Sequence[Ride]) -> Smoothness:
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


def _measure_segments(ride: Ride, rates: Rates) -> float:
    length = len(ride.yaw_rate)
    if length <= SEGMENT_SAMPLES:
        return float(_is_segment_comfortable(ride, slice(0, length), rates))
    # a last part of fewer than 20 samples is left out, as in the tool
    starts = range(0, length - SEGMENT_SAMPLES + 1, SEGMENT_SAMPLES)
    good = [
        _is_segment_comfortable(ride, slice(start, start + SEGMENT_SAMPLES), rates)
        for start in starts
    ]
    return sum(good) / len(good)


def _is_segment_comfortable(ride: Ride, part: slice, rates: Rates) -> bool:
    accel = ride.acceleration[part]
    lon = _filter((accel * ride.forward[part]).sum(-1))
    lat = _filter((accel * ride.right[part]).sum(-1))
    size = _filter(np.hypot(*accel.T))
    yaw_rate, yaw_accel = rates(part)
    b = COMFORT_BOUNDS
    return bool(
        ((lon > b.lon_accel[0]) & (lon < b.lon_accel[1])).all()
        and (np.abs(lat) < b.lat_accel).all()
        and (np.abs(_filter(size, 1)) < b.jerk).all()
        and (np.abs(_filter(lon, 1)) < b.lon_jerk).all()
        and (np.abs(yaw_accel) < b.yaw_accel).all()
        and (np.abs(yaw_rate) < b.yaw_rate).all()
    )


def _filter(values: Floats, derivative: int = 0) -> Floats:
    delta = 0.1 if derivative else 1.0
    matrix = savitzky_golay(len(values), SMOOTHING_WINDOW, 2, derivative, delta)
    return np.asarray(values @ matrix.T)
