"""Observations of a driving scene, the same for every way of acting."""

from typing import Final

import numpy as np
from gymnasium import spaces

from vla_rl.envs.driving.camera import CAMERAS, Painter, Shown
from vla_rl.envs.driving.control import Car
from vla_rl.envs.driving.paths import Floats
from vla_rl.envs.driving.roads import COMMANDS
from vla_rl.envs.driving.scores.vehicle import PACIFICA
from vla_rl.envs.driving.traffic import CAR
from vla_rl.envs.driving.world import World
from vla_rl.envs.gymnasium_adapters import Words
from vla_rl.types import Observation

ROUTE_POINTS: Final = 10
"""Points of the route ahead, every 5 m."""

ROUTE_STEP: Final = 5
"""Metres of the route between two of its points."""

STATE_SIZE: Final = 10
FRONT: Final = "cam_f0"
_CAR_SIZE: Final = np.array([[5.176, 2.297, 1.6]])
INSTRUCTION_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz ,"
INSTRUCTIONS: Final = {
    "left": "turn left",
    "straight": "go straight",
    "right": "turn right",
    "unknown": "follow the road",
}


def checked_cameras(cameras: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cameras, the front one first. Raises: ValueError for an unknown name."""
    unknown = sorted(set(cameras) - set(CAMERAS))
    if unknown or FRONT not in cameras:
        raise ValueError(
            f"cameras are {list(cameras)}, expected {FRONT} and any of {', '.join(CAMERAS)}."
        )
    return (FRONT, *(name for name in cameras if name != FRONT))


def checked_crop(crop: tuple[float, float]) -> tuple[float, float]:
    """Return the part of the height. Raises: ValueError if it does not hold the horizon."""
    top, bottom = crop
    if not 0.0 <= top < 0.5 < bottom <= 1.0:
        raise ValueError(
            f"crop is {list(crop)}, expected two shares of the height, the first from 0 to below "
            "0.5 and the second above 0.5 to 1: the horizon is in the middle."
        )
    return top, bottom


def checked_route_points(number: int) -> int:
    """Return the number of route points in the state. Raises: ValueError if there are not as many."""
    if not 0 <= number <= ROUTE_POINTS:
        raise ValueError(
            f"route_points is {number}, expected 0 to {ROUTE_POINTS}: the observation has a point "
            f"every {ROUTE_STEP} m up to {ROUTE_POINTS * ROUTE_STEP} m."
        )
    return number


def state_with_route(state: np.ndarray, route: np.ndarray, route_points: int) -> np.ndarray:
    """Return the state followed by x and y of the nearest points of the route: [10 + 2 N]."""
    return np.asarray(np.concatenate([state, route[:route_points].ravel()]), np.float32)


def key_of(camera: str) -> str:
    """Return the observation's key of a camera: `image` for the front one."""
    return "image" if camera == FRONT else f"image_{camera}"


def space_of(cameras: tuple[str, ...], size: int, route_points: int = 0) -> spaces.Dict:
    """Return the space of the observations, with this number of route points in the state."""
    parts: dict[str, spaces.Space[object]] = {
        key_of(name): spaces.Box(0, 255, (size, size, 3), np.uint8) for name in cameras
    }
    parts["state"] = spaces.Box(-1e3, 1e3, (STATE_SIZE + 2 * route_points,), np.float32)
    parts["command"] = spaces.Box(0.0, 1.0, (len(COMMANDS),), np.float32)
    parts["route"] = spaces.Box(-1e3, 1e3, (ROUTE_POINTS, 2), np.float32)
    parts["instruction"] = Words(max_length=64, charset=INSTRUCTION_LETTERS)
    return spaces.Dict(parts)


class Observer:
    """Looks at one world from the car.

    Args:
        world: the scene.
        cameras: the front one first.
        size: side of the pictures in pixels.
        crop: part of the cameras' height that is kept.
        route_points: points of the route that the state has too.
    """

    def __init__(
        self,
        world: World,
        cameras: tuple[str, ...],
        size: int,
        crop: tuple[float, float],
        route_points: int = 0,
    ) -> None:
        self._world, self._cameras = world, cameras
        self._route_points = route_points
        self.painter = Painter(world.roads, world.light, size, crop)
        self._kinds, self._sizes = world.traffic.kinds[1:], world.traffic.sizes()[1:]
        self._command = np.array([name == world.roads.command for name in COMMANDS], np.float32)

    def look(self, car: Car, others: Floats, time_s: float) -> Observation:
        """Return what is seen from `car` while the others are at `others` [N, 3]."""
        world = self._world
        red = world.signal.is_red(time_s) if world.roads.stop is not None else None
        forward = np.array([np.cos(car.heading), np.sin(car.heading)])
        eye = np.array([car.x, car.y]) + 2.4 * forward
        shown = Shown(others, self._sizes, self._kinds)
        observation: Observation = {
            key_of(name): self.painter.view(
                eye, car.heading + np.deg2rad(CAMERAS[name]), shown, red
            )
            for name in self._cameras
        }
        sideways = car.speed * car.yaw_rate
        ego = [car.speed, 0.0, car.accel, sideways, car.yaw_rate, car.steer]
        state, route = np.concatenate([ego, self._command]), self.route(car)
        observation["state"] = state_with_route(state, route, self._route_points)
        observation["command"] = self._command.copy()
        observation["route"] = route
        observation["instruction"] = INSTRUCTIONS[world.roads.command]
        return observation

    def from_above(self, car: Car, others: Floats, trail: Floats) -> np.ndarray:
        """Draw the scene from above, the car included."""
        centre = centre_of(car)
        shown = Shown(
            np.concatenate([others, centre[None]]),
            np.concatenate([self._sizes, _CAR_SIZE]),
            np.concatenate([self._kinds, [CAR]]),
        )
        return self.painter.from_above(centre, shown, trail)

    def route(self, car: Car) -> np.ndarray:
        """Return the points of the route ahead in the car's frame: float32 [10, 2]."""
        route = self._world.roads.route
        offset = route - np.array([car.x, car.y])
        nearest = int((offset**2).sum(-1).argmin())
        ahead = nearest + ROUTE_STEP * np.arange(1, ROUTE_POINTS + 1)
        points = offset[np.minimum(ahead, len(route) - 1)]
        cos, sin = np.cos(car.heading), np.sin(car.heading)
        x = cos * points[:, 0] + sin * points[:, 1]
        y = cos * points[:, 1] - sin * points[:, 0]
        return np.stack([x, y], -1).astype(np.float32)


def centre_of(car: Car) -> Floats:
    """Return the centre of the car's box and its heading: [3]."""
    ahead = PACIFICA.rear_axle_to_centre
    return np.array(
        [car.x + ahead * np.cos(car.heading), car.y + ahead * np.sin(car.heading), car.heading]
    )
