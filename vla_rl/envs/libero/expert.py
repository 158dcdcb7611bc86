"""A scripted expert for libero_object: sees the hidden state, picks the target up and drops it into the basket.

    choose a grasp ─► above ─► descend ─► close ─► lift ─► carry ─► lower ─► open
                        ▲                            │
                        └──── nothing was lifted ────┘

The grasp is where the target's collision boxes are narrowest between the fingers. Every phase drives the hand to a
pose with a proportional controller on the hand's displacement commands and ends when the hand is there, or after a
number of control steps.
"""

from typing import NamedTuple

import numpy as np

from vla_rl.envs.libero.env import LiberoEnv
from vla_rl.envs.libero.scene import Scene

_POSITION_GAIN, _ROTATION_GAIN = 2.6 / 0.05, 1.2 / 0.5
"""Command per metre and per radian of error; a command of 1 is 5 cm and 0.5 rad."""

_OPEN, _CLOSE = -1.0, 1.0
_MAX_WIDTH_M = 0.074
_FINGER_REACH_M = 0.04
"""How far below an object's top the fingers can close without the palm touching it."""

_FINGER_HALF_M = 0.012
_CLEARANCE_M = 0.03
_YAWS = np.linspace(0.0, np.pi, 36, endpoint=False)


class Grasp(NamedTuple):
    """Where the fingers close."""

    position: np.ndarray
    """float64 [3], world (m)."""

    yaw: float
    """Direction in which the fingers move, about the vertical (rad)."""

    below_m: float
    """How far the object reaches below `position`."""


class _Phase(NamedTuple):
    """One leg of the program: drive there, with the fingers so, until there or for so many control steps."""

    name: str
    position: np.ndarray
    gripper: float
    tolerance_m: float
    max_steps: int
    min_steps: int = 0


class ExpertPolicy:
    """Plays one libero_object environment; `begin` after each reset, then one `act` for each control step.

    Raises: `ValueError` for another suite.
    """

    def __init__(self, env: LiberoEnv) -> None:
        if env.task.suite != "libero_object":
            raise ValueError(f"the scripted expert plays libero_object, this environment is {env.task.key}.")
        self._env = env
        self.begin()

    def begin(self) -> None:
        """Start the program over; the next `act` chooses a grasp."""
        self._phases: list[_Phase] = []
        self._steps_in_phase = 0
        self._yaw = 0.0
        self._grasp_height = 0.0

    def act(self) -> np.ndarray:
        """The action for the state as it is now, float32 [7]."""
        scene = self._env.scene
        if not self._phases:
            self._plan(scene)
        position, rotation = _hand(scene)
        rotation_error = _rotation_vector(_pointing_down(self._yaw) @ rotation.T)
        self._move_on(scene, position, rotation_error)
        phase = self._phases[0]
        self._steps_in_phase += 1
        command = np.concatenate(
            [_POSITION_GAIN * (phase.position - position), _ROTATION_GAIN * rotation_error, [phase.gripper]]
        )
        return np.asarray(np.clip(command, -1.0, 1.0), np.float32)

    def _move_on(self, scene: Scene, position: np.ndarray, rotation_error: np.ndarray) -> None:
        """Go to the next phase where this one is done; plan again where the fingers came up empty."""
        phase = self._phases[0]
        is_there = np.linalg.norm(phase.position - position) < phase.tolerance_m and np.abs(rotation_error).max() < 0.15
        is_done = self._steps_in_phase >= (phase.min_steps if is_there else phase.max_steps)
        if not is_done or len(self._phases) == 1:
            return
        if phase.name == "lift" and _body_position(scene, 0)[2] < self._grasp_height + _CLEARANCE_M:
            self._plan(scene)
            return
        self._phases.pop(0)
        self._steps_in_phase = 0

    def _plan(self, scene: Scene) -> None:
        grasp = choose_grasp(scene)
        self._yaw, self._grasp_height, self._steps_in_phase = grasp.yaw, float(_body_position(scene, 0)[2]), 0
        rim = _boxes(scene, 1)[:, 2].max()
        offset = grasp.position[:2] - _body_position(scene, 0)[:2]
        basket = scene.data.site("basket_1_contain_region").xpos
        carry_height = rim + grasp.below_m + _CLEARANCE_M
        above = np.array([*grasp.position[:2], max(grasp.position[2] + 0.1, 0.2)])
        over = np.array([*(basket[:2] + offset), carry_height])
        inside = over - (0.0, 0.0, 0.08)
        self._phases = [
            _Phase("above", above, _OPEN, 0.015, 40),
            _Phase("descend", grasp.position, _OPEN, 0.006, 30),
            _Phase("close", grasp.position, _CLOSE, np.inf, 10, min_steps=10),
            _Phase("lift", np.array([*grasp.position[:2], carry_height]), _CLOSE, 0.03, 40),
            _Phase("carry", over, _CLOSE, 0.02, 60),
            _Phase("lower", inside, _CLOSE, 0.015, 25),
            _Phase("open", inside, _OPEN, np.inf, 10, min_steps=10),
        ]


def choose_grasp(scene: Scene) -> Grasp:
    """Where the target is narrowest for a hand from above, turned as little as possible.

    Raises: `RuntimeError` if it is too wide for the fingers everywhere.
    """
    corners = _boxes(scene, 0)
    boxes = corners.reshape(-1, 8, 3)
    bottom, top = corners[:, 2].min(), corners[:, 2].max()
    height = max((bottom + top) / 2, top - _FINGER_REACH_M, bottom + _FINGER_HALF_M)
    is_between = (boxes[..., 2].min(1) < height + _FINGER_HALF_M) & (boxes[..., 2].max(1) > height - _FINGER_HALF_M)
    plane = boxes[is_between].reshape(-1, 8, 3)[..., :2].reshape(-1, 2)
    _, rotation = _hand(scene)
    yaw_now = np.arctan2(rotation[1, 0], rotation[0, 0])
    best: tuple[float, float, np.ndarray] | None = None
    for yaw in _YAWS:
        axes = np.array([[np.cos(yaw), np.sin(yaw)], [-np.sin(yaw), np.cos(yaw)]])
        along = plane @ axes.T
        low, high = along.min(0), along.max(0)
        turn = (yaw - yaw_now + np.pi / 2) % np.pi - np.pi / 2
        cost = float(high[0] - low[0]) + 0.01 * abs(turn)
        if high[0] - low[0] < _MAX_WIDTH_M and (best is None or cost < best[0]):
            best = cost, float(yaw_now + turn), axes.T @ ((low + high) / 2)
    if best is None:
        raise RuntimeError(f"{scene.domain.obj_of_interest[0]} is wider than {_MAX_WIDTH_M} m everywhere.")
    return Grasp(np.array([*best[2], height]), best[1], float(height - bottom))


def _hand(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Position [3] and orientation [3, 3] of the point between the fingers; its x axis is where the fingers move."""
    site = scene.data.site("gripper0_grip_site")
    return site.xpos.copy(), site.xmat.reshape(3, 3).copy()


def _pointing_down(yaw: float) -> np.ndarray:
    sine, cosine = np.sin(yaw), np.cos(yaw)
    return np.array([[cosine, sine, 0.0], [sine, -cosine, 0.0], [0.0, 0.0, -1.0]])


def _rotation_vector(rotation: np.ndarray) -> np.ndarray:
    """Axis times angle of a rotation matrix, for angles below a half turn."""
    axis = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    sine = np.linalg.norm(axis) / 2
    if sine < 1e-9:
        return np.zeros(3)
    return np.asarray(axis / (2 * sine) * np.arctan2(sine, (np.trace(rotation) - 1) / 2))


def _body_position(scene: Scene, of_interest: int) -> np.ndarray:
    """Where the task's target (0) or its basket (1) is."""
    name = scene.domain.obj_of_interest[of_interest]
    return np.array(scene.data.xpos[scene.domain.obj_body_id[name]])


def _boxes(scene: Scene, of_interest: int) -> np.ndarray:
    """float64 [8 N, 3], the corners of the collision boxes of the task's target (0) or its basket (1), world (m)."""
    model, data = scene.model, scene.data
    root = scene.domain.obj_body_id[scene.domain.obj_of_interest[of_interest]]
    is_solid = (model.body_rootid[model.geom_bodyid] == root) & (model.geom_contype > 0)
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    corners = [
        data.geom_xpos[geom] + (signs * model.geom_size[geom]) @ data.geom_xmat[geom].reshape(3, 3).T
        for geom in np.flatnonzero(is_solid)
    ]
    return np.concatenate(corners)
