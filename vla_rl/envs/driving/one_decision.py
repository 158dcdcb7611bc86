"""One decision a scene: a 4 s trajectory that NavSim's score grades against recorded traffic.

`OneDecisionEnv` has the steps, the score and the reward that all such scenes share,
`OpenLoopDrivingEnv` the drawn scenes.
"""

import json
from abc import abstractmethod
from functools import lru_cache
from typing import Any, Final, Generic, Protocol, TypeVar, get_args

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.envs.driving.observing import (
    FRONT,
    Observer,
    check_cameras,
    check_crop,
    check_route_points,
    get_camera_key,
    make_car,
    make_observation_space,
)
from vla_rl.envs.driving.plan_actions import (
    NUM_WAYPOINTS,
    PlanAction,
    check_action,
    decode_plan,
    encode_plan,
)
from vla_rl.envs.driving.planner import CAREFUL, Manner, best_proposal, extend_path, propose
from vla_rl.envs.driving.scores import Scene, Version, score_waypoints
from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.pdm import measure_backward, parse_reward, weigh_reward
from vla_rl.envs.driving.world import (
    NUM_SCENES,
    TRAFFIC_STEP_S,
    Split,
    World,
    choose_scene,
    draw_world,
)
from vla_rl.envs.image_env import require_state
from vla_rl.types import Info, Observation

P = TypeVar("P", bound="PreparedScene")

KEPT_SCENES: Final = 32
"""Scenes that the environments of a process keep, because the members of a group ask for the same
one."""


class PreparedScene(Protocol):
    """A scene to drive in, and what is seen in it."""

    def get_scene(self, version: Version) -> Scene: ...
    @property
    def observation(self) -> Observation: ...
    def observe_after(self, motion: Floats) -> Observation:
        """Return what is seen at the end of a graded motion [41, 11]."""


class OneDecisionEnv(gymnasium.Env[Observation, np.ndarray], Generic[P]):
    """Plan 4 s of driving at once, and be graded by PDMS or EPDMS.

    Observation: `PreparedScene.observation`, and after the eighth row what is seen at the end of the
        motion.
    Action: float32 [3] in [-1, 1], one of the 8 rows of a plan of 4 s.
        moves: the move to one waypoint from the one 0.5 s before it, in that one's frame: -1 to 8 m
            ahead, -1.5 to 1.5 m and -0.6 to 0.6 rad to the left.
        profiles: row k has coefficient k of the accelerations and of the sideways shifts, and the
            path's bearing at the k-th distance.
        along_route: as profiles, with the shift beside the route at the k-th distance.
        `plan_actions` has the formulas of all three.
    Reward: 0 until the eighth row, then the weighted sum of what `reward` names.
    Ends: `terminated` with the eighth row; `truncated` after `step_limit`.
    Info: with the end, `score` with the total, every sub-score and backward_m, the longest way that
        a waypoint lies behind the one before it; and `is_success`.
    Randomness: `reset(seed=...)` draws a scene; `options={"init_state_id": k}` takes scene k.

    Args:
        num_scenes: number of scenes.
        observation_space: space of `PreparedScene.observation`.
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
        self._version, self._weights = version, parse_reward(reward, version)
        self._num_scenes, self._action = num_scenes, check_action(action)
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
        self._number = choose_scene(options, self.np_random, self._num_scenes)
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
            reward = weigh_reward(self._weights, score)
            info = {"is_success": score["total"] >= self._success_score, "score": score}
        return self._observe(), reward, terminated, truncated, info

    def get_state(self) -> dict[str, Any]:
        """Return all state that later steps depend on, as plain values."""
        return {
            "number": self._number,
            "rows": [list(row) for row in self._rows],
            "is_over": self._is_over,
            # as text: the generator's state has integers of 128 bits, which no message can hold
            "rng": json.dumps(self.np_random.bit_generator.state),
        }

    def set_state(self, state: dict[str, Any]) -> Observation:
        """Continue from a state that `get_state` returned, and return the observation there.

        Raises: ValueError for anything else.
        """
        require_state(state, self.get_state())
        self._number, self._is_over = state["number"], state["is_over"]
        self._rows = [list(row) for row in state["rows"]]
        self.np_random.bit_generator.state = json.loads(state["rng"])
        # graded again and not stored: 41 states follow from eight rows
        self._motion = self._graded()[1] if len(self._rows) == NUM_WAYPOINTS else None
        return self._observe()

    def _graded(self) -> tuple[dict[str, float], Floats]:
        """Grade the plan; return its scores and the motion [41, 11] that they are of."""
        waypoints = self._waypoints()[None]
        scores = score_waypoints(self._scene.get_scene(self._version), waypoints, self._version)
        score = {"total": float(scores.total[0]), **scores.get_sub_scores(0)}
        # policies that learn from this score were seen to jump backwards; the number shows one that
        # does
        score["backward_m"] = float(measure_backward(waypoints).max())
        for version in self._also:
            other = score_waypoints(self._scene.get_scene(version), waypoints, version)
            score[version] = float(other.total[0])
        return score, scores.states[0]

    @property
    def _scene(self) -> P:
        return self._prepare(self._number)

    def _observe(self) -> Observation:
        seen = (
            self._scene.observation
            if self._motion is None
            else self._scene.observe_after(self._motion)
        )
        # copied: the process keeps the scene, and whoever observed it may change the arrays
        return {
            key: value.copy() if isinstance(value, np.ndarray) else value
            for key, value in seen.items()
        }

    def _waypoints(self) -> np.ndarray:
        # by the speed that the policy was shown, in float32, and not by the scene's own
        return decode_plan(
            np.array(self._rows),
            self._action,
            float(self._scene.observation["state"][0]),
            self._scene.observation.get("route"),
        )


class OpenLoopDrivingEnv(OneDecisionEnv["_DrawnScene"]):
    """Plan 4 s of driving at once, and be graded by PDMS or EPDMS.

    Observation:
        image: uint8 [image_size, image_size, 3], the front camera; `image_<camera>` the others.
        state: float32 [10]: velocity ahead and to the left (m/s), acceleration likewise (m/s^2),
            yaw rate (rad/s), steering angle (rad), and the command's one-hot vector. With
            `route_points` float32 [10 + 2 N]: x and y of the N nearest points of `route` follow.
        command: float32 [4], one-hot of left, straight, right, unknown.
        route: float32 [10, 2], points of the route every 5 m, in the car's frame (x ahead, y left).
        instruction: str, such as "turn left".
        After the eighth row they are those at the end of the graded motion, among the others as
        they were recorded at 4 s.
    Action, reward, ends, info, randomness: as `OneDecisionEnv`'s.

    Args:
        split: train or held_out; no scene is in both.
        kind: layout of every scene, such as four_way; None: drawn.
        version, reward, success_score, step_limit, action, also: as `OneDecisionEnv`'s.
        cameras: NavSim's names; cam_f0 is always among them.
        image_size: side of the images in pixels.
        crop: upper and lower edge of the part of the cameras' height that is kept and stretched to
            the side; (0.35, 0.75) shows a road 2.5 times as high.
        route_points: points of the route that the state has too, 0 to 10.
        render_mode: "rgb_array" for a bird's eye view, or None.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 2}  # noqa: RUF012  # as gymnasium declares it

    def __init__(
        self,
        split: Split = "train",
        kind: str | None = None,
        version: Version = "epdms_v2",
        reward: str = "total",
        success_score: float = 0.9,
        cameras: tuple[str, ...] = (FRONT,),
        image_size: int = 128,
        step_limit: int = NUM_WAYPOINTS,
        render_mode: str | None = None,
        crop: tuple[float, float] = (0.0, 1.0),
        action: PlanAction = "moves",
        also: tuple[Version, ...] = (),
        route_points: int = 0,
    ) -> None:
        self.render_mode = render_mode
        self.render_every_step = True
        self._split, self._kind = split, kind
        self._cameras, self._size = check_cameras(tuple(cameras)), image_size
        self._crop, self._route_points = check_crop(crop), check_route_points(route_points)
        super().__init__(
            NUM_SCENES,
            make_observation_space(map(get_camera_key, self._cameras), image_size, route_points),
            version,
            reward,
            success_score,
            step_limit,
            action,
            also,
        )

    def render(self) -> np.ndarray | None:
        """Return the scene from above with the waypoints so far; None without a render mode.

        Only moves have waypoints before the eighth row.
        """
        if self.render_mode is None:
            return None
        scene = self._scene
        is_known = self._rows and (self._action == "moves" or len(self._rows) == NUM_WAYPOINTS)
        points = self._waypoints()[:, :2] if is_known else np.zeros((0, 2))
        cos, sin = np.cos(scene.car.heading), np.sin(scene.car.heading)
        trail = points @ np.array([[cos, sin], [-sin, cos]]) + [scene.car.x, scene.car.y]
        return scene.observer.from_above(scene.car, scene.others, trail)

    def expert_actions(self) -> np.ndarray:
        """Return the planner's trajectory as 8 actions: float32 [8, 3]."""
        reference = self._scene.get_scene(self._version).reference
        assert reference is not None
        return self._encode_poses(reference)

    def proposed_actions(self, number: int, manner: Manner = CAREFUL) -> np.ndarray:
        """Return one of the 15 trajectories that the planner proposes, as 8 actions.

        It chooses from the careful ones.
        """
        return self._encode_poses(propose(self._scene.world, manner)[number])

    def _encode_poses(self, poses: Floats) -> np.ndarray:
        path = extend_path(poses, self._scene.world.roads.route)
        seen = self._scene.observation
        return encode_plan(poses[::5], path, self._action, self._scene.car.speed, seen["route"])

    def _prepare(self, number: int) -> "_DrawnScene":
        return _prepare_scene(
            number,
            self._split,
            self._kind,
            self._cameras,
            self._size,
            self._crop,
            self._route_points,
        )


class _DrawnScene:
    """A scene with its references, its first observation and the means to draw it."""

    def __init__(
        self,
        world: World,
        cameras: tuple[str, ...],
        size: int,
        crop: tuple[float, float],
        route_points: int,
    ) -> None:
        self.world = world
        self._scenes: dict[Version, Scene] = {}
        self.car = make_car(world.start)
        self.others = world.tracks.poses[:, 0]
        self.observer = Observer(world, cameras, size, crop, route_points)
        self.observation = self.observer.look(self.car, self.others, 0.0)

    def get_scene(self, version: Version) -> Scene:
        """Return the scene with the proposal that this version of the score likes best."""
        # each version prefers another of the 15 proposals, and progress is measured by it
        if version not in self._scenes:
            self._scenes[version] = self.world.scene(best_proposal(self.world, version)[0])
        return self._scenes[version]

    def observe_after(self, motion: Floats) -> Observation:
        """Return what is seen at the end of a motion [41, 11], among the recorded others."""
        last = len(motion) - 1
        others = self.world.tracks.poses[:, last]
        return self.observer.look(make_car(motion[last]), others, last * TRAFFIC_STEP_S)


@lru_cache(maxsize=KEPT_SCENES)
def _prepare_scene(
    number: int,
    split: Split,
    kind: str | None,
    cameras: tuple[str, ...],
    size: int,
    crop: tuple[float, float],
    route_points: int,
) -> _DrawnScene:
    world = draw_world(number, split, kind)
    return _DrawnScene(world, cameras, size, crop, route_points)
