"""Parts of every program of an expert: the goal that it reaches, the hand that it moves.

The hand has a proportional controller on its displacement commands. A motion is a generator of
actions that reads the live scene for each action, so that programs read from top to bottom and
still react to events:

    yield from hand.go(above, down, OPEN)
    yield from hand.hold(CLOSE, 10)
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from vla_rl.envs.libero.experts.geometry import get_highest_reach, rotation_vector
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.mujoco.loading import load_mujoco

# Switches and doors come first, while the hand's way is free, and doors are shut after things were
# put behind them.
_GOAL_ORDER = {"turnon": 0, "turnoff": 0, "open": 1, "on": 2, "in": 2, "close": 3}


DOWN: Final = np.array([0.0, 0.0, -1.0])


class UnreachableError(Exception):
    """The programs cannot reach a goal from the current scene; the message names the reason."""


class Goal(NamedTuple):
    """One condition of a task's goal.

    Example:
        Goal(predicate="on", subject="akita_black_bowl_1", target="plate_1")
        Goal(predicate="turnon", subject="flat_stove_1", target=None)
    """

    predicate: str
    """`on`, `in`, `open`, `close`, `turnon` or `turnoff`."""

    subject: str
    """The object or fixture, or the region of one, to which the condition applies."""

    target: str | None
    """Target of an `on` or `in`: an object, a fixture or a region."""

    def is_met(self, scene: Scene) -> bool:
        """Return whether the condition holds now."""
        return bool(scene.domain._eval_predicate([part for part in self if part is not None]))


def read_goals(scene: Scene) -> list[Goal]:
    """Return the conditions of the scene's task: switches and doors to open first, things to place,
    doors to close last.
    """
    return sort_goals(scene.domain.parsed_problem["goal_state"])


def sort_goals(predicates: Sequence[Sequence[str]]) -> list[Goal]:
    """Return predicates as goals, in the order of `read_goals`. Raises: ValueError for an unknown one."""
    goals = [
        Goal(predicate, subject, rest[0] if rest else None)
        for predicate, subject, *rest in predicates
    ]
    unknown = {goal.predicate for goal in goals} - set(_GOAL_ORDER)
    if unknown:
        raise ValueError(
            f"the goal has the conditions {sorted(unknown)}, expected only {', '.join(_GOAL_ORDER)}."
        )
    return sorted(goals, key=lambda goal: _GOAL_ORDER[goal.predicate])


Motion: TypeAlias = Iterator[np.ndarray]
"""Actions float32 [7], one for each control step; each is computed from the scene at the time of
the call."""

OPEN, CLOSE = -1.0, 1.0

_POSITION_GAIN, _ROTATION_GAIN = 2.6 / 0.05, 1.2 / 0.5
"""Command per metre and per radian of error; a command of 1 is 5 cm and 0.5 rad."""

_ANGLE_TOLERANCE = 0.15

Target: TypeAlias = np.ndarray | Callable[[], np.ndarray]
"""Position float64 [3], world (m), or a function that returns the current one."""


_SHUT_M, _OPEN_M = 0.002, 0.076
"""Distances of the finger tips at which a hand holds nothing: shut, and open."""

_STILL_M_PER_S = 0.02


class Hand:
    """The hand of the arm in `scene`.

    Its frame sits between the finger tips: x is where the fingers move, z points out.

    Args:
        scene: the scene.
        may_be_midway: whether the first motion may begin in the middle of a grasp, because something else
            has moved the hand there. Otherwise programs begin from their first step.
    """

    def __init__(self, scene: Scene, may_be_midway: bool = False) -> None:
        self._scene = scene
        self._site = scene.data.site("gripper0_grip_site")
        self._fingers = [scene.data.joint(f"gripper0_finger_joint{number}") for number in (1, 2)]
        self._last_pose = (self.position, self.rotation)
        self.may_be_midway = may_be_midway

    @property
    def opening_m(self) -> float:
        """Distance of the finger tips (m)."""
        left, right = (float(finger.qpos[0]) for finger in self._fingers)
        return left - right

    @property
    def opening_speed(self) -> float:
        """Speed at which the finger tips part (m/s); below 0 they close."""
        left, right = (float(finger.qvel[0]) for finger in self._fingers)
        return left - right

    @property
    def is_gripping(self) -> bool:
        """Whether the fingers stand still and are neither open nor shut: something is between them."""
        return abs(self.opening_speed) < _STILL_M_PER_S and _SHUT_M < self.opening_m < _OPEN_M

    @property
    def is_closing(self) -> bool:
        """Whether the fingers close."""
        return self.opening_speed < -_STILL_M_PER_S

    def is_above_or_at(
        self, position: np.ndarray, rotation: np.ndarray, tolerance_m: float
    ) -> bool:
        """Return whether the hand is turned to `rotation`, and at most `tolerance_m` beside the vertical through
        `position`.
        """
        distance = np.linalg.norm((position - self.position)[:2])
        turn = rotation_vector(rotation @ self.rotation.T)
        return bool(distance < tolerance_m and np.abs(turn).max() < _ANGLE_TOLERANCE)

    def open_fingers(self) -> Motion:
        """Open the fingers where they are."""
        while self.opening_m < _OPEN_M:
            yield from self.hold(OPEN, 1)

    @property
    def position(self) -> np.ndarray:
        """Position of the hand, float64 [3], world (m)."""
        return np.array(self._site.xpos)

    @property
    def rotation(self) -> np.ndarray:
        """Rotation of the hand, float64 [3, 3].

        Its columns are the axes of the hand in the world.
        """
        return np.array(self._site.xmat).reshape(3, 3)

    @property
    def yaw(self) -> float:
        """Direction in which the fingers move, about the vertical (rad)."""
        rotation = self.rotation
        return float(np.arctan2(rotation[1, 0], rotation[0, 0]))

    def go(
        self,
        target: Target,
        rotation: np.ndarray,
        gripper: float,
        *,
        tolerance_m: float = 0.015,
        max_steps: int = 40,
        speed: float = 1.0,
    ) -> Motion:
        """Drive to `target`, turned to `rotation`, until it is reached or for `max_steps`.

        `speed` bounds each command.
        """
        for _ in range(max_steps):
            # By the object's present pose, because it turns and slips a little in the fingers.
            point = target() if callable(target) else target
            self._last_pose = point, rotation
            offset, turn = point - self.position, rotation_vector(rotation @ self.rotation.T)
            if np.linalg.norm(offset) < tolerance_m and np.abs(turn).max() < _ANGLE_TOLERANCE:
                return
            yield make_command(offset, turn, gripper, speed)

    def rise(self, gripper: float, max_steps: int = 12) -> Motion:
        """Go up by 10 cm, or as far as the arm reaches, without turning."""
        x, y, height = self.position
        height = max(height, min(height + 0.1, get_highest_reach(self._scene, self.position)))
        return self.go(
            np.array([x, y, height]), self.rotation, gripper, tolerance_m=0.03, max_steps=max_steps
        )

    def hold(self, gripper: float, num_steps: int) -> Motion:
        """Stay at the end of the last motion, opening or closing the fingers."""
        # Where the last motion ended, not where the hand is: the arm is compliant, and would creep
        # away.
        point, rotation = self._last_pose
        for _ in range(num_steps):
            yield make_command(
                point - self.position, rotation_vector(rotation @ self.rotation.T), gripper
            )


_RELEASE_STEPS: Final = 10
"""Control steps in which a hand opens for sure."""

_NEAR_HOME_M: Final = 0.05
"""Distance from home at which nothing can be in the way."""

_HOME_STEPS: Final = 60
"""Most control steps of the way home, 3 s; it takes 20 to 45."""


def return_home(scene: Scene) -> Motion:
    """Let go, rise, and go back to where the hand is at the start of episodes."""
    hand = Hand(scene)
    position, rotation = find_home(scene)
    for _ in range(_RELEASE_STEPS):
        if hand.opening_m < _OPEN_M:
            yield from hand.hold(OPEN, 1)
    if np.linalg.norm(position - hand.position) > _NEAR_HOME_M:
        yield from hand.rise(OPEN)
    yield from hand.go(position, rotation, OPEN, max_steps=_HOME_STEPS)


def find_home(scene: Scene) -> tuple[np.ndarray, np.ndarray]:
    """Return position, float64 [3], and rotation, float64 [3, 3], of the hand with the joints at which robosuite
    starts the arm; initial states differ from it by a centimetre.
    """
    mujoco = load_mujoco()
    robot = scene.domain.robots[0]
    posed = mujoco.MjData(scene.model)
    posed.qpos[:] = scene.data.qpos
    posed.qpos[robot._ref_joint_pos_indexes] = robot.init_qpos
    mujoco.mj_kinematics(scene.model, posed)
    site = posed.site("gripper0_grip_site")
    return np.array(site.xpos), np.array(site.xmat).reshape(3, 3)


def make_command(
    offset_m: np.ndarray, turn: np.ndarray, gripper: float, speed: float = 1.0
) -> np.ndarray:
    """Return the action that moves the hand by `offset_m` [3] and turns it by `turn` [3] (rotation
    vector, rad).
    """
    move = np.clip(
        np.concatenate([_POSITION_GAIN * offset_m, _ROTATION_GAIN * turn]), -speed, speed
    )
    # Of the gripper's number robosuite reads the sign alone.
    return np.append(move, gripper).astype(np.float32)


def get_pointing(approach: np.ndarray, fingers: np.ndarray) -> np.ndarray:
    """Return the rotation, float64 [3, 3], that points the hand along `approach` with its fingers
    moving along `fingers`, perpendicular to it.
    """
    z = approach / np.linalg.norm(approach)
    x = fingers - (fingers @ z) * z
    x /= np.linalg.norm(x)
    return np.stack([x, np.cross(z, x), z], axis=1)


def get_pointing_down(yaw: float) -> np.ndarray:
    """Return the rotation of a hand that points down, with its fingers moving in the direction
    `yaw` (rad).
    """
    return get_pointing(DOWN, np.array([np.cos(yaw), np.sin(yaw), 0.0]))


def get_nearest_turn(rotation: np.ndarray, now: np.ndarray) -> np.ndarray:
    """Return `rotation`, or the same with the two fingers exchanged, whichever is nearer
    to `now`.
    """
    exchanged = rotation * np.array([-1.0, -1.0, 1.0])
    return max(rotation, exchanged, key=lambda candidate: float(np.trace(candidate @ now.T)))
