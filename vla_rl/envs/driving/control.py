"""The car in closed loop: pedals and wheel, a bicycle, and a controller that follows waypoints.

Scalars, because one car steps at a time; `vla_rl.envs.driving.scores.motion` has the same bicycle over
batches.
"""

import math
from typing import Final, NamedTuple

from vla_rl.envs.driving.scores.motion import ACCEL_LAG_S, MAX_STEER, STEER_LAG_S
from vla_rl.envs.driving.scores.vehicle import PACIFICA

CONTROL_S: Final = 0.05
"""Time of one control step: 20 Hz, as CARLA's leaderboard."""

MOST_ACCEL: Final = 3.0
MOST_BRAKE: Final = 6.0
WHEEL: Final = 0.6
"""Steering angle in radians of a wheel that is turned fully."""

_BASE: Final = PACIFICA.wheel_base


class Car(NamedTuple):
    """The car's state: pose of the rear axle, speed, acceleration, steering angle, yaw rate."""

    x: float
    y: float
    heading: float
    speed: float
    accel: float
    steer: float
    yaw_rate: float


class Control(NamedTuple):
    """Pedals and wheel: throttle and brake in [0, 1], steer in [-1, 1], left positive."""

    throttle: float
    steer: float
    brake: float


def bicycle(car: Car, accel: float, steer_rate: float, dt: float) -> Car:
    """Advance the car by `dt`: first-order lags of the commands, then one Euler step."""
    real_accel = car.accel + dt / (dt + ACCEL_LAG_S) * (accel - car.accel)
    real_rate = dt / (dt + STEER_LAG_S) * steer_rate
    speed = car.speed + real_accel * dt
    steer = min(max(car.steer + real_rate * dt, -MAX_STEER), MAX_STEER)
    turned = car.heading + car.speed * math.tan(car.steer) / _BASE * dt
    return Car(
        x=car.x + car.speed * math.cos(car.heading) * dt,
        y=car.y + car.speed * math.sin(car.heading) * dt,
        heading=(turned + math.pi) % (2 * math.pi) - math.pi,
        speed=speed,
        accel=real_accel,
        steer=steer,
        yaw_rate=speed * math.tan(steer) / _BASE,
    )


def drive(car: Car, control: Control) -> Car:
    """Advance the car by one control step; it does not roll backwards."""
    wanted = MOST_ACCEL * control.throttle - MOST_BRAKE * control.brake - 0.03 * car.speed
    if car.speed <= 0.0:
        wanted = max(wanted, 0.0)
    rate = (WHEEL * control.steer - car.steer) / CONTROL_S
    after = bicycle(car, wanted, rate, CONTROL_S)
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
        if ahead <= 0.5 or squared < 1.0:
            return 0.0
        angle = math.atan(2.0 * _BASE * left / squared)
        return min(max(angle / WHEEL, -1.0), 1.0)
