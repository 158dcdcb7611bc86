"""One decision a scene: a 4 s trajectory that NavSim's score grades against recorded traffic."""

import json
from collections import OrderedDict
from typing import Any, Final, get_args

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.driving_scores import MULTIPLIERS, WEIGHTS, Scene, Version, score_waypoints
from vla_rl.driving_scores.vehicle import AX, HEADING, STEER, VX, YAW_RATE, X, Y
from vla_rl.envs.driving.control import Car
from vla_rl.envs.driving.moves import NUM_WAYPOINTS, actions_of_poses, waypoints_of_actions
from vla_rl.envs.driving.observing import FRONT, Observer, checked_cameras, space_of
from vla_rl.envs.driving.planner import best_proposal
from vla_rl.envs.driving.starts import scene_number
from vla_rl.envs.driving.world import Split, World, draw_world
from vla_rl.types import Info, Observation

KEPT_SCENES: Final = 32
"""Scenes that one environment keeps, because the members of a group ask for the same one."""


class OpenLoopDrivingEnv(gymnasium.Env[Observation, np.ndarray]):
    """Plan 4 s of driving at once, and be graded by PDMS or EPDMS.

    Observation:
        image: uint8 [image_size, image_size, 3], the front camera; `image_<camera>` the others.
        state: float32 [10]: velocity ahead and to the left (m/s), acceleration likewise (m/s^2),
            yaw rate (rad/s), steering angle (rad), and the command's one-hot vector.
        command: float32 [4], one-hot of left, straight, right, unknown.
        route: float32 [10, 2], points of the route every 5 m, in the car's frame (x ahead, y left).
        instruction: str, such as "turn left".
    Action: float32 [3] in [-1, 1], the move to one waypoint from the one 0.5 s before it, in that
        one's frame: -1 to 8 m ahead, -1.5 to 1.5 m and -0.6 to 0.6 rad to the left. A chunk of 8
        rows is a trajectory of 4 s; `moves` converts trajectories in metres.
    Reward: 0 until the eighth waypoint, then the score, or the sub-score that `reward` names.
    Ends: `terminated` with the eighth waypoint; `truncated` after `step_limit`.
    Info: with the end, `score` with the total and every sub-score, and `is_success`.
    Randomness: `reset(seed=...)` draws a scene; `options={"init_state_id": k}` takes scene k.

    Args:
        split: train or held_out; no scene is in both.
        kind: layout of every scene, such as four_way; None: drawn.
        version: pdms_v1 or epdms_v2.
        reward: total, or a sub-score such as ego_progress.
        success_score: smallest total that counts as a success.
        cameras: NavSim's names; cam_f0 is always among them.
        image_size: side of the pictures in pixels.
        step_limit: waypoints before the episode is truncated.
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
    ) -> None:
        if version not in get_args(Version):
            raise ValueError(f"version is {version!r}, expected one of {get_args(Version)}.")
        known = ("total", *MULTIPLIERS[version], *WEIGHTS[version])
        if reward not in known:
            raise ValueError(f"reward is {reward!r}, expected one of {', '.join(known)}.")
        self.render_mode = render_mode
        self.render_every_step = True
        self._split, self._kind, self._version, self._reward = split, kind, version, reward
        self._success_score, self._step_limit = success_score, step_limit
        self._cameras, self._size = checked_cameras(tuple(cameras)), image_size
        self.observation_space = space_of(self._cameras, image_size)
        self.action_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self._kept: OrderedDict[int, _Prepared] = OrderedDict()
        self._number = -1
        self._rows: list[list[float]] = []
        self._is_over = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start a scene, drawn from `seed` or named by `options={"init_state_id": k}`."""
        super().reset(seed=seed)
        self._number = scene_number(options, self.np_random)
        self._rows, self._is_over = [], False
        return self._observe(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Add one waypoint; the eighth ends the episode and is rewarded."""
        if self._is_over:
            raise gymnasium.error.ResetNeeded(
                "the episode is over or has not begun; call reset() first."
            )
        row = np.asarray(action, np.float64)
        if row.shape != (3,) or not np.isfinite(row).all():
            raise ValueError(f"the waypoint is {action}, expected 3 finite numbers.")
        self._rows.append(np.clip(row, -1.0, 1.0).tolist())
        terminated = len(self._rows) == NUM_WAYPOINTS
        truncated = not terminated and len(self._rows) >= self._step_limit
        self._is_over = terminated or truncated
        info: Info = {"is_success": False}
        reward = 0.0
        if terminated:
            scores = score_waypoints(self._scene.scene, self._waypoints()[None], self._version)
            score = {"total": float(scores.total[0])}
            score |= {name: float(values[0]) for name, values in scores.sub.items()}
            reward = score[self._reward]
            info = {"is_success": score["total"] >= self._success_score, "score": score}
        return self._observe(), reward, terminated, truncated, info

    def render(self) -> np.ndarray | None:
        """Return the scene from above with the waypoints so far; None without a render mode."""
        if self.render_mode is None:
            return None
        scene = self._scene
        points = self._waypoints()[:, :2] if self._rows else np.zeros((0, 2))
        cos, sin = np.cos(scene.car.heading), np.sin(scene.car.heading)
        trail = points @ np.array([[cos, sin], [-sin, cos]]) + [scene.car.x, scene.car.y]
        return scene.observer.from_above(scene.car, scene.others, trail)

    def expert_actions(self) -> np.ndarray:
        """Return the planner's trajectory as 8 actions: float32 [8, 3]."""
        reference = self._scene.scene.reference
        assert reference is not None
        return actions_of_poses(reference[::5])

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
        return self._observe()

    @property
    def _scene(self) -> "_Prepared":
        if self._number not in self._kept:
            world = draw_world(self._number, self._split, self._kind)
            self._kept[self._number] = _Prepared(world, self._version, self._cameras, self._size)
            if len(self._kept) > KEPT_SCENES:
                self._kept.popitem(last=False)
        return self._kept[self._number]

    def _observe(self) -> Observation:
        return {
            key: value.copy() if isinstance(value, np.ndarray) else value
            for key, value in self._scene.seen.items()
        }

    def _waypoints(self) -> np.ndarray:
        return waypoints_of_actions(np.array(self._rows))


class _Prepared:
    """A scene with its reference, its first observation and the means to draw it."""

    def __init__(self, world: World, version: Version, cameras: tuple[str, ...], size: int) -> None:
        reference, _ = best_proposal(world, version)
        self.scene: Scene = world.scene(reference)
        s = world.start
        self.car = Car(*(float(s[i]) for i in (X, Y, HEADING, VX, AX, STEER, YAW_RATE)))
        self.others = world.tracks.poses[:, 0]
        self.observer = Observer(world, cameras, size)
        self.seen = self.observer.look(self.car, self.others, 0.0)
