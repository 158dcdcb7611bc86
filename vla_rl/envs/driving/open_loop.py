"""One decision a scene: a 4 s trajectory that NavSim's score grades against recorded traffic."""

from functools import lru_cache
from typing import Any

import numpy as np

from vla_rl.envs.driving.control import Car
from vla_rl.envs.driving.moves import NUM_WAYPOINTS
from vla_rl.envs.driving.observing import (
    FRONT,
    Observer,
    checked_cameras,
    checked_crop,
    checked_route_points,
    space_of,
)
from vla_rl.envs.driving.one_decision import KEPT_SCENES, OneDecisionEnv
from vla_rl.envs.driving.paths import Floats
from vla_rl.envs.driving.plan_actions import PlanAction, plan_of_poses
from vla_rl.envs.driving.planner import CAREFUL, Manner, best_proposal, path_of, proposals
from vla_rl.envs.driving.scores import Scene, Version
from vla_rl.envs.driving.scores.vehicle import AX, HEADING, STEER, VX, YAW_RATE, X, Y
from vla_rl.envs.driving.traffic import STEP_S
from vla_rl.envs.driving.world import NUM_SCENES, Split, World, draw_world
from vla_rl.types import Observation


class OpenLoopDrivingEnv(OneDecisionEnv["_Prepared"]):
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
        image_size: side of the pictures in pixels.
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
        self._cameras, self._size = checked_cameras(tuple(cameras)), image_size
        self._crop, self._route_points = checked_crop(crop), checked_route_points(route_points)
        super().__init__(
            NUM_SCENES,
            space_of(self._cameras, image_size, route_points),
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
        reference = self._scene.scene_of(self._version).reference
        assert reference is not None
        return self._plan_of(reference)

    def proposed_actions(self, number: int, manner: Manner = CAREFUL) -> np.ndarray:
        """Return one of the 15 trajectories that the planner proposes, as 8 actions.

        It chooses from the careful ones.
        """
        return self._plan_of(proposals(self._scene.world, manner)[number])

    def _plan_of(self, poses: Floats) -> np.ndarray:
        path = path_of(poses, self._scene.world.roads.route)
        seen = self._scene.seen
        return plan_of_poses(poses[::5], path, self._action, self._scene.car.speed, seen["route"])

    def _prepare(self, number: int) -> "_Prepared":
        return _prepared(
            number,
            self._split,
            self._kind,
            self._cameras,
            self._size,
            self._crop,
            self._route_points,
        )


class _Prepared:
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
        self.car = _car_in(world.start)
        self.others = world.tracks.poses[:, 0]
        self.observer = Observer(world, cameras, size, crop, route_points)
        self.seen = self.observer.look(self.car, self.others, 0.0)

    def scene_of(self, version: Version) -> Scene:
        """Return the scene with the proposal that this version of the score likes best."""
        if version not in self._scenes:
            self._scenes[version] = self.world.scene(best_proposal(self.world, version)[0])
        return self._scenes[version]

    def seen_after(self, motion: Floats) -> Observation:
        """Return what is seen at the end of a motion [41, 11], among the recorded others."""
        last = len(motion) - 1
        others = self.world.tracks.poses[:, last]
        return self.observer.look(_car_in(motion[last]), others, last * STEP_S)


@lru_cache(maxsize=KEPT_SCENES)
def _prepared(
    number: int,
    split: Split,
    kind: str | None,
    cameras: tuple[str, ...],
    size: int,
    crop: tuple[float, float],
    route_points: int,
) -> _Prepared:
    world = draw_world(number, split, kind)
    return _Prepared(world, cameras, size, crop, route_points)


def _car_in(state: Floats) -> Car:
    """Return the car in a state [11] of the scores."""
    return Car(*(float(state[i]) for i in (X, Y, HEADING, VX, AX, STEER, YAW_RATE)))
