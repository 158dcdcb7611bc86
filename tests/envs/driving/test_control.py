"""The car obeys pedals and wheel, and follows waypoints by them."""

import math

import pytest

from vla_rl.envs.driving.scores.motion import CONTROL_S, Car, Control, WaypointFollower, drive_car

STILL = Car(x=0.0, y=0.0, heading=0.0, speed=0.0, accel=0.0, steer=0.0, yaw_rate=0.0)
ROLLING = STILL._replace(speed=5.0)


def driven(car: Car, control: Control, seconds: float) -> Car:
    for _ in range(round(seconds / CONTROL_S)):
        car = drive_car(car, control)
    return car


def test_throttle_makes_it_faster_along_its_heading() -> None:
    car = driven(STILL._replace(heading=math.pi / 2), Control(1.0, 0.0, 0.0), 2.0)
    assert 4.0 < car.speed < 6.0
    assert car.y > 3.0
    assert car.x == pytest.approx(0.0, abs=1e-9)


def test_brakes_stop_it_and_it_does_not_roll_backwards() -> None:
    car = driven(ROLLING, Control(0.0, 0.0, 1.0), 3.0)
    assert (car.speed, car.accel, car.yaw_rate) == (0.0, 0.0, 0.0)
    assert drive_car(car, Control(0.0, 0.0, 1.0)).x == car.x


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_the_wheel_turns_it_left_where_positive(side: float) -> None:
    car = driven(ROLLING, Control(0.0, 0.5 * side, 0.0), 1.0)
    assert car.heading * side > 0.2
    assert car.y * side > 0.3


def test_headings_stay_between_minus_and_plus_pi() -> None:
    car = ROLLING
    for _ in range(400):
        car = drive_car(car, Control(0.3, 1.0, 0.0))
        assert -math.pi <= car.heading < math.pi


@pytest.mark.parametrize(("metres", "pedal"), [(4.0, "throttle"), (1.0, "brake")])
def test_waypoints_farther_apart_ask_for_more_speed(metres: float, pedal: str) -> None:
    waypoints = [[metres * number, 0.0, 0.0] for number in range(1, 9)]
    control = WaypointFollower(waypoints, ROLLING).control(ROLLING)
    assert getattr(control, pedal) > 0.5
    assert control.steer == pytest.approx(0.0, abs=1e-9)
    assert control.throttle * control.brake == 0.0


def test_waypoints_are_followed_from_where_they_were_decided() -> None:
    begin = ROLLING._replace(x=7.0, y=-3.0, heading=1.0)
    # a gentle bend to the left: 20 m ahead and 4 m aside, in the frame of the car
    waypoints = [[2.5 * number, 0.01 * (2.5 * number) ** 2, 0.0] for number in range(1, 9)]
    follower, car = WaypointFollower(waypoints, begin), begin
    for _ in range(round(3.0 / CONTROL_S)):
        car = drive_car(car, follower.control(car))
    dx, dy = car.x - begin.x, car.y - begin.y
    ahead = math.cos(1.0) * dx + math.sin(1.0) * dy
    left = math.cos(1.0) * dy - math.sin(1.0) * dx
    assert ahead == pytest.approx(15.0, abs=2.0)
    # pure pursuit cuts the bend short by some half a metre
    assert 0.5 * 0.01 * ahead**2 < left < 0.01 * ahead**2
