"""Closing doors on hinges, such as a microwave's, from outside."""

import numpy as np

from vla_rl.envs.libero.experts.geometry import box_corners
from vla_rl.envs.libero.experts.hand import CLOSE, OPEN, Hand, Motion, nearest_turn, pointing_down
from vla_rl.envs.libero.experts.pick_and_place import approach
from vla_rl.envs.libero.scene import Scene

_REACH = 0.8
"""Contact point of the fingers, as a share of the way from the hinge to the free edge: far out,
little force is needed."""

_BELOW_TOP_M = 0.05
"""Distance of the finger tips below the door's upper edge (m); the palm stays above the edge."""

_BEFORE_M = 0.06
"""Distance from the door's face at which the hand comes down (m)."""

_THROUGH_M = -0.01
"""Target of the pushing fingers, behind the face (m): the arm is compliant, so the tips press on
the door."""

_TURN_PER_STEP, _OVERSHOOT = 0.08, 0.15
"""Speed of the pushed door, and how far beyond shut the hand is driven (rad)."""


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

    def in_front(self, angle: float, away_m: float) -> np.ndarray:
        """Return the point `away_m` from the door's outer face as it would be at `angle`, float64
        [3] in the world.
        """
        data = self._scene.data.joint(self._joint.id)
        corners = box_corners(self._scene, int(self._joint.bodyid[0])).reshape(-1, 3)
        arms = (corners - data.xanchor)[:, :2]
        middle = arms.mean(0)
        along = middle / np.linalg.norm(middle)
        outwards = np.sign(self._joint.range.sum() * data.xaxis[2]) * np.array(
            [-along[1], along[0]]
        )
        face = (arms @ outwards).max()
        arm = _REACH * (arms @ along).max() * along + (face + away_m) * outwards
        turn = np.sign(data.xaxis[2]) * (angle - self.angle)
        cosine, sine = np.cos(turn), np.sin(turn)
        turned = np.array([[cosine, -sine], [sine, cosine]]) @ arm
        return np.array([*(data.xanchor[:2] + turned), corners[:, 2].max() - _BELOW_TOP_M])


def close_door(scene: Scene, hand: Hand, subject: str) -> Motion:
    """Come down in front of the door's outer face with closed fingers, and push it along its arc
    until it is shut.
    """
    door = Door(scene, subject)
    start = door.angle
    rotation = nearest_turn(pointing_down(hand.yaw), hand.rotation)
    before = door.in_front(start, _BEFORE_M)
    yield from approach(scene, hand, before, rotation, CLOSE)
    yield from hand.go(before, rotation, CLOSE, max_steps=30)
    shut = -np.sign(start) * _OVERSHOOT
    for angle in np.arange(start, shut, np.sign(shut - start) * _TURN_PER_STEP):
        yield from hand.go(
            door.in_front(float(angle), _THROUGH_M), rotation, CLOSE, tolerance_m=0.0, max_steps=1
        )
    yield from hand.go(
        door.in_front(float(shut), _THROUGH_M), rotation, CLOSE, tolerance_m=0.01, max_steps=15
    )
    yield from hand.rise(OPEN)
