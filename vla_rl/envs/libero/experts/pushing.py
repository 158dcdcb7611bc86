"""Pushing flat things over the table."""

from collections.abc import Iterator

import numpy as np

from vla_rl.envs.libero.experts.clearance import lowest_height
from vla_rl.envs.libero.experts.geometry import obstacle_points, origin, root_body, surface_points
from vla_rl.envs.libero.experts.goals import Goal
from vla_rl.envs.libero.experts.grasps import choose_grasp, nearest_half_turn, rim_grasps
from vla_rl.envs.libero.experts.hand import CLOSE, OPEN, Hand, Motion, nearest_turn, pointing_down
from vla_rl.envs.libero.experts.pick_and_place import approach
from vla_rl.envs.libero.experts.places import owner_of
from vla_rl.envs.libero.scene import Scene

_TIP_BELOW_M = 0.0115
"""Distance of the finger tips below the point between them (m)."""

_PRESS_M = 0.004
"""Target depth of the tips below the surface (m), so that they press on it; if deeper, the plate is
stuck to the table."""

_PRESS_STEPS = 4

_LOST_M = 0.07
"""Distance from the middle of the plate at which the fingers have lost it (m)."""


def is_pushed(scene: Scene, goal: Goal) -> bool:
    """Return whether a goal is reached by pushing: a plate that is to go to a part of the table."""
    return goal.subject.startswith("plate") and owner_of(scene, goal.place or "") is None


def push(scene: Scene, hand: Hand, name: str, place: str) -> Motion:
    """Press two fingers onto the middle of `name` and drag it to `place`."""
    points = surface_points(scene, [root_body(scene, name)])
    middle, goal = origin(scene, name), origin(scene, place)
    near = points[np.linalg.norm(points[:, :2] - middle[:2], axis=1) < 0.02]
    floor = near[:, 2].max()
    way = goal[:2] - middle[:2]
    yaw = float(np.arctan2(way[1], way[0]) + np.pi / 2)
    rotation = nearest_turn(pointing_down(yaw), hand.rotation)
    start = np.array([*middle[:2], floor + _TIP_BELOW_M])
    yield from approach(scene, hand, start, rotation)
    yield from hand.go(start, rotation, OPEN, tolerance_m=0.008, max_steps=30)
    pressed = start[2] - _PRESS_M
    yield from hand.go(
        np.array([*start[:2], pressed]), rotation, OPEN, tolerance_m=0.0, max_steps=_PRESS_STEPS
    )

    def target() -> np.ndarray:
        return np.array([*(hand.position + goal - origin(scene, name))[:2], pressed])

    for action in hand.go(target, rotation, OPEN, tolerance_m=0.0, max_steps=120):
        yield action
        if np.linalg.norm((hand.position - origin(scene, name))[:2]) > _LOST_M:
            break
    yield from hand.rise(OPEN)


def make_room(scene: Scene, hand: Hand, name: str, coming: np.ndarray) -> Motion:
    """Drag a hollow thing to the nearest spot where it can still be grasped after the points
    `coming` arrive.
    """
    points = surface_points(scene, [root_body(scene, name)])
    middle = origin(scene, name)
    others = np.concatenate([obstacle_points(scene, without={name}), coming])
    others = others[np.linalg.norm(others[:, :2] - middle[:2], axis=1) < 0.35]
    radius = float(np.linalg.norm(points[:, :2] - middle[:2], axis=1).max())
    shift = next(
        (shift for shift in _shifts() if _is_free(points + shift, middle + shift, radius, others)),
        None,
    )
    if shift is None or not shift.any():
        return
    goal = middle + shift

    def cost(yaw: float) -> float:
        lowest = max(lowest_height(others, xy[:2], yaw, 0.0) for xy in (middle, goal))
        return lowest + 0.001 * abs(nearest_half_turn(yaw - hand.yaw))

    rotation = nearest_turn(
        pointing_down(min(np.linspace(0.0, np.pi, 12, endpoint=False), key=cost)), hand.rotation
    )
    inside = np.array([*middle[:2], max(points[:, 2].max() - 0.02, middle[2] + 0.025)])
    yield from approach(scene, hand, inside, rotation, CLOSE)
    yield from hand.go(inside, rotation, CLOSE, max_steps=20)
    yield from hand.go(
        lambda: np.array([*(hand.position + goal - origin(scene, name))[:2], inside[2]]),
        rotation,
        CLOSE,
    )
    yield from hand.rise(OPEN, 8)


def _shifts() -> Iterator[np.ndarray]:
    """Yield shifts of something on the table (m), the shortest first; the very first is zero."""
    yield np.zeros(3)
    for distance in (0.04, 0.06, 0.08, 0.1, 0.12, 0.14):
        for angle in np.linspace(0.0, 2 * np.pi, 16, endpoint=False):
            yield np.array([distance * np.cos(angle), distance * np.sin(angle), 0.0])


def _is_free(points: np.ndarray, middle: np.ndarray, radius_m: float, others: np.ndarray) -> bool:
    """Return whether a thing with the surface `points` about `middle` could be grasped and lifted
    straight up.
    """
    if (np.linalg.norm(others[:, :2] - middle[:2], axis=1) < radius_m + 0.01).any():
        return False
    grasp = choose_grasp(rim_grasps(points), others, 0.0, lambda _: 0.0)
    return grasp is not None and grasp.position[2] < grasp.highest_m - 0.006
