"""Comfort of graded motions: bounds on smoothed accelerations, jerks and yaw.

Formulas and bounds: navsim 0a380a9, .../scoring/pdm_comfort_metrics.py; nuPlan's metrics of the
same names.
"""

from functools import cache
from typing import Final, NamedTuple

import numpy as np

from vla_rl.envs.driving.scores.geometry import Bools, Floats
from vla_rl.envs.driving.scores.vehicle import (
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


BOUNDS: Final = Bounds()


@cache
def savitzky_golay(
    size: int, window: int, order: int, derivative: int = 0, delta: float = 1.0
) -> Floats:
    """Return the matrix [size, size] that smooths a series or takes its derivative.

    It equals `scipy.signal.savgol_filter` with its default ends, also for even windows, whose
    inner samples are read half a sample from the window's middle.
    """
    window = min(window, size)
    if order >= window:
        raise ValueError(
            f"the order is {order}, expected less than the window of {window} samples."
        )
    half, is_even = window // 2, window % 2 == 0
    matrix = np.zeros((size, size))
    for row in range(size):
        if row < half:
            first, place = 0, float(row)
        elif row >= size - half:
            first, place = size - window, float(row - (size - window))
        else:
            first, place = row - half + is_even, (window - 1) / 2.0
        powers = np.arange(order + 1)
        basis = np.arange(window)[:, None] - place
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
    accel, b = _smooth(lon, accel_window), BOUNDS
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
    yaw = (_slope(headings, 5), _slope(headings, 5, 2, 2))
    return np.stack([accel, _slope(accel, 15), *yaw], axis=-2)
