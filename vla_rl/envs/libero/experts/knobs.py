"""Turning the knob of a stove by the ridge on it."""

import numpy as np

from vla_rl.envs.libero.experts.geometry import box_corners
from vla_rl.envs.libero.experts.goals import Goal
from vla_rl.envs.libero.experts.grasps import nearest_half_turn
from vla_rl.envs.libero.experts.hand import CLOSE, OPEN, Hand, Motion, nearest_turn, pointing_down
from vla_rl.envs.libero.experts.pick_and_place import approach
from vla_rl.envs.libero.scene import Scene

_TURN, _TURN_PER_STEP = 1.0, 0.06
"""How far the knob is turned, and how fast (rad)."""


def turn_knob(scene: Scene, hand: Hand, goal: Goal) -> Motion:
    """Grasp the ridge, turn it about the knob's axis, and let go."""
    joint = scene.model.joint(scene.domain.get_object(goal.subject).joints[0])
    corners = box_corners(scene, int(joint.bodyid[0]))
    ridge = corners[corners[..., 2].max(1).argmax()]
    top = ridge[:, 2].max()
    spread = np.cov(ridge[:, :2].T)
    _, axes = np.linalg.eigh(spread)
    narrow = axes[:, 0]
    yaw = hand.yaw + nearest_half_turn(float(np.arctan2(narrow[1], narrow[0])) - hand.yaw)
    position = np.array([*ridge[:, :2].mean(0), top - 0.012])
    rotation = nearest_turn(pointing_down(yaw), hand.rotation)
    yield from approach(scene, hand, position, rotation)
    yield from hand.go(position, rotation, OPEN, tolerance_m=0.005, max_steps=30)
    yield from hand.hold(CLOSE, 10)
    data = scene.data.joint(joint.id)
    axis = float(np.sign(data.xaxis[2]))
    wish = 1.0 if goal.predicate == "turnon" else -1.0
    centre = np.array([*data.xanchor[:2], 0.0])
    start = hand.position
    for step in range(40):
        angle = axis * wish * min(_TURN_PER_STEP * (step + 1), _TURN)
        cosine, sine = np.cos(angle), np.sin(angle)
        turn = np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])
        yield from hand.go(centre + turn @ (start - centre), turn @ rotation, CLOSE, tolerance_m=0.0, max_steps=1)
    yield from hand.hold(OPEN, 6)
    yield from hand.rise(OPEN)
