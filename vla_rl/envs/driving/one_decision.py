"""One decision a scene: the steps, the score and the reward that all scenes share."""

import json
from abc import abstractmethod
from typing import Any, Final, Generic, Protocol, TypeVar, get_args

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.envs.driving.moves import NUM_WAYPOINTS
from vla_rl.envs.driving.paths import Floats
from vla_rl.envs.driving.plan_actions import PlanAction, checked_action, waypoints_of_plan
from vla_rl.envs.driving.scores import Scene, Version, score_waypoints
from vla_rl.envs.driving.scores.plans import backward_metres
from vla_rl.envs.driving.scores.rewards import reward_weights, weighted_reward
from vla_rl.envs.driving.starts import scene_number
from vla_rl.types import Info, Observation

KEPT_SCENES: Final = 32
"""Scenes that the environments of a process keep, because the members of a group ask for the same
one."""


class Prepared(Protocol):
    """A scene to drive in, and what is seen in it."""

    def scene_of(self, version: Version) -> Scene: ...
    @property
    def seen(self) -> Observation: ...
    def seen_after(self, motion: Floats) -> Observation:
        """Return what is seen at the end of a graded motion [41, 11]."""


P = TypeVar("P", bound=Prepared)


class OneDecisionEnv(gymnasium.Env[Observation, np.ndarray], Generic[P]):
    """Plan 4 s of driving at once, and be graded by PDMS or EPDMS.

    Observation: `Prepared.seen`, and after the eighth row what is seen at the end of the motion.
    Action: float32 [3] in [-1, 1], one of the 8 rows of a plan of 4 s.
        moves: the move to one waypoint from the one 0.5 s before it, in that one's frame: -1 to 8 m
            ahead, -1.5 to 1.5 m and -0.6 to 0.6 rad to the left; see `moves`.
        profiles: row k has coefficient k of the accelerations and of the sideways shifts, and the
            path's bearing at the k-th distance; see `profiles`.
        along_route: as profiles, with the shift beside the route at the k-th distance; see
            `along_route`.
    Reward: 0 until the eighth row, then the weighted sum of what `reward` names.
    Ends: `terminated` with the eighth row; `truncated` after `step_limit`.
    Info: with the end, `score` with the total, every sub-score and backward_m, the longest way that
        a waypoint lies behind the one before it; and `is_success`.
    Randomness: `reset(seed=...)` draws a scene; `options={"init_state_id": k}` takes scene k.

    Args:
        num_scenes: number of scenes.
        observation_space: space of `Prepared.seen`.
        version: pdms_v1 or epdms_v2.
        reward: total, a sub-score such as ego_progress, or several with weights, such as
            "total=1,lane_keeping=0.5".
        success_score: smallest total that counts as a success.
        step_limit: rows before the episode is truncated.
        action: moves, profiles or along_route.
        also: versions whose totals are reported beside, as `score["pdms_v1"]`.
    """

    def __init__(
        self,
        num_scenes: int,
        observation_space: spaces.Dict,
        version: Version,
        reward: str,
        success_score: float,
        step_limit: int,
        action: PlanAction,
        also: tuple[Version, ...],
    ) -> None:
        for named in (version, *also):
            if named not in get_args(Version):
                raise ValueError(f"version is {named!r}, expected one of {get_args(Version)}.")
        self._also = tuple(also)
        self._version, self._weights = version, reward_weights(reward, version)
        self._num_scenes, self._action = num_scenes, checked_action(action)
        self._success_score, self._step_limit = success_score, step_limit
        self.observation_space = observation_space
        self.action_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self._number = -1
        self._rows: list[list[float]] = []
        self._motion: Floats | None = None
        self._is_over = True

    @abstractmethod
    def _prepare(self, number: int) -> P:
        """Return scene `number` and its observation, from those that the process keeps."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start a scene, drawn from `seed` or named by `options={"init_state_id": k}`."""
        super().reset(seed=seed)
        self._number = scene_number(options, self.np_random, self._num_scenes)
        self._rows, self._motion, self._is_over = [], None, False
        return self._observe(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Add one row; the eighth ends the episode and is rewarded."""
        if self._is_over:
            raise gymnasium.error.ResetNeeded(
                "the episode is over or has not begun; call reset() first."
            )
        row = np.asarray(action, np.float64)
        if row.shape != (3,) or not np.isfinite(row).all():
            raise ValueError(f"the row is {action}, expected 3 finite numbers.")
        self._rows.append(np.clip(row, -1.0, 1.0).tolist())
        terminated = len(self._rows) == NUM_WAYPOINTS
        truncated = not terminated and len(self._rows) >= self._step_limit
        self._is_over = terminated or truncated
        info: Info = {"is_success": False}
        reward = 0.0
        if terminated:
            score, self._motion = self._graded()
            reward = weighted_reward(self._weights, score)
            info = {"is_success": score["total"] >= self._success_score, "score": score}
        return self._observe(), reward, terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        """Return all state that later steps depend on, as plain values."""
        return {
            "number": self._number,
            "rows": [list(row) for row in self._rows],
            "is_over": self._is_over,
            "rng": json.dumps(self.np_random.bit_generator.state),
        }

    def set_state(self, state: dict[str, Any]) -> Observation:
        """Continue from a state that `get_state` returned, and return the observation there."""
        self._number, self._is_over = state["number"], state["is_over"]
        self._rows = [list(row) for row in state["rows"]]
        self.np_random.bit_generator.state = json.loads(state["rng"])
        self._motion = self._graded()[1] if len(self._rows) == NUM_WAYPOINTS else None
        return self._observe()

    def _graded(self) -> tuple[dict[str, float], Floats]:
        """Grade the plan; return its scores and the motion [41, 11] that they are of."""
        waypoints = self._waypoints()[None]
        scores = score_waypoints(self._scene.scene_of(self._version), waypoints, self._version)
        score = {"total": float(scores.total[0]), **scores.sub_of(0)}
        score["backward_m"] = float(backward_metres(waypoints).max())
        for version in self._also:
            other = score_waypoints(self._scene.scene_of(version), waypoints, version)
            score[version] = float(other.total[0])
        return score, scores.states[0]

    @property
    def _scene(self) -> P:
        return self._prepare(self._number)

    def _observe(self) -> Observation:
        seen = self._scene.seen if self._motion is None else self._scene.seen_after(self._motion)
        return {
            key: value.copy() if isinstance(value, np.ndarray) else value
            for key, value in seen.items()
        }

    def _waypoints(self) -> np.ndarray:
        return waypoints_of_plan(
            np.array(self._rows),
            self._action,
            float(self._scene.seen["state"][0]),
            self._scene.seen.get("route"),
        )
