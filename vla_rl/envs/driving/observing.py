"""Observations of a driving scene, the same for every way of acting, with images drawn by OpenCV.

The ground is painted once for each scene and warped into each image; road users are boxes that
are painted from far to near. All colours are RGB.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import cv2
import numpy as np
from gymnasium import spaces

from vla_rl.envs.driving.roads import COMMANDS, Roads
from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.motion import Car, get_box_centre
from vla_rl.envs.driving.scores.scene import AX, HEADING, STEER, VX, YAW_RATE, X, Y
from vla_rl.envs.driving.world import CAR, CONE, CYCLIST, WALKER, World
from vla_rl.envs.gymnasium_adapters import Words
from vla_rl.types import Observation

CELL: Final = 0.25
"""Metres of the ground in one pixel of the painted plan."""

LOW: Final = (-45.0, -90.0)
CELLS: Final = 720
HEIGHT: Final = 1.6
NEAR: Final = 0.6
GRASS: Final = (96, 128, 72)
ROAD: Final = (92, 92, 96)
PAINT: Final = (225, 225, 215)
SKY: Final = (165, 195, 225)
COLOURS: Final = {
    CAR: ((200, 60, 50), (60, 90, 190), (235, 235, 235), (40, 40, 45), (220, 170, 50)),
    CYCLIST: ((30, 160, 150),),
    WALKER: ((240, 120, 40),),
    CONE: ((255, 90, 0),),
}

CAMERAS: Final[dict[str, float]] = {
    "cam_f0": 0.0,
    "cam_l0": 55.0,
    "cam_l1": 100.0,
    "cam_l2": 145.0,
    "cam_r0": -55.0,
    "cam_r1": -100.0,
    "cam_r2": -145.0,
    "cam_b0": 180.0,
}
"""NavSim's cameras, and where they look: degrees counter-clockwise from the car's heading."""

FIELD_OF_VIEW: Final = np.deg2rad(80.0)


class RoadUsers(NamedTuple):
    """Road users to draw: poses [N, 3], sizes [N, 3] and kinds [N].

    Example:
        One car that stands 20 m ahead:

        RoadUsers(np.array([[20.0, 0.0, 0.0]]), np.array([[4.6, 1.9, 1.5]]), np.array([CAR]))
    """

    poses: Floats
    sizes: Floats
    kinds: np.ndarray


def paint_plan(roads: Roads, light: float) -> np.ndarray:
    """Paint the ground from above: uint8 [720, 720, 3]."""
    plan = np.empty((CELLS, CELLS, 3), np.uint8)
    plan[:] = GRASS
    for ring, layer in zip(roads.rings, roads.layers, strict=True):
        if layer != "lane":
            cv2.fillPoly(plan, [_to_pixels(ring)], ROAD, shift=4)
    for path in roads.solid:
        cv2.polylines(plan, [_to_pixels(path)], False, PAINT, 1, shift=4)
    for path in roads.dashed:
        pieces = [_to_pixels(path[i : i + 3]) for i in range(0, len(path) - 3, 6)]
        cv2.polylines(plan, pieces, False, PAINT, 1, shift=4)
    for ring, layer in zip(roads.rings, roads.layers, strict=True):
        if layer == "intersection":
            cv2.fillPoly(plan, [_to_pixels(ring)], ROAD, shift=4)
    # after the intersections, which are painted over the lines that the arms draw into them
    for one, other in roads.crossings:
        for share in np.arange(0.05, 1.0, 0.1):
            spot = _to_pixels((one + (other - one) * share)[None])[0]
            cv2.circle(plan, spot.tolist(), 24, PAINT, -1, shift=4)
    return cv2.convertScaleAbs(plan, alpha=light)


def find_stop_line(roads: Roads) -> Floats | None:
    """Return the stop line's middle and the way across it: [2, 2]; None without a signal."""
    if roads.stop is None:
        return None
    at = int(roads.stop)
    return np.stack([roads.route[at], roads.route[at] - roads.route[at - 1]])


class Painter:
    """Draws one scene from any pose.

    Args:
        roads, light: of the scene; the light is a brightness.
        size: side of the images in pixels.
        crop: upper and lower edge of the part of a camera's image that is kept, as shares of its
            height; it is stretched to the whole side.
    """

    def __init__(self, roads: Roads, light: float, size: int, crop: tuple[float, float]) -> None:
        self.plan = paint_plan(roads, light)
        self._light, self._size = light, size
        self._signal = find_stop_line(roads)
        self._focal = size / 2 / np.tan(FIELD_OF_VIEW / 2)
        top, bottom = crop
        # a camera that looks ahead has the whole road beyond 8 m in one row of a policy's patches,
        # so the recipes keep the band from 0.35 to 0.75
        self._stretch = 1.0 / (bottom - top)
        self._horizon = size * (0.5 - top) * self._stretch
        self._ground_of_plan = np.array(
            [[CELL, 0.0, LOW[0]], [0.0, -CELL, LOW[1] + CELLS * CELL], [0.0, 0.0, 1.0]]
        )
        self._sky = tuple(int(min(255, light * part)) for part in SKY)
        self._grass = tuple(int(min(255, light * part)) for part in GRASS)

    def view(self, eye: Floats, yaw: float, users: RoadUsers, is_red: bool | None) -> np.ndarray:
        """Draw what a camera at `eye` [2] that looks along `yaw` sees: uint8 [size, size, 3]."""
        size, focal = self._size, self._focal
        cos, sin = np.cos(yaw), np.sin(yaw)
        depth = np.array([cos, sin, -cos * eye[0] - sin * eye[1]])
        left = np.array([-sin, cos, sin * eye[0] - cos * eye[1]])
        ground = [0, 0, focal * self._stretch * HEIGHT]
        to_image = np.stack(
            [size / 2 * depth - focal * left, self._horizon * depth + ground, depth]
        )
        image = cv2.warpPerspective(
            self.plan, to_image @ self._ground_of_plan, (size, size), borderValue=self._grass
        )
        image[: int(self._horizon) + 1] = self._sky
        if self._signal is not None and is_red is not None:
            self._draw_signal(image, depth, left, is_red)
        self._draw_boxes(image, eye, depth, left, users)
        return image

    def _draw_signal(self, image: np.ndarray, depth: Floats, left: Floats, is_red: bool) -> None:
        assert self._signal is not None
        position, way = self._signal
        spot = np.array([*(position + 11.0 * way + 3.0 * np.array([way[1], -way[0]])), 1.0])
        away = float(depth @ spot)
        if away < NEAR:
            return
        x = self._size / 2 - self._focal * float(left @ spot) / away
        y = self._horizon - self._focal * self._stretch * 2.2 / away
        colour = (235, 30, 30) if is_red else (40, 220, 70)
        radius = max(int(0.7 * self._focal / away), 1)
        for more, paint in ((1, (20, 20, 20)), (0, colour)):
            across, up = radius + more, int((radius + more) * self._stretch)
            cv2.ellipse(image, (int(x), int(y)), (across, up), 0, 0, 360, paint, -1)

    def _draw_boxes(
        self, image: np.ndarray, eye: Floats, depth: Floats, left: Floats, users: RoadUsers
    ) -> None:
        if not len(users.kinds):
            return
        centre = np.concatenate([users.poses[:, :2], np.ones((len(users.poses), 1))], -1)
        away = centre @ depth
        order = np.argsort(-away)
        order = order[(away[order] > 0.0) & (away[order] < 110.0)]
        if not len(order):
            return
        poses, halves = users.poses[order], users.sizes[order] / 2
        cos, sin = np.cos(poses[:, 2]), np.sin(poses[:, 2])
        signs = np.array([(1, 1), (-1, 1), (-1, -1), (1, -1)])
        forward = signs[:, 0] * halves[:, :1]
        side = signs[:, 1] * halves[:, 1:2]
        x = poses[:, :1] + cos[:, None] * forward - sin[:, None] * side
        y = poses[:, 1:2] + sin[:, None] * forward + cos[:, None] * side
        # a box beside the camera has corners behind it, which a division would mirror into the
        # image
        z = np.maximum(depth[0] * x + depth[1] * y + depth[2], NEAR)
        across = left[0] * x + left[1] * y + left[2]
        size, focal = self._size, self._focal
        column = size / 2 - focal * across / z
        tall = focal * self._stretch
        foot = self._horizon + tall * HEIGHT / z
        top = self._horizon + tall * (HEIGHT - users.sizes[order, 2:]) / z
        points = np.stack([np.stack([column, foot], -1), np.stack([column, top], -1)], 1)
        # OpenCV draws in fixed point, which corners far outside of the image overflow
        fixed = np.clip(points * 16, -30000, 30000).astype(np.int32)
        # a side is seen if its two corners run from right to left in the image
        seen = column > np.roll(column, -1, 1)
        for row, number in enumerate(order):
            kind = int(users.kinds[number])
            colours = COLOURS[kind]
            base = np.array(colours[int(number) % len(colours)]) * self._light
            for face in range(4):
                if not seen[row, face]:
                    continue
                after = (face + 1) % 4
                corners = fixed[row][[0, 0, 1, 1], [face, after, after, face]]
                shade = (0.75, 1.0, 0.75, 0.85)[face]
                cv2.fillConvexPoly(image, corners, (base * shade).tolist(), shift=4)

    def from_above(
        self, pose: Floats, users: RoadUsers, trail: Floats, side: int = 256
    ) -> np.ndarray:
        """Draw the scene from above, the car in the lower middle and facing up.

        Args:
            pose: [3], the car's; trail: [M, 2], positions to mark.
        """
        scale = side / 64.0
        cos, sin = np.cos(pose[2]), np.sin(pose[2])
        middle = np.array([side / 2, side * 0.75])
        turn = scale * np.array([[sin, -cos], [-cos, -sin]])
        shift = middle - turn @ pose[:2]
        to_image = np.concatenate([turn, shift[:, None]], 1)
        whole = to_image @ self._ground_of_plan
        image = cv2.warpAffine(self.plan, whole, (side, side), borderValue=self._grass)
        for (x, y, heading), size, kind in zip(*users, strict=True):
            colour = COLOURS[int(kind)][0]
            _draw_box(image, turn, shift, (x, y, heading), size, colour)
        for spot in trail:
            at = (turn @ spot + shift).astype(int)
            cv2.circle(image, at.tolist(), 2, (255, 230, 0), -1)
        return image


def _draw_box(
    image: np.ndarray,
    turn: Floats,
    shift: Floats,
    pose: tuple[float, float, float],
    size: Floats,
    colour: tuple[int, int, int],
) -> None:
    cos, sin = np.cos(pose[2]), np.sin(pose[2])
    half = size[:2] / 2
    corners = np.array([(1, 1), (-1, 1), (-1, -1), (1, -1)]) * half
    ground = corners @ np.array([[cos, sin], [-sin, cos]]) + pose[:2]
    cv2.fillConvexPoly(image, (ground @ turn.T + shift).astype(np.int32), colour)


def _to_pixels(path: Floats) -> np.ndarray:
    column = (path[:, 0] - LOW[0]) / CELL
    row = CELLS - (path[:, 1] - LOW[1]) / CELL
    return np.stack([column * 16, row * 16], -1).astype(np.int32)


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


def check_cameras(cameras: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cameras, the front one first. Raises: ValueError for an unknown name."""
    unknown = sorted(set(cameras) - set(CAMERAS))
    if unknown or FRONT not in cameras:
        raise ValueError(
            f"cameras are {list(cameras)}, expected {FRONT} and any of {', '.join(CAMERAS)}."
        )
    return (FRONT, *(name for name in cameras if name != FRONT))


def check_crop(crop: tuple[float, float]) -> tuple[float, float]:
    """Return the part of the height. Raises: ValueError if it does not hold the horizon."""
    top, bottom = crop
    if not 0.0 <= top < 0.5 < bottom <= 1.0:
        raise ValueError(
            f"crop is {list(crop)}, expected two shares of the height, the first from 0 to below "
            "0.5 and the second above 0.5 to 1: the horizon is in the middle."
        )
    return top, bottom


def check_route_points(number: int) -> int:
    """Return the number of route points in the state. Raises: ValueError if there are not as many."""
    if not 0 <= number <= ROUTE_POINTS:
        raise ValueError(
            f"route_points is {number}, expected 0 to {ROUTE_POINTS}: the observation has a point "
            f"every {ROUTE_STEP} m up to {ROUTE_POINTS * ROUTE_STEP} m."
        )
    return number


def append_route(state: np.ndarray, route: np.ndarray, route_points: int) -> np.ndarray:
    """Return the state followed by x and y of the nearest points of the route: [10 + 2 N]."""
    return np.asarray(np.concatenate([state, route[:route_points].ravel()]), np.float32)


def get_camera_key(camera: str) -> str:
    """Return the observation's key of a camera: `image` for the front one."""
    return "image" if camera == FRONT else f"image_{camera}"


def make_observation_space(
    image_keys: Iterable[str], size: int, route_points: int | None = 0, reach_m: float = 1e3
) -> spaces.Dict:
    """Return the space of the observations, with this number of route points in the state.

    None: there is no route.
    """
    image, num_values = spaces.Box(0, 255, (size, size, 3), np.uint8), 2 * (route_points or 0)
    parts: dict[str, spaces.Space[Any]] = dict.fromkeys(image_keys, image)
    parts["state"] = spaces.Box(-reach_m, reach_m, (STATE_SIZE + num_values,), np.float32)
    parts["command"] = spaces.Box(0.0, 1.0, (len(COMMANDS),), np.float32)
    if route_points is not None:
        parts["route"] = spaces.Box(-reach_m, reach_m, (ROUTE_POINTS, 2), np.float32)
    parts["instruction"] = Words(max_length=64, charset=INSTRUCTION_LETTERS)
    return spaces.Dict(parts)


def make_car(state: Floats) -> Car:
    """Return the car in a state [11] of the scores."""
    return Car(*(float(state[i]) for i in (X, Y, HEADING, VX, AX, STEER, YAW_RATE)))


class Observer:
    """Looks at one world from the car.

    Args:
        world: the scene.
        cameras: the front one first.
        size: side of the images in pixels.
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
        users = RoadUsers(others, self._sizes, self._kinds)
        observation: Observation = {
            get_camera_key(name): self.painter.view(
                eye, car.heading + np.deg2rad(CAMERAS[name]), users, red
            )
            for name in self._cameras
        }
        sideways = car.speed * car.yaw_rate
        # the rear axle of a bicycle never moves sideways, so its second velocity is 0
        ego = [car.speed, 0.0, car.accel, sideways, car.yaw_rate, car.steer]
        state, route = np.concatenate([ego, self._command]), self.route(car)
        observation["state"] = append_route(state, route, self._route_points)
        observation["command"] = self._command.copy()
        observation["route"] = route
        observation["instruction"] = INSTRUCTIONS[world.roads.command]
        return observation

    def from_above(self, car: Car, others: Floats, trail: Floats) -> np.ndarray:
        """Draw the scene from above, the car included."""
        centre = get_box_centre(car)
        users = RoadUsers(
            np.concatenate([others, centre[None]]),
            np.concatenate([self._sizes, _CAR_SIZE]),
            np.concatenate([self._kinds, [CAR]]),
        )
        return self.painter.from_above(centre, users, trail)

    def route(self, car: Car) -> np.ndarray:
        """Return the points of the route ahead in the car's frame: float32 [10, 2]."""
        route = self._world.roads.route
        offset = route - np.array([car.x, car.y])
        nearest = int((offset**2).sum(-1).argmin())
        ahead = nearest + ROUTE_STEP * np.arange(1, ROUTE_POINTS + 1)
        # a route that ends repeats its last point, so that the observation keeps its shape
        points = offset[np.minimum(ahead, len(route) - 1)]
        cos, sin = np.cos(car.heading), np.sin(car.heading)
        x = cos * points[:, 0] + sin * points[:, 1]
        y = cos * points[:, 1] - sin * points[:, 0]
        return np.stack([x, y], -1).astype(np.float32)
