"""Opening and closing drawers by the bars on their fronts."""

import numpy as np

from vla_rl.envs.libero.experts.clearance import highest_on_way
from vla_rl.envs.libero.experts.geometry import box_corners, obstacle_points, surface_points
from vla_rl.envs.libero.experts.hand import CLOSE, OPEN, Hand, Motion, nearest_turn, pointing
from vla_rl.envs.libero.scene import Scene

_TILT = np.radians(20.0)
"""Angle of the hand below the horizontal when it grasps a bar."""

_PUSH_TILT = np.radians(45.0)
"""The same angle for closing: the arm stays clear of the table."""

_PULL_M = 0.19
_PULL_SPEED = 0.6
"""At a higher speed, the fingers slip off the bar."""

OPEN_M = 0.145
"""Opening at which a pulled drawer counts as open (LIBERO requires 0.14)."""

_FULLY_OPEN_M = 0.16

_ROOMY_M = 0.12
"""A drawer that is open less than this is opened before a bowl is put in."""

_DOWN = np.array([0.0, 0.0, -1.0])


class Drawer:
    """A sliding part, and its pose."""

    def __init__(self, scene: Scene, region: str) -> None:
        joint = scene.domain.object_sites_dict[region].joints[0]
        self._scene, self._joint = scene, scene.model.joint(joint)
        self.body = int(self._joint.bodyid[0])

    @property
    def outwards(self) -> np.ndarray:
        """Direction in which it opens, float64 [3]."""
        return -np.array(self._scene.data.joint(self._joint.id).xaxis)

    @property
    def opening_m(self) -> float:
        """Opening (m)."""
        return -float(self._scene.data.joint(self._joint.id).qpos[0])

    @property
    def bar(self) -> np.ndarray:
        """Corners of the part that stands out farthest, float64 [8, 3]."""
        corners = box_corners(self._scene, self.body)
        return np.asarray(corners[(corners @ self.outwards).max(1).argmax()])

    def points_when_open(self) -> np.ndarray:
        """Return points all over the drawer in its open position, float64 [N, 3]."""
        return (
            surface_points(self._scene, [self.body])
            + (_FULLY_OPEN_M - self.opening_m) * self.outwards
        )


def is_shut_drawer(scene: Scene, place: str) -> bool:
    """Return whether `place` is the inside of a drawer that is not open."""
    site = scene.domain.object_sites_dict.get(place)
    if site is None or not site.joints or "level" not in site.joints[0]:
        return False
    return Drawer(scene, place).opening_m < _ROOMY_M


def open_drawer(scene: Scene, hand: Hand, region: str) -> Motion:
    """Grasp the bar from the front, fingers above and below it, pull, and let go."""
    drawer = Drawer(scene, region)
    outwards = drawer.outwards
    approach = np.cos(_TILT) * -outwards + np.sin(_TILT) * _DOWN
    rotation = nearest_turn(pointing(approach, _DOWN), hand.rotation)
    bar = drawer.bar.mean(0)
    before = bar - 0.09 * approach
    height = _height_of_way(scene, hand, before)
    if hand.position[2] < height:
        yield from hand.go(
            np.array([*hand.position[:2], height]), hand.rotation, OPEN, tolerance_m=0.02
        )
    yield from hand.go(
        np.array([*before[:2], max(height, before[2])]),
        rotation,
        OPEN,
        tolerance_m=0.03,
        max_steps=60,
    )
    yield from hand.go(before, rotation, OPEN, tolerance_m=0.01, max_steps=60)
    yield from hand.go(bar, rotation, OPEN, tolerance_m=0.008, max_steps=30)
    yield from hand.hold(CLOSE, 10)
    pulled = hand.position + (_PULL_M - drawer.opening_m) * outwards
    for action in hand.go(
        pulled, rotation, CLOSE, tolerance_m=0.01, max_steps=60, speed=_PULL_SPEED
    ):
        yield action
        if drawer.opening_m > OPEN_M:
            break
    yield from hand.hold(OPEN, 6)
    yield from hand.go(
        hand.position - 0.08 * approach, rotation, OPEN, tolerance_m=0.02, max_steps=15
    )


def close_drawer(scene: Scene, hand: Hand, region: str) -> Motion:
    """Push the bar with closed fingers until the drawer is shut."""
    drawer = Drawer(scene, region)
    outwards = drawer.outwards
    approach = np.cos(_PUSH_TILT) * -outwards + np.sin(_PUSH_TILT) * _DOWN
    rotation = nearest_turn(pointing(approach, np.cross(outwards, _DOWN)), hand.rotation)
    before = drawer.bar.mean(0) + 0.06 * outwards
    height = _height_of_way(scene, hand, before)
    yield from hand.go(
        np.array([*hand.position[:2], max(height, hand.position[2])]), hand.rotation, CLOSE
    )
    yield from hand.go(
        np.array([*before[:2], height]), rotation, CLOSE, tolerance_m=0.03, max_steps=60
    )
    yield from hand.go(before, rotation, CLOSE, max_steps=40)
    shut = before - (drawer.opening_m + 0.1) * outwards
    yield from hand.go(shut, rotation, CLOSE, tolerance_m=0.01, max_steps=60)
    yield from hand.go(
        hand.position + 0.1 * outwards, rotation, CLOSE, tolerance_m=0.03, max_steps=15
    )


def _height_of_way(scene: Scene, hand: Hand, end: np.ndarray) -> float:
    """Return the height (m) that the hand needs on its way to `end`, tilted as it will be there."""
    return highest_on_way(obstacle_points(scene), hand.position, end, 0.08) + 0.06
