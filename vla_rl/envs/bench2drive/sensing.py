"""Observations from CARLA's sensors; the only place where CARLA's frames are known.

CARLA's world is left-handed (x east, y south), its compass is clockwise from north, its gyroscope
and accelerometer have y to the right. Ours: x ahead, y left, angles counter-clockwise.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import cv2
import numpy as np

from vla_rl.envs.driving.observing import INSTRUCTIONS, ROUTE_POINTS, ROUTE_STEP, append_route
from vla_rl.envs.driving.roads import COMMANDS
from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.motion import WHEEL, Car, Control
from vla_rl.types import Observation

FRONT: Final = "front"
CAMERAS: Final = ("front", "front_left", "front_right", "back", "back_left", "back_right")
"""Cameras that the agent has."""

EARTH_RADIUS: Final = 6378137.0

COMMANDS_BY_OPTION: Final = {
    1: "left",
    2: "right",
    3: "straight",
    4: "straight",
    5: "left",
    6: "right",
}
"""CARLA's RoadOption as a command of NavSim, whose left and right include lane changes."""

_SEARCH: Final = (10, 60)
"""Metres before and after the last place on the route in which the next one is looked for, so that
a route that crosses itself is followed in its order."""


def get_camera_key(camera: str) -> str:
    """Return the observation's key of a camera: `image` for the front one."""
    return "image" if camera == FRONT else f"image_{camera}"


class RouteView:
    """Follows one route's measurements and returns what the policy sees.

    Args:
        plan: latitude, longitude and RoadOption of the route's points.
        cameras: names, the front one first.
        image_size: side of the images in pixels.
        route_points: points of the route that the state has too.
    """

    def __init__(
        self,
        plan: Sequence[Sequence[float]],
        cameras: Sequence[str],
        image_size: int,
        route_points: int = 0,
    ) -> None:
        if len(plan) < 2:
            raise ValueError(f"the route has {len(plan)} points, expected at least 2.")
        self._cameras, self._size, self._route_points = cameras, image_size, route_points
        self._origin = (float(plan[0][0]), float(plan[0][1]))
        points = np.array([self._metres(lat, lon) for lat, lon, _ in plan])
        ways = np.linalg.norm(np.diff(points, axis=0), axis=-1)
        self._marks = np.concatenate([[0.0], np.cumsum(ways)])
        self._options = [int(option) for _, _, option in plan]
        # the leaderboard thins the plan out to points that are up to 50 m apart; the policy's route
        # has one every 5 m
        along = np.arange(0.0, self._marks[-1] + 1.0)
        self._line = np.stack(
            [np.interp(along, self._marks, points[:, axis]) for axis in (0, 1)], -1
        )
        self._index = 0
        self._heading = math.atan2(*(points[1] - points[0])[::-1])
        self._steer = 0.0
        self.car = Car(0.0, 0.0, self._heading, 0.0, 0.0, 0.0, 0.0)

    def note(self, tick: Mapping[str, Any], sent: Control | None) -> None:
        """Take in one tick, and the control that was sent before it."""
        accel, _, _, _, _, gyro, compass = tick["imu"]
        # the compass has no value in some first ticks, in which the route's first metres tell the
        # heading
        if compass is not None:
            self._heading = math.pi / 2 - compass
        # GNSS, and not the simulator's own position, which the leaderboard allows no agent to read
        x, y = self._metres(*tick["gps"])
        if sent is not None:
            self._steer = WHEEL * sent.steer
        self.car = Car(
            x=x,
            y=y,
            heading=self._heading,
            speed=float(tick["speed"]),
            accel=float(accel or 0.0),
            steer=self._steer,
            yaw_rate=-float(gyro or 0.0),
        )
        first, last = max(self._index - _SEARCH[0], 0), self._index + _SEARCH[1]
        near = self._line[first : last + 1] - np.array([x, y])
        self._index = first + int((near**2).sum(-1).argmin())

    def observe(self, tick: Mapping[str, Any], body: bytes) -> Observation:
        """Return the observation of a tick with images.

        Raises: ValueError if an image is missing or has another size.
        """
        observation: Observation = {}
        images: Mapping[str, Sequence[int]] = tick["pictures"]
        start = 0
        for name in self._cameras:
            width, height = images.get(name, (0, 0))
            end = start + 4 * width * height
            if (width, height) != (self._size, self._size) or end > len(body):
                raise ValueError(
                    f"the image of {name} is {width} x {height} in {len(body)} bytes, expected "
                    f"{self._size} x {self._size}; set the agent's size to {self._size}."
                )
            bgra = np.frombuffer(body[start:end], np.uint8).reshape(height, width, 4)
            observation[get_camera_key(name)] = cv2.cvtColor(bgra, cv2.COLOR_BGRA2RGB)
            start = end
        car, command = self.car, self._command()
        one_hot = np.array([name == command for name in COMMANDS], np.float32)
        sideways = car.speed * car.yaw_rate
        ego = [car.speed, 0.0, car.accel, sideways, car.yaw_rate, car.steer]
        state, route = np.concatenate([ego, one_hot]), self._route()
        observation["state"] = append_route(state, route, self._route_points)
        observation["command"] = one_hot
        observation["route"] = route
        observation["instruction"] = INSTRUCTIONS[command]
        return observation

    def _command(self) -> str:
        ahead = int(np.searchsorted(self._marks, self._index, side="right"))
        return COMMANDS_BY_OPTION.get(self._options[min(ahead, len(self._options) - 1)], "unknown")

    def _route(self) -> np.ndarray:
        indices = self._index + ROUTE_STEP * np.arange(1, ROUTE_POINTS + 1)
        points = self._line[np.minimum(indices, len(self._line) - 1)]
        offset: Floats = points - np.array([self.car.x, self.car.y])
        cos, sin = math.cos(self.car.heading), math.sin(self.car.heading)
        ahead = cos * offset[:, 0] + sin * offset[:, 1]
        left = cos * offset[:, 1] - sin * offset[:, 0]
        return np.stack([ahead, left], -1).astype(np.float32)

    def _metres(self, lat: float, lon: float) -> tuple[float, float]:
        """Return metres to the east and to the north of the route's first point."""
        # flat around the route's first point: routes are too short for the Earth to bend
        east = EARTH_RADIUS * math.cos(math.radians(self._origin[0]))
        return (
            east * math.radians(lon - self._origin[1]),
            EARTH_RADIUS * math.radians(lat - self._origin[0]),
        )


def make_control_message(control: Control, look: bool) -> dict[str, Any]:
    """Return the message that carries a control; CARLA's wheel is positive to the right."""
    return {
        "kind": "control",
        "throttle": control.throttle,
        "steer": -control.steer,
        "brake": control.brake,
        "look": look,
    }
