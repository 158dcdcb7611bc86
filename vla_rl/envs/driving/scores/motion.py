"""How the car moves: NavSim's tracker over batches of proposals, pedals and wheel of one car.

An LQR tracker steers a kinematic bicycle along each proposal, so the graded motion is not the
predicted one. Formulas: navsim 0a380a9, .../pdm_planner/simulation/batch_lqr.py, batch_lqr_utils.py
and batch_kinematic_bicycle.py, over whole batches [B, ...].

`Car`, `drive_car` and `WaypointFollower` are the same bicycle in closed loop, as scalars, because one car
steps at a time.
"""

import math
from functools import cache
from typing import Final, NamedTuple

import numpy as np

from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.scene import (
    AX,
    HEADING,
    INTERVAL_S,
    NUM_STEPS,
    PACIFICA,
    STATE_SIZE,
    STEER,
    STEER_RATE,
    VX,
    YAW_ACCEL,
    YAW_RATE,
    Vehicle,
    X,
    Y,
)

HORIZON: Final = 10
"""Steps that the tracker looks ahead."""

ACCEL_PENALTY: Final = 1e-4
CURVATURE_RATE_PENALTY: Final = 1e-2
INITIAL_CURVATURE_PENALTY: Final = 1e-10
STOPPING_SPEED: Final = 0.2
MAX_STEER: Final = np.pi / 3
ACCEL_LAG_S: Final = 0.2
STEER_LAG_S: Final = 0.05


def wrap_angles(angle: Floats) -> Floats:
    """Return angles in [-pi, pi]."""
    return np.asarray(np.arctan2(np.sin(angle), np.cos(angle)))


def interpolate_waypoints(waypoints: Floats, start: Floats) -> Floats:
    """Interpolate waypoints of the ego frame linearly to 10 Hz in the scene's frame.

    Args:
        waypoints: [B, 8, 3], x, y and heading at 0.5 to 4.0 s.
        start: [3], the pose of the rear axle at 0 s.

    Returns: [B, 41, 3].
    """
    cos, sin = np.cos(start[2]), np.sin(start[2])
    poses = np.empty((len(waypoints), waypoints.shape[1] + 1, 3))
    poses[:, 0] = start
    poses[:, 1:, 0] = start[0] + cos * waypoints[..., 0] - sin * waypoints[..., 1]
    poses[:, 1:, 1] = start[1] + sin * waypoints[..., 0] + cos * waypoints[..., 1]
    poses[:, 1:, 2] = start[2] + waypoints[..., 2]
    poses[..., 2] = np.unwrap(poses[..., 2], axis=1)
    per_waypoint = NUM_STEPS // waypoints.shape[1]
    position = np.arange(NUM_STEPS + 1) / per_waypoint
    before = np.minimum(position.astype(int), waypoints.shape[1] - 1)
    share = (position - before)[None, :, None]
    result: Floats = poses[:, before] * (1 - share) + poses[:, before + 1] * share
    return result


def simulate(poses: Floats, start: Floats, vehicle: Vehicle = PACIFICA) -> Floats:
    """Track proposals from one start for 4 s.

    Args:
        poses: [B, 41, 3], x, y and heading of the rear axle at 10 Hz.
        start: [11], the state at 0 s.

    Returns: [B, 41, 11], the motion that is graded.
    """
    speeds, curvatures = fit_profiles(poses)
    states = np.zeros((len(poses), NUM_STEPS + 1, STATE_SIZE))
    states[:, 0] = start
    for step in range(NUM_STEPS):
        state, target = states[:, step], poses[:, step]
        ahead = min(step + HORIZON, NUM_STEPS - 1)
        curvature = curvatures[:, np.minimum(np.arange(step, step + HORIZON), ahead)]
        accel, steer_rate = track_proposals(state, target, speeds[:, ahead], curvature, vehicle)
        states[:, step + 1] = bicycle_step(state, accel, steer_rate, vehicle)
    return states


def track_proposals(
    state: Floats, target: Floats, speed: Floats, curvature: Floats, vehicle: Vehicle = PACIFICA
) -> tuple[Floats, Floats]:
    """Return the acceleration and steering rate that LQR commands, each [B].

    Args:
        state: [B, 11]; target: [B, 3], the proposal's pose now.
        speed: [B], the proposal's speed one horizon ahead.
        curvature: [B, 10], the proposal's curvature from now to one horizon ahead.
    """
    dt, v = INTERVAL_S, state[:, VX]
    gain = HORIZON * dt
    # one constant command over the horizon with weights 10 and 1: LQR has this closed form
    accel = -gain * 10.0 * (v - speed) / (gain * 10.0 * gain + 1.0)
    # the reference leaves LQR below 0.2 m/s: it brakes in proportion and does not steer
    stopping = (speed <= STOPPING_SPEED) & (v <= STOPPING_SPEED)
    accel = np.where(stopping, -0.5 * (v - speed), accel)

    dx, dy = state[:, X] - target[:, 0], state[:, Y] - target[:, 1]
    lateral = -dx * np.sin(target[:, 2]) + dy * np.cos(target[:, 2])
    heading = wrap_angles(state[:, HEADING] - target[:, 2])
    steps = np.arange(HORIZON)
    travelled = (v[:, None] + accel[:, None] * dt * steps) * dt
    # heading_N and lateral_N are affine in the constant steering rate u: free + forced * u
    turned = travelled * (state[:, STEER, None] / vehicle.wheel_base - curvature)
    forced_turn = travelled * (steps * dt / vehicle.wheel_base)
    free_heading, forced_heading = heading + turned.sum(-1), forced_turn.sum(-1)
    before = np.cumsum(turned, -1) - turned + heading[:, None]
    forced_before = np.cumsum(forced_turn, -1) - forced_turn
    free_lateral = lateral + (travelled * before).sum(-1)
    forced_lateral = (travelled * forced_before).sum(-1)
    free_heading = wrap_angles(free_heading)
    weight = forced_lateral**2 + 10.0 * forced_heading**2 + 1.0
    rate = -(forced_lateral * free_lateral + 10.0 * forced_heading * free_heading) / weight
    return accel, np.where(stopping, 0.0, rate)


def bicycle_step(
    state: Floats, accel: Floats, steer_rate: Floats, vehicle: Vehicle = PACIFICA
) -> Floats:
    """Advance states [B, 11] by 0.1 s: first-order lags of the commands, then one Euler step."""
    dt = INTERVAL_S
    v, heading, steer = state[:, VX], state[:, HEADING], state[:, STEER]
    real_accel = state[:, AX] + dt / (dt + ACCEL_LAG_S) * (accel - state[:, AX])
    real_rate = dt / (dt + STEER_LAG_S) * steer_rate
    after = np.zeros_like(state)
    # with the speed and heading before the step, as in the reference, whose motions these equal to
    # 1e-9
    after[:, X] = state[:, X] + v * np.cos(heading) * dt
    after[:, Y] = state[:, Y] + v * np.sin(heading) * dt
    turned = heading + v * np.tan(steer) / vehicle.wheel_base * dt
    after[:, HEADING] = (turned + np.pi) % (2 * np.pi) - np.pi
    after[:, VX] = v + real_accel * dt
    after[:, AX] = real_accel
    after[:, STEER] = np.clip(steer + real_rate * dt, -MAX_STEER, MAX_STEER)
    after[:, STEER_RATE] = real_rate
    after[:, YAW_RATE] = after[:, VX] * np.tan(after[:, STEER]) / vehicle.wheel_base
    after[:, YAW_ACCEL] = (after[:, YAW_RATE] - state[:, YAW_RATE]) / dt
    return after


def fit_profiles(poses: Floats) -> tuple[Floats, Floats]:
    """Fit speeds and curvatures to proposals by regularised least squares, each [B, 40]."""
    steps = np.diff(poses, axis=1)
    headings = poses[:, :-1, 2]
    along = np.cos(headings) * steps[..., 0] + np.sin(headings) * steps[..., 1]
    speeds: Floats = along @ _speed_fit(steps.shape[1]).T
    return speeds, _fit_curvatures(wrap_angles(steps[..., 2]), speeds)


@cache
def _speed_fit(size: int) -> Floats:
    """Return the matrix from displacements along the heading to speeds.

    The reference inverts a system for each proposal. Its normal matrix does not depend on the
    headings, since cos^2 + sin^2 = 1, so one inverse serves all.
    """
    integrate = np.tri(size) * INTERVAL_S
    integrate[:, 0] = 1.0
    # the reference's difference matrix overwrites its own upper diagonal (batch_lqr_utils.py:57),
    # so that accelerations are penalised instead of jerks, except for the last difference
    penalised = np.zeros((size - 2, size))
    rows = np.arange(size - 2)
    penalised[rows, rows + 1] = -1.0
    penalised[-1, -1] = 1.0
    displace = integrate * INTERVAL_S
    normal = displace.T @ displace + ACCEL_PENALTY * penalised.T @ penalised
    fit: Floats = integrate @ np.linalg.solve(normal, displace.T)
    return fit


def _fit_curvatures(turns: Floats, speeds: Floats) -> Floats:
    size = turns.shape[1]
    integrate = np.tri(size) * INTERVAL_S
    integrate[:, 0] = 1.0
    travelled = speeds * INTERVAL_S
    displace = travelled[..., None] * integrate
    penalty = np.full(size, CURVATURE_RATE_PENALTY)
    # the first column is the curvature itself, which is nearly free; the others are its changes
    penalty[0] = INITIAL_CURVATURE_PENALTY
    normal = displace.transpose(0, 2, 1) @ displace + np.diag(penalty)
    target = (displace * turns[..., None]).sum(1)
    result: Floats = np.linalg.solve(normal, target[..., None])[..., 0] @ integrate.T
    return result


CONTROL_S: Final = 0.05
"""Time of one control step: 20 Hz, as CARLA's leaderboard."""

MOST_ACCEL: Final = 3.0
MOST_BRAKE: Final = 6.0
WHEEL: Final = 0.6
"""Steering angle in radians of a wheel that is turned fully."""

_WHEEL_BASE: Final = PACIFICA.wheel_base


class Car(NamedTuple):
    """The car's state: pose of the rear axle, speed, acceleration, steering angle, yaw rate.

    Example:
        Car(x=0.0, y=0.0, heading=0.0, speed=8.0, accel=0.0, steer=0.02, yaw_rate=0.05)
    """

    x: float
    y: float
    heading: float
    speed: float
    accel: float
    steer: float
    yaw_rate: float


class Control(NamedTuple):
    """Pedals and wheel: throttle and brake in [0, 1], steer in [-1, 1], left positive.

    Example:
        Control(throttle=0.4, steer=-0.1, brake=0.0)  # a little to the right
    """

    throttle: float
    steer: float
    brake: float


def step_bicycle(car: Car, accel: float, steer_rate: float, dt: float) -> Car:
    """Advance the car by `dt`: first-order lags of the commands, then one Euler step."""
    real_accel = car.accel + dt / (dt + ACCEL_LAG_S) * (accel - car.accel)
    real_rate = dt / (dt + STEER_LAG_S) * steer_rate
    speed = car.speed + real_accel * dt
    steer = min(max(car.steer + real_rate * dt, -MAX_STEER), MAX_STEER)
    turned = car.heading + car.speed * math.tan(car.steer) / _WHEEL_BASE * dt
    return Car(
        x=car.x + car.speed * math.cos(car.heading) * dt,
        y=car.y + car.speed * math.sin(car.heading) * dt,
        heading=(turned + math.pi) % (2 * math.pi) - math.pi,
        speed=speed,
        accel=real_accel,
        steer=steer,
        yaw_rate=speed * math.tan(steer) / _WHEEL_BASE,
    )


def drive_car(car: Car, control: Control) -> Car:
    """Advance the car by one control step; it does not roll backwards."""
    wanted = MOST_ACCEL * control.throttle - MOST_BRAKE * control.brake - 0.03 * car.speed
    if car.speed <= 0.0:
        wanted = max(wanted, 0.0)
    rate = (WHEEL * control.steer - car.steer) / CONTROL_S
    after = step_bicycle(car, wanted, rate, CONTROL_S)
    return after if after.speed >= 0.0 else after._replace(speed=0.0, accel=0.0, yaw_rate=0.0)


class WaypointFollower:
    """Turns waypoints into pedals and wheel, by pure pursuit and a speed that they imply.

    Args:
        waypoints: 8 rows of x, y and heading every 0.5 s, in the frame of `car`.
        car: the car where they were decided.
    """

    def __init__(self, waypoints: list[list[float]], car: Car) -> None:
        self._points = [(row[0], row[1]) for row in waypoints]
        self._origin = car
        first, second = waypoints[0], waypoints[1]
        self._speed = math.hypot(second[0] - first[0], second[1] - first[1]) / 0.5
        self._cos, self._sin = math.cos(car.heading), math.sin(car.heading)

    def control(self, car: Car) -> Control:
        """Return the controls for the car's state now."""
        pull = 2.0 * (self._speed - car.speed)
        throttle = min(max(pull / MOST_ACCEL, 0.0), 1.0)
        brake = min(max(-pull / MOST_BRAKE, 0.0), 1.0)
        return Control(throttle, self._steer(car), brake)

    def _steer(self, car: Car) -> float:
        reach = max(3.0, 0.8 * car.speed)
        cos, sin = math.cos(car.heading), math.sin(car.heading)
        ahead, left = reach, 0.0
        for px, py in self._points:
            dx = self._origin.x + self._cos * px - self._sin * py - car.x
            dy = self._origin.y + self._sin * px + self._cos * py - car.y
            ahead, left = cos * dx + sin * dy, cos * dy - sin * dx
            if ahead * ahead + left * left >= reach * reach:
                break
        squared = ahead * ahead + left * left
        # a plan that waits, or lies behind, names no direction to steer to
        if ahead <= 0.5 or squared < 1.0:
            return 0.0
        angle = math.atan(2.0 * _WHEEL_BASE * left / squared)
        return min(max(angle / WHEEL, -1.0), 1.0)


def get_box_centre(car: Car) -> Floats:
    """Return the centre of the car's box and its heading: [3]."""
    ahead = PACIFICA.rear_axle_to_centre
    return np.array(
        [car.x + ahead * np.cos(car.heading), car.y + ahead * np.sin(car.heading), car.heading]
    )
