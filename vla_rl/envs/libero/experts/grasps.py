"""Choosing where to grasp an object from above, from its collision boxes.

Two kinds of grasp are tried all around: across the whole object where it is narrow enough for the
fingers, and across the wall of a hollow object. The best one needs little opening and turning, and
lets the hand come down both at the object and at its target.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from vla_rl.envs.libero.experts.clearance import FINGER_BELOW_M, PALM_ABOVE_M, lowest_height

MAX_WIDTH_M = 0.0775
"""Widest object that the fingers close on (m); the open fingers are 80 mm apart, and LIBERO's moka
pot is 75.9 mm wide."""

_TIGHT_M = 0.074
_MAX_WALL_M = 0.03
_HOLLOW_M = 0.018
_YAWS = np.linspace(0.0, np.pi, 36, endpoint=False)
_RIM_DEPTH_M = 0.018
"""Depth below the rim at which a wall is grasped (m)."""

_TURN_COST, _RAISE_COST, _DROP_COST = 0.01, 4.0, 1.0


class Grasp(NamedTuple):
    """Pose of the fingers for a hand that points down."""

    position: np.ndarray
    """float64 [3], world (m)."""

    yaw: float
    """Direction in which the fingers move, about the vertical (rad)."""

    width_m: float
    """Width at which the fingers stay apart (m)."""

    highest_m: float
    """Height above which the fingers would close above the object (m, world)."""

    is_on_wall: bool = False
    """Whether the fingers hold the wall of a hollow object instead of the whole object."""

    @property
    def is_tight(self) -> bool:
        """Whether fingers that come down a centimetre beside the right place would land on the
        object.
        """
        return self.is_on_wall or self.width_m > _TIGHT_M


def pinch_grasps(corners: np.ndarray) -> list[Grasp]:
    """Return grasps across a whole object with the boxes `corners` [N, 8, 3].

    None if it is too wide everywhere.
    """
    bottom, top = corners[..., 2].min(), corners[..., 2].max()
    height = max((bottom + top) / 2, top - PALM_ABOVE_M, bottom + FINGER_BELOW_M)
    lowest, highest = corners[..., 2].min(1), corners[..., 2].max(1)
    is_between = (lowest < height + FINGER_BELOW_M) & (highest > height - FINGER_BELOW_M)
    plane = corners[is_between][..., :2].reshape(-1, 2)
    grasps = []
    for yaw in _YAWS:
        axes = np.array([[np.cos(yaw), np.sin(yaw)], [-np.sin(yaw), np.cos(yaw)]])
        along = plane @ axes.T
        low, high = along.min(0), along.max(0)
        if high[0] - low[0] < MAX_WIDTH_M:
            position = np.array([*(axes.T @ ((low + high) / 2)), height])
            grasps.append(Grasp(position, float(yaw), float(high[0] - low[0]), float(top - 0.004)))
    return grasps


def rim_grasps(points: np.ndarray) -> list[Grasp]:
    """Return grasps across the wall of a hollow object with the surface `points` [N, 3], all around
    it.
    """
    top = points[:, 2].max()
    rim = points[points[:, 2] > top - 0.024, :2]
    middle = (rim.min(0) + rim.max(0)) / 2
    grasps = []
    for angle in np.linspace(0.0, 2 * np.pi, 2 * len(_YAWS), endpoint=False):
        outwards = np.array([np.cos(angle), np.sin(angle)])
        radius = (rim - middle) @ outwards
        sideways = np.abs((rim - middle) @ np.array([-outwards[1], outwards[0]]))
        wall = radius[(radius > 0.0) & (sideways < 0.01)]
        if wall.size == 0 or wall.min() < _HOLLOW_M or wall.max() - wall.min() > _MAX_WALL_M:
            continue
        position = np.array(
            [*(middle + outwards * (wall.min() + wall.max()) / 2), top - _RIM_DEPTH_M]
        )
        width_m = float(wall.max() - wall.min())
        grasps.append(
            Grasp(position, float(angle % np.pi), width_m, float(top - 0.004), is_on_wall=True)
        )
    return grasps


def choose_grasp(
    grasps: Iterable[Grasp], obstacles: np.ndarray, yaw_now: float, drop_m: Callable[[Grasp], float]
) -> Grasp | None:
    """Return the best of `grasps`, raised if neighbours block the hand; None if none is possible.

    Args:
        obstacles: float64 [N, 3], points on everything except the object.
        yaw_now: current direction of the hand (rad).
        drop_m: returns the height (m) from which a grasp would drop the object at its target.
    """
    best: tuple[float, Grasp] | None = None
    for grasp in grasps:
        raised = max(
            grasp.position[2], lowest_height(obstacles, grasp.position[:2], grasp.yaw) + 0.002
        )
        if raised > grasp.highest_m:
            continue
        turn = nearest_half_turn(grasp.yaw - yaw_now)
        cost = (
            grasp.width_m
            + _TURN_COST * abs(turn)
            + _RAISE_COST * (raised - grasp.position[2])
            + _DROP_COST * drop_m(grasp)
        )
        if best is None or cost < best[0]:
            position = np.array([*grasp.position[:2], raised])
            best = cost, grasp._replace(position=position, yaw=yaw_now + turn)
    return None if best is None else best[1]


def nearest_half_turn(angle: float) -> float:
    """Return `angle` plus a multiple of a half turn, in [-pi/2, pi/2): the fingers may be
    exchanged.
    """
    return float((angle + np.pi / 2) % np.pi - np.pi / 2)
