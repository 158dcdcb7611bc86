"""The ego vehicle that NavSim grades, and the columns of a state.

Figures: nuPlan's Pacifica, nuplan-devkit e924167 nuplan/common/actor_state/vehicle_parameters.py.
"""

from typing import Final, NamedTuple


class Vehicle(NamedTuple):
    """Sizes of a car in metres; its pose is that of the rear axle."""

    width: float = 2.297
    front_length: float = 4.049
    rear_length: float = 1.127
    wheel_base: float = 3.089

    @property
    def half_length(self) -> float:
        """Half of the distance between the bumpers."""
        return (self.front_length + self.rear_length) / 2.0

    @property
    def half_width(self) -> float:
        """Half of the width."""
        return self.width / 2.0

    @property
    def rear_axle_to_centre(self) -> float:
        """Distance from the rear axle forward to the centre of the box."""
        return self.half_length - self.rear_length


PACIFICA: Final = Vehicle()

X, Y, HEADING, VX, VY, AX, AY, STEER, STEER_RATE, YAW_RATE, YAW_ACCEL = range(11)
"""Columns of a state: position and heading of the rear axle in the scene's frame, velocity and
acceleration in the car's frame, steering angle and rate, yaw rate and acceleration. Metres,
seconds, radians; x forward, y left, angles counter-clockwise."""

STATE_SIZE: Final = 11
INTERVAL_S: Final = 0.1
"""Time between two states of a graded motion."""

NUM_STEPS: Final = 40
"""Steps of a graded motion: 4 s, so 41 states."""
