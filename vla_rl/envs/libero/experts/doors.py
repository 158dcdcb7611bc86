"""Programs for doors on hinges, such as a microwave's: shut from outside, opened by the bar.

`open_door`   grasp the bar ─► pull it along its arc ─► come down behind the door ─► push it wide open
`close_door`  come down in front of it ─► push it along its arc beyond shut
"""

from typing import Any

import numpy as np

from vla_rl.envs.libero.experts.geometry import get_box_corners
from vla_rl.envs.libero.experts.motions import (
    CLOSE,
    DOWN,
    OPEN,
    Hand,
    Motion,
    get_nearest_turn,
    get_pointing,
    get_pointing_down,
)
from vla_rl.envs.libero.experts.picking import approach
from vla_rl.envs.libero.scene import Scene

_CONTACT_SHARE = 0.8
"""Contact point of the fingers, as a share of the way from the hinge to the free edge: far out,
little force is needed."""

_BELOW_DOOR_TOP_M = 0.05
"""Distance of the finger tips below the door's upper edge (m); the palm stays above the edge."""

_BEFORE_DOOR_M = 0.06
"""Distance from the door's face at which the hand comes down (m)."""

_BEHIND_FACE_M = -0.01
"""Target of the pushing fingers, behind the face (m): the arm is compliant, so the tips press on
the door."""

_DOOR_TURN_PER_STEP, _DOOR_OVERSHOOT = 0.08, 0.15
"""Speed of the pushed door, and how far beyond shut the hand is driven (rad)."""

_AJAR_ANGLE, _WIDE_ANGLE = 0.7, 1.45
"""Angle to which the bar is pulled, so that the hand fits behind the door, and angle to which the
door is then pushed from inside (rad; LIBERO requires 1.3)."""

_BAR_TILT = np.radians(20.0)
"""Angle of the hand below the horizontal when it holds the bar."""

_PULL_TURN_PER_STEP = 0.035
"""Speed of the pulled door (rad): faster, the bar slips out of the fingers."""


class Door:
    """A part that turns about a vertical hinge and is shut at angle 0."""

    def __init__(self, scene: Scene, subject: str) -> None:
        self._scene, self._joint = (
            scene,
            scene.model.joint(scene.domain.get_object(subject).joints[0]),
        )

    @property
    def angle(self) -> float:
        """Opening angle (rad), with the sign of its joint."""
        return float(self._scene.data.joint(self._joint.id).qpos[0])

    @property
    def bar(self) -> np.ndarray:
        """Middle of the part that stands out farthest, float64 [3] in the world."""
        corners, _, outwards = self._shape()
        return np.asarray(corners[(corners @ outwards).max(1).argmax()].mean(0))

    @property
    def outwards(self) -> np.ndarray:
        """Horizontal direction that its outer face looks in, float64 [3]."""
        return self._shape()[2]

    def in_front(self, angle: float, away_m: float) -> np.ndarray:
        """Return the point `away_m` from the door's outer face as it would be at `angle`, float64
        [3] in the world.
        """
        corners, _, outwards = self._shape()
        face = ((corners - self._hinge) @ outwards).max()
        return self._contact_point(angle, face + away_m)

    def behind(self, angle: float, away_m: float) -> np.ndarray:
        """Return the same point at the door's inner face."""
        corners, _, outwards = self._shape()
        face = ((corners - self._hinge) @ outwards).min()
        return self._contact_point(angle, face - away_m)

    def around(self, point: np.ndarray, angle: float) -> np.ndarray:
        """Return where a point that moves with the door is at `angle`, float64 [3]."""
        return np.asarray(self._hinge + self.turn(angle) @ (point - self._hinge))

    def turn(self, angle: float) -> np.ndarray:
        """Return the rotation from the present angle to `angle`, float64 [3, 3]."""
        turn = np.sign(self._data.xaxis[2]) * (angle - self.angle)
        cosine, sine = np.cos(turn), np.sin(turn)
        return np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])

    @property
    def widest(self) -> float:
        """The sign of its angles when it is open."""
        return float(np.sign(self._joint.range.sum()))

    @property
    def _data(self) -> Any:
        return self._scene.data.joint(self._joint.id)

    @property
    def _hinge(self) -> np.ndarray:
        return np.array(self._data.xanchor)

    def _contact_point(self, angle: float, outwards_m: float) -> np.ndarray:
        """Return the point of contact below the door's upper edge, `outwards_m` from the hinge's
        plane.
        """
        corners, along, outwards = self._shape()
        reach = _CONTACT_SHARE * ((corners - self._hinge) @ along).max()
        height = corners[..., 2].max() - _BELOW_DOOR_TOP_M - self._hinge[2]
        arm = reach * along + outwards_m * outwards - height * DOWN
        return np.asarray(self._hinge + self.turn(angle) @ arm)

    def _shape(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return its boxes' corners [N, 8, 3], and the directions along its face and outwards."""
        corners = get_box_corners(self._scene, int(self._joint.bodyid[0]))
        middle = (corners.reshape(-1, 3) - self._hinge).mean(0) * [1.0, 1.0, 0.0]
        along = middle / np.linalg.norm(middle)
        side = np.sign(self._joint.range.sum() * self._data.xaxis[2])
        return corners, along, side * np.array([-along[1], along[0], 0.0])


def close_door(scene: Scene, hand: Hand, subject: str) -> Motion:
    """Come down in front of the door's outer face with closed fingers, and push it along its arc
    until it is shut.
    """
    door = Door(scene, subject)
    start = door.angle
    rotation = get_nearest_turn(get_pointing_down(hand.yaw), hand.rotation)
    before = door.in_front(start, _BEFORE_DOOR_M)
    yield from approach(scene, hand, before, rotation, CLOSE)
    yield from hand.go(before, rotation, CLOSE, max_steps=30)
    shut = -np.sign(start) * _DOOR_OVERSHOOT
    for angle in np.arange(start, shut, np.sign(shut - start) * _DOOR_TURN_PER_STEP):
        yield from hand.go(
            door.in_front(float(angle), _BEHIND_FACE_M),
            rotation,
            CLOSE,
            tolerance_m=0.0,
            max_steps=1,
        )
    yield from hand.go(
        door.in_front(float(shut), _BEHIND_FACE_M), rotation, CLOSE, tolerance_m=0.01, max_steps=15
    )
    yield from hand.rise(OPEN)


def open_door(scene: Scene, hand: Hand, subject: str) -> Motion:
    """Pull the bar until the fingers fit behind the door, then push the door's inner face."""
    door = Door(scene, subject)
    if abs(door.angle) < _AJAR_ANGLE / 2:
        yield from _pull_ajar(scene, hand, door)
    # If the bar slipped, the door is hardly open, and the hand would not fit behind it: the expert
    # begins again from here.
    if abs(door.angle) >= _AJAR_ANGLE / 2:
        yield from _push_open(scene, hand, door)


def _pull_ajar(scene: Scene, hand: Hand, door: Door) -> Motion:
    way = np.cos(_BAR_TILT) * -door.outwards + np.sin(_BAR_TILT) * DOWN
    rotation = get_nearest_turn(get_pointing(way, np.cross(door.outwards, DOWN)), hand.rotation)
    bar = door.bar
    before = bar - 0.09 * way
    yield from approach(scene, hand, before, rotation)
    yield from hand.go(before, rotation, OPEN, tolerance_m=0.006, max_steps=60)
    yield from hand.go(bar, rotation, OPEN, tolerance_m=0.008, max_steps=30)
    yield from hand.hold(CLOSE, 10)
    held, start = hand.position, door.angle
    poses = [
        (door.around(held, angle), door.turn(angle) @ rotation)
        for angle in np.arange(
            start, door.widest * _AJAR_ANGLE, door.widest * _PULL_TURN_PER_STEP
        ).tolist()
    ]
    for point, turned in poses:
        yield from hand.go(point, turned, CLOSE, tolerance_m=0.0, max_steps=1)
    yield from hand.go(*poses[-1], CLOSE, tolerance_m=0.0, max_steps=10)
    yield from hand.hold(OPEN, 6)
    back = hand.position - 0.08 * hand.rotation[:, 2]
    yield from hand.go(back, hand.rotation, OPEN, tolerance_m=0.02, max_steps=15)


def _push_open(scene: Scene, hand: Hand, door: Door) -> Motion:
    start, wide = door.angle, door.widest * _WIDE_ANGLE
    along = np.cross(door.outwards, DOWN)
    yaw = float(np.arctan2(along[1], along[0]))
    rotation = get_nearest_turn(get_pointing_down(yaw), hand.rotation)
    behind = door.behind(start, _BEFORE_DOOR_M)
    yield from approach(scene, hand, behind, rotation, CLOSE)
    yield from hand.go(behind, rotation, CLOSE, max_steps=30)
    for angle in np.arange(start, wide, np.sign(wide) * _DOOR_TURN_PER_STEP):
        yield from hand.go(
            door.behind(float(angle), _BEHIND_FACE_M), rotation, CLOSE, tolerance_m=0.0, max_steps=1
        )
    yield from hand.go(
        door.behind(wide, _BEHIND_FACE_M), rotation, CLOSE, tolerance_m=0.01, max_steps=15
    )
    yield from hand.rise(OPEN)
