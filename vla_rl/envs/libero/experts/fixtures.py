"""Programs that pull and push drawers by their bars, and turn a stove's knob."""

import numpy as np

from vla_rl.envs.libero.experts.geometry import (
    get_box_corners,
    get_highest_on_way,
    get_obstacle_points,
    get_surface_points,
)
from vla_rl.envs.libero.experts.motions import (
    CLOSE,
    DOWN,
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
    approach = np.cos(_DRAWER_TILT) * -outwards + np.sin(_DRAWER_TILT) * DOWN
    rotation = get_nearest_turn(get_pointing(approach, DOWN), hand.rotation)
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
    approach = np.cos(_DRAWER_PUSH_TILT) * -outwards + np.sin(_DRAWER_PUSH_TILT) * DOWN
    rotation = get_nearest_turn(get_pointing(approach, np.cross(outwards, DOWN)), hand.rotation)
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
