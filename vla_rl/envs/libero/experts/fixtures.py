"""Programs that move the parts of fixtures: drawers by their bars, doors on hinges, a stove's knob.

A door, such as a microwave's, is shut from outside and opened by its bar.
"""

from typing import Any

import numpy as np

from vla_rl.envs.libero.experts.geometry import (
    get_box_corners,
    get_highest_on_way,
    get_obstacle_points,
    get_surface_points,
)
from vla_rl.envs.libero.experts.motions import (
    CLOSE,
    OPEN,
    Goal,
    Hand,
    Motion,
    get_nearest_turn,
    get_pointing,
    get_pointing_down,
)
from vla_rl.envs.libero.experts.picking import approach, get_nearest_half_turn
from vla_rl.envs.libero.scene import Scene

_DRAWER_TILT = np.radians(20.0)
"""Angle of the hand below the horizontal when it grasps a bar."""

_DRAWER_PUSH_TILT = np.radians(45.0)
"""The same angle for closing: the arm stays clear of the table."""

_DRAWER_PULL_M = 0.19
_DRAWER_PULL_SPEED = 0.6
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
        corners = get_box_corners(self._scene, self.body)
        return np.asarray(corners[(corners @ self.outwards).max(1).argmax()])

    def points_when_open(self) -> np.ndarray:
        """Return points all over the drawer in its open position, float64 [N, 3]."""
        return (
            get_surface_points(self._scene, [self.body])
            + (_FULLY_OPEN_M - self.opening_m) * self.outwards
        )


def is_shut_drawer(scene: Scene, region: str) -> bool:
    """Return whether `region` is the inside of a drawer that is not open."""
    site = scene.domain.object_sites_dict.get(region)
    # Of all sliding and turning parts, LIBERO's drawers alone have joints of this name
    # (`top_level`, `middle_level`, `bottom_level`).
    if site is None or not site.joints or "level" not in site.joints[0]:
        return False
    return Drawer(scene, region).opening_m < _ROOMY_M


def open_drawer(scene: Scene, hand: Hand, region: str) -> Motion:
    """Grasp the bar from the front, fingers above and below it, pull, and let go."""
    drawer = Drawer(scene, region)
    outwards = drawer.outwards
    approach = np.cos(_DRAWER_TILT) * -outwards + np.sin(_DRAWER_TILT) * _DOWN
    rotation = get_nearest_turn(get_pointing(approach, _DOWN), hand.rotation)
    bar = drawer.bar.mean(0)
    before = bar - 0.09 * approach
    height = _travel_height(scene, hand, before)
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
    pulled = hand.position + (_DRAWER_PULL_M - drawer.opening_m) * outwards
    # The drawer decides, not the hand: its bar slips a little in the fingers.
    for action in hand.go(
        pulled, rotation, CLOSE, tolerance_m=0.01, max_steps=60, speed=_DRAWER_PULL_SPEED
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
    approach = np.cos(_DRAWER_PUSH_TILT) * -outwards + np.sin(_DRAWER_PUSH_TILT) * _DOWN
    rotation = get_nearest_turn(get_pointing(approach, np.cross(outwards, _DOWN)), hand.rotation)
    before = drawer.bar.mean(0) + 0.06 * outwards
    height = _travel_height(scene, hand, before)
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


def _travel_height(scene: Scene, hand: Hand, end: np.ndarray) -> float:
    """Return the height (m) that the hand needs on its way to `end`, tilted as it will be there."""
    return get_highest_on_way(get_obstacle_points(scene), hand.position, end, 0.08) + 0.06


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
        arm = reach * along + outwards_m * outwards - height * _DOWN
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
    way = np.cos(_BAR_TILT) * -door.outwards + np.sin(_BAR_TILT) * _DOWN
    rotation = get_nearest_turn(get_pointing(way, np.cross(door.outwards, _DOWN)), hand.rotation)
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
    along = np.cross(door.outwards, _DOWN)
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


_KNOB_TURN, _KNOB_TURN_PER_STEP, _KNOB_STEPS = 1.0, 0.06, 40
"""Angle of the turn and speed (rad), and number of steps; the knob lags, so there are more steps
than the turn needs."""

_NEAR_KNOB_M = 0.03
"""Distance from where the ridge is grasped up to which fingers that grip hold it (m)."""

_SEEN_M = 0.02
"""Distance from there at which a hand that a policy has moved closes (m): a policy that imitates it cannot see
less in images of 84 pixels."""

_BELOW_RIDGE_M = 0.012
"""Depth below the ridge's upper edge at which it is grasped (m)."""


def turn_knob(scene: Scene, hand: Hand, goal: Goal) -> Motion:
    """Grasp the ridge, turn it about the knob's axis, and let go."""
    joint = scene.model.joint(scene.domain.get_object(goal.subject).joints[0])
    position, yaw = _find_ridge_grasp(scene, int(joint.bodyid[0]))
    yaw = hand.yaw + get_nearest_half_turn(yaw - hand.yaw)
    rotation = get_nearest_turn(get_pointing_down(yaw), hand.rotation)
    is_midway, hand.may_be_midway = hand.may_be_midway, False
    is_near = bool(np.linalg.norm(position - hand.position) < _NEAR_KNOB_M)
    if is_midway and is_near and (hand.is_gripping or hand.is_closing):
        # the hand leads the knob, so it goes on from its own angle
        rotation = get_nearest_turn(get_pointing_down(hand.yaw), hand.rotation)
        yield from hand.hold(CLOSE, 0 if hand.is_gripping else 6)
    else:
        if is_midway and hand.is_above_or_at(position, rotation, _NEAR_KNOB_M):
            yield from hand.open_fingers()
        else:
            yield from approach(scene, hand, position, rotation)
        tolerance_m = _SEEN_M if is_midway else 0.005
        yield from hand.go(position, rotation, OPEN, tolerance_m=tolerance_m, max_steps=30)
        yield from hand.hold(CLOSE, 10)
    data = scene.data.joint(joint.id)
    axis = float(np.sign(data.xaxis[2]))
    wish = 1.0 if goal.predicate == "turnon" else -1.0
    centre = np.array([*data.xanchor[:2], 0.0])
    start = hand.position
    for step in range(_KNOB_STEPS):
        angle = axis * wish * min(_KNOB_TURN_PER_STEP * (step + 1), _KNOB_TURN)
        cosine, sine = np.cos(angle), np.sin(angle)
        turn = np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])
        yield from hand.go(
            centre + turn @ (start - centre), turn @ rotation, CLOSE, tolerance_m=0.0, max_steps=1
        )
    yield from hand.hold(OPEN, 6)
    yield from hand.rise(OPEN)


def _find_ridge_grasp(scene: Scene, body: int) -> tuple[np.ndarray, float]:
    """Return the grasp position of a knob, float64 [3] (m), and the direction across its ridge
    (rad): its highest, narrow box.
    """
    corners = get_box_corners(scene, body)
    ridge = corners[corners[..., 2].max(1).argmax()]
    _, axes = np.linalg.eigh(np.cov(ridge[:, :2].T))
    narrow = axes[:, 0]
    position = np.array([*ridge[:, :2].mean(0), ridge[:, 2].max() - _BELOW_RIDGE_M])
    return position, float(np.arctan2(narrow[1], narrow[0]))
