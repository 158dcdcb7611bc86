"""Picking an object up from above and putting it at its target; retried if it slipped."""

from typing import NamedTuple

import numpy as np

from vla_rl.envs.libero.experts.clearance import highest_on_way, lowest_height
from vla_rl.envs.libero.experts.geometry import (
    box_corners,
    obstacle_points,
    origin,
    root_body,
    surface_points,
)
from vla_rl.envs.libero.experts.goals import UnreachableError
from vla_rl.envs.libero.experts.grasps import (
    MAX_WIDTH_M,
    Grasp,
    choose_grasp,
    pinch_grasps,
    rim_grasps,
)
from vla_rl.envs.libero.experts.hand import CLOSE, OPEN, Hand, Motion, nearest_turn, pointing_down
from vla_rl.envs.libero.experts.places import Spot, choose_spot
from vla_rl.envs.libero.scene import Scene

_CLEARANCE_M = 0.03
_CLOSE_STEPS, _OPEN_STEPS = 10, 10
_GENTLY, _GENTLE_SPEED, _GENTLE_STEPS = np.array([0.0, 0.0, 0.03]), 0.4, 10
"""First part of lifting something by its wall, and its speed: a jerk would pull the wall out of the
fingers."""

_TOLERANCE_M, _TIGHT_TOLERANCE_M = 0.015, 0.004
"""Largest distance of the hand from its place above an object before it comes down (m). Tight: a
finger goes inside a wall, or past the sides of something nearly as wide as the open hand.
"""

_SLIPPED_M = 0.04
_ABOVE_SUPPORT_M = 0.004


class _Held(NamedTuple):
    """Position of an object in the hand."""

    grasp: Grasp
    offset: np.ndarray
    """float64 [3], from the object's origin to the point between the finger tips (m)."""

    below_m: float
    """Distance that the object reaches below the point between the finger tips (m)."""

    radius_m: float
    """Distance that it reaches from its origin, seen from above (m)."""


def pick_and_place(
    scene: Scene, hand: Hand, name: str, place: str, is_shared: bool = False
) -> Motion:
    """Pick `name` up and put it on or in `place`, an object or a region.

    `is_shared` if others go there too.
    """
    spot = choose_spot(scene, name, place, _radius(scene, name), is_shared)
    yield from pick_and_put(scene, hand, name, spot)


def pick_and_put(scene: Scene, hand: Hand, name: str, spot: Spot) -> Motion:
    """Pick `name` up, put its origin at `spot`, and rise; on failure the hand is left open above
    the object.
    """
    held = _plan(scene, hand, name, spot)
    rotation = nearest_turn(pointing_down(held.grasp.yaw), hand.rotation)
    tolerance_m = _TIGHT_TOLERANCE_M if held.grasp.is_tight else _TOLERANCE_M
    yield from approach(scene, hand, held.grasp.position, rotation, tolerance_m=tolerance_m)
    yield from hand.go(held.grasp.position, rotation, OPEN, tolerance_m=0.006, max_steps=30)
    yield from hand.hold(CLOSE, _CLOSE_STEPS)

    others = obstacle_points(scene, without={name})
    goal = np.array([*spot.xy, 0.0])
    way_top = highest_on_way(others, origin(scene, name), goal, held.radius_m + 0.03)
    carry_height = max(way_top, spot.support_m) + held.below_m + _CLEARANCE_M
    start, gentle_steps = hand.position, _GENTLE_STEPS if held.grasp.is_on_wall else 0

    def over(height: float) -> np.ndarray:
        correction = goal - origin(scene, name)
        return np.array([*(hand.position + correction)[:2], height])

    drop_height = max(
        spot.support_m + held.below_m + _ABOVE_SUPPORT_M,
        lowest_height(others, spot.xy + held.offset[:2], held.grasp.yaw, held.grasp.width_m / 2),
    )
    legs = (
        hand.go(
            start + _GENTLY,
            rotation,
            CLOSE,
            tolerance_m=0.01,
            max_steps=gentle_steps,
            speed=_GENTLE_SPEED,
        ),
        hand.go(np.array([*start[:2], carry_height]), rotation, CLOSE, tolerance_m=0.03),
        hand.go(lambda: over(carry_height), rotation, CLOSE, tolerance_m=0.02, max_steps=80),
        hand.go(lambda: over(drop_height), rotation, CLOSE, tolerance_m=0.008, max_steps=30),
    )
    for leg in legs:
        yield from _while_held(scene, hand, name, held, leg)
        if not _is_held(scene, hand, name, held):
            yield from hand.hold(OPEN, 4)
            return
    yield from hand.hold(OPEN, _OPEN_STEPS)
    yield from hand.rise(OPEN)


def approach(
    scene: Scene,
    hand: Hand,
    position: np.ndarray,
    rotation: np.ndarray,
    gripper: float = OPEN,
    tolerance_m: float = _TOLERANCE_M,
) -> Motion:
    """Bring the open hand to within `tolerance_m` above `position`, over all obstacles on
    the way.
    """
    top = highest_on_way(obstacle_points(scene), hand.position, position, 0.08)
    height = max(top + _CLEARANCE_M, position[2] + 0.06)
    if hand.position[2] < height - 0.02:
        yield from hand.go(
            np.array([*hand.position[:2], height]), hand.rotation, gripper, tolerance_m=0.02
        )
    yield from hand.go(
        np.array([*position[:2], height]), rotation, gripper, tolerance_m=tolerance_m, max_steps=60
    )


def _plan(scene: Scene, hand: Hand, name: str, spot: Spot) -> _Held:
    """Choose the grasp.

    Raises: `UnreachableError` if the object could not be grasped from above even without
    neighbours.
    """
    body = root_body(scene, name)
    corners, points = box_corners(scene, body), surface_points(scene, [body])
    others = obstacle_points(scene, without={name})
    bottom, where = points[:, 2].min(), origin(scene, name)

    def drop_m(grasp: Grasp) -> float:
        offset = grasp.position - where
        wanted = spot.support_m + grasp.position[2] - bottom + _ABOVE_SUPPORT_M
        return float(
            max(
                0.0,
                lowest_height(others, spot.xy + offset[:2], grasp.yaw, grasp.width_m / 2) - wanted,
            )
        )

    grasps = [*pinch_grasps(corners), *rim_grasps(points)]
    grasp = choose_grasp(grasps, others, hand.yaw, drop_m) or choose_grasp(
        grasps, np.empty((0, 3)), hand.yaw, drop_m
    )
    if grasp is None:
        raise UnreachableError(
            f"{name} cannot be grasped from above as it lies: it is wider than "
            f"{1000 * MAX_WIDTH_M:.1f} mm on every side and has no wall that the fingers fit around"
        )
    radius = float(np.linalg.norm(points[:, :2] - where[:2], axis=1).max())
    return _Held(grasp, grasp.position - where, float(grasp.position[2] - bottom), radius)


def _while_held(scene: Scene, hand: Hand, name: str, held: _Held, motion: Motion) -> Motion:
    """Run `motion` to its end, or until the object is no longer in the hand."""
    for action in motion:
        yield action
        if not _is_held(scene, hand, name, held):
            return


def _is_held(scene: Scene, hand: Hand, name: str, held: _Held) -> bool:
    offset = hand.position - origin(scene, name)
    return bool(np.linalg.norm(offset - held.offset) < _SLIPPED_M)


def _radius(scene: Scene, name: str) -> float:
    points = surface_points(scene, [root_body(scene, name)])
    return float(np.linalg.norm(points[:, :2] - origin(scene, name)[:2], axis=1).max())
