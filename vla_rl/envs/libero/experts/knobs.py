"""Turning the knob of a stove by the ridge on it."""

import numpy as np

from vla_rl.envs.libero.experts.geometry import box_corners
from vla_rl.envs.libero.experts.goals import Goal
from vla_rl.envs.libero.experts.grasps import nearest_half_turn
from vla_rl.envs.libero.experts.hand import CLOSE, OPEN, Hand, Motion, nearest_turn, pointing_down
from vla_rl.envs.libero.experts.pick_and_place import approach
from vla_rl.envs.libero.scene import Scene

_TURN, _TURN_PER_STEP, _TURN_STEPS = 1.0, 0.06, 40
"""Angle of the turn and speed (rad), and number of steps; the knob lags, so there are more steps
than the turn needs."""

_BELOW_TOP_M = 0.012
"""Depth below the ridge's upper edge at which it is grasped (m)."""


def turn_knob(scene: Scene, hand: Hand, goal: Goal) -> Motion:
    """Grasp the ridge, turn it about the knob's axis, and let go."""
    joint = scene.model.joint(scene.domain.get_object(goal.subject).joints[0])
    position, yaw = _across_ridge(scene, int(joint.bodyid[0]))
    yaw = hand.yaw + nearest_half_turn(yaw - hand.yaw)
    rotation = nearest_turn(pointing_down(yaw), hand.rotation)
    yield from approach(scene, hand, position, rotation)
    yield from hand.go(position, rotation, OPEN, tolerance_m=0.005, max_steps=30)
    yield from hand.hold(CLOSE, 10)
    data = scene.data.joint(joint.id)
    axis = float(np.sign(data.xaxis[2]))
    wish = 1.0 if goal.predicate == "turnon" else -1.0
    centre = np.array([*data.xanchor[:2], 0.0])
    start = hand.position
    for step in range(_TURN_STEPS):
        angle = axis * wish * min(_TURN_PER_STEP * (step + 1), _TURN)
        cosine, sine = np.cos(angle), np.sin(angle)
        turn = np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])
        yield from hand.go(
            centre + turn @ (start - centre), turn @ rotation, CLOSE, tolerance_m=0.0, max_steps=1
        )
    yield from hand.hold(OPEN, 6)
    yield from hand.rise(OPEN)


def _across_ridge(scene: Scene, body: int) -> tuple[np.ndarray, float]:
    """Return the grasp position of a knob, float64 [3] (m), and the direction across its ridge
    (rad): its highest, narrow box.
    """
    corners = box_corners(scene, body)
    ridge = corners[corners[..., 2].max(1).argmax()]
    _, axes = np.linalg.eigh(np.cov(ridge[:, :2].T))
    narrow = axes[:, 0]
    position = np.array([*ridge[:, :2].mean(0), ridge[:, 2].max() - _BELOW_TOP_M])
    return position, float(np.arctan2(narrow[1], narrow[0]))
