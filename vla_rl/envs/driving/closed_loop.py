"""Drive a scene in closed loop, by waypoints every 0.5 s or by pedals and wheel at 20 Hz."""

import json
from typing import Any, Final, Literal, cast, get_args

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
from vla_rl.envs.driving.plan_actions import NUM_WAYPOINTS, PlanAction, decode_plan
from vla_rl.envs.driving.planner import best_proposal
from vla_rl.envs.driving.scores import Version, score_waypoints
from vla_rl.envs.driving.scores.bench2drive import RouteRecord
from vla_rl.envs.driving.scores.geometry import (
    Floats,
    boxes_overlap,
    directions,
    project_to_polyline,
)
from vla_rl.envs.driving.scores.motion import (
    CONTROL_S,
    Car,
    Control,
    WaypointFollower,
    drive_car,
    get_box_centre,
)
from vla_rl.envs.driving.scores.scene import PACIFICA
from vla_rl.envs.driving.world import CONE, WALKER, Split, choose_scene, draw_world
from vla_rl.envs.image_env import require_state
from vla_rl.types import Info, Observation

DECISION_STEPS: Final = 10
"""Control steps of one decision by waypoints: 0.5 s."""

GOAL: Final = 60.0
"""Metres of the route that are to be driven."""

LOST: Final = 30.0
"""Metres from the route at which the car has deviated from it, as in Bench2Drive."""

STEP_LIMITS: Final = {
    "waypoints": 40,
    "moves": 40 * NUM_WAYPOINTS,
    "profiles": 40 * NUM_WAYPOINTS,
    "along_route": 40 * NUM_WAYPOINTS,
    "control": 400,
}
"""Steps of 20 s, by action."""

EVENTS: Final = ("collisions_pedestrian", "collisions_layout", "collisions_vehicle", "red_light")

_HALVES: Final = np.array([PACIFICA.half_length, PACIFICA.half_width])
_KINDS: Final = {WALKER: "collisions_pedestrian", CONE: "collisions_layout"}


class ClosedLoopDrivingEnv(gymnasium.Env[Observation, np.ndarray]):
    """Drive 60 m of a route among others that react, and be graded by Bench2Drive's driving score.

    Observation: as `OpenLoopDrivingEnv`'s.
    Action:
        waypoints: float32 [8, 3] in [-1, 1], the moves of a 4 s trajectory, as
            `OpenLoopDrivingEnv`'s rows. One step follows it for 0.5 s.
        moves: float32 [3] in [-1, 1], one waypoint of such a trajectory. The eighth completes it,
            and it is followed for 0.5 s; a chunk of 8 rows is one decision.
        profiles, along_route: float32 [3] in [-1, 1], one row of such a trajectory's profiles,
            otherwise as `moves`.
        control: float32 [3] in [-1, 1]: throttle, steer (left positive) and brake; pedals below 0
            are released. One step is 0.05 s; 10 rows make a chunk of 0.5 s.
    Reward: 0 until the end, then the driving score in [0, 1].
    Ends: `terminated` at the goal, or 30 m from the route; `truncated` after `step_limit`.
    Info: `score` with total (the driving score in [0, 1]), driving_score and completion (0 to 100)
        and the number of events of each kind so far; with `first_plan` also the total of the first
        plan by the version's name, and its sub-scores; `is_success` at the goal without an event.
    Randomness: `reset(seed=...)` draws a scene; `options={"init_state_id": k}` takes scene k.

    Args:
        action: waypoints, moves, profiles, along_route or control.
        split, kind, cameras, image_size, crop, render_mode, route_points: as
            `OpenLoopDrivingEnv`'s.
        step_limit: steps before the episode is truncated; None: 20 s.
        first_plan: version of the score that grades the first plan of the drive too, against the
            recorded traffic, as `OpenLoopDrivingEnv` grades it; None: none. Pedals and wheel have
            no plan.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 2}  # noqa: RUF012  # as gymnasium declares it

    def __init__(
        self,
        action: Literal["waypoints", "moves", "profiles", "along_route", "control"] = "waypoints",
        split: Split = "train",
        kind: str | None = None,
        cameras: tuple[str, ...] = (FRONT,),
        image_size: int = 128,
        step_limit: int | None = None,
        render_mode: str | None = None,
        crop: tuple[float, float] = (0.0, 1.0),
        route_points: int = 0,
        first_plan: Version | None = None,
    ) -> None:
        if action not in STEP_LIMITS:
            raise ValueError(f"action is {action!r}, expected one of {', '.join(STEP_LIMITS)}.")
        if first_plan is not None and first_plan not in get_args(Version):
            raise ValueError(f"first_plan is {first_plan!r}, expected one of {get_args(Version)}.")
        if first_plan is not None and action == "control":
            raise ValueError(
                f"first_plan is {first_plan!r}, but pedals and wheel have no plan; set another action."
            )
        self._first_plan = first_plan
        self.render_mode = render_mode
        self.render_every_step = True
        self._action = action
        is_plan = action in ("profiles", "along_route")
        self._plan: PlanAction = cast(PlanAction, action) if is_plan else "moves"
        self._split, self._kind, self._size = split, kind, image_size
        self._cameras, self._crop = check_cameras(tuple(cameras)), check_crop(crop)
        self._route_points = check_route_points(route_points)
        self._step_limit = step_limit or STEP_LIMITS[action]
        self.observation_space = make_observation_space(
            map(get_camera_key, self._cameras), image_size, route_points
        )
        shape = (NUM_WAYPOINTS, 3) if action == "waypoints" else (3,)
        self.action_space = spaces.Box(-1.0, 1.0, shape, np.float32)
        self._is_over = True
        self._number = -1

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start a scene, drawn from `seed` or named by `options={"init_state_id": k}`."""
        super().reset(seed=seed)
        self._build(choose_scene(options, self.np_random))
        return self._look(), {"is_success": False}

    def _build(self, number: int) -> None:
        if number != self._number:  # the members of a group ask for the same scene
            self._world = draw_world(number, self._split, self._kind)
            self._observer = Observer(
                self._world, self._cameras, self._size, self._crop, self._route_points
            )
            self._number = number
        self._car = make_car(self._world.start)
        self._traffic = self._world.traffic.copy()
        self._poses = self._traffic.poses()
        self._sizes = self._traffic.sizes()
        self._ticks, self._steps, self._is_over = 0, 0, False
        self._rows: list[list[float]] = []
        self._events: dict[str, int] = {}
        self._touched: set[int] = set()
        self._plan_score: dict[str, float] = {}
        along, _ = project_to_polyline(self._centre[None, :2], self._world.roads.route)
        self._start = float(along[0])
        self._reached, self._away = 0.0, 0.0
        self._last_observation: Observation | None = None

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Drive for 0.5 s by waypoints, or for 0.05 s by pedals and wheel; or add a waypoint."""
        if self._is_over:
            raise gymnasium.error.ResetNeeded(
                "the episode is over or has not begun; call reset() first."
            )
        given = np.asarray(action, np.float64)
        if given.shape != self.action_space.shape or not np.isfinite(given).all():
            is_shape_right = given.shape == self.action_space.shape
            raise ValueError(
                f"the action has {'NaN or infinity' if is_shape_right else f'the shape {given.shape}'}, "
                f"expected {self.action_space.shape} finite numbers"
                f"{'; resample waypoints to 2 Hz over 4 s' if self._action == 'waypoints' else ''}."
            )
        if self._action == "waypoints":
            self._follow(given)
        elif self._action != "control":
            self._rows.append(given.tolist())
            if len(self._rows) == NUM_WAYPOINTS:
                self._follow(np.array(self._rows))
                self._rows = []
        else:
            throttle, steer, brake = given.tolist()
            self._tick(
                Control(
                    min(max(throttle, 0.0), 1.0),
                    min(max(steer, -1.0), 1.0),
                    min(max(brake, 0.0), 1.0),
                )
            )
            self._measure()
        self._steps += 1
        terminated = self._reached >= GOAL or self._away > LOST
        truncated = not terminated and self._steps >= self._step_limit
        self._is_over = terminated or truncated
        record = self._record()
        total = record.driving_score / 100.0
        score = {"total": total, "driving_score": record.driving_score}
        events = {name: float(self._events.get(name, 0)) for name in EVENTS}
        info: Info = {
            "is_success": record.is_success,
            "score": {
                **score,
                "completion": record.completion,
                **events,
                **self._plan_score,
            },
        }
        reward = total if self._is_over else 0.0
        return self._look(), reward, terminated, truncated, info

    def render(self) -> np.ndarray | None:
        """Return the scene from above; None without a render mode."""
        if self.render_mode is None:
            return None
        return self._observer.from_above(self._car, self._poses[1:], self._world.roads.route[::5])

    def get_state(self) -> dict[str, Any]:
        """Return all state that later steps depend on, as plain values."""
        return {
            "number": self._number,
            "car": list(self._car),
            "along": self._traffic.along.copy(),
            "speeds": self._traffic.speeds.copy(),
            "counts": [self._ticks, self._steps],
            "rows": [list(row) for row in self._rows],
            "events": dict(self._events),
            "touched": sorted(self._touched),
            "plan_score": dict(self._plan_score),
            "reached": self._reached,
            "away": self._away,
            "is_over": self._is_over,
            "rng": json.dumps(self.np_random.bit_generator.state),
        }

    def set_state(self, state: dict[str, Any]) -> Observation:
        """Continue from a state that `get_state` returned, and return the observation there.

        Raises: ValueError for anything else.
        """
        require_state(state, self.get_state())
        self._build(state["number"])
        self._car = Car(*state["car"])
        self._traffic.along = np.array(state["along"], np.float64)
        self._traffic.speeds = np.array(state["speeds"], np.float64)
        self._ticks, self._steps = state["counts"]
        self._rows = [list(row) for row in state["rows"]]
        self._events, self._touched = dict(state["events"]), set(state["touched"])
        self._plan_score = dict(state["plan_score"])
        self._reached, self._away = state["reached"], state["away"]
        self._is_over = state["is_over"]
        self.np_random.bit_generator.state = json.loads(state["rng"])
        self._poses = self._traffic.poses()
        return self._look()

    @property
    def _centre(self) -> Floats:
        return get_box_centre(self._car)

    def _follow(self, actions: Floats) -> None:
        """Follow a trajectory for 0.5 s."""
        route = self._observer.route(self._car)
        waypoints = decode_plan(actions, self._plan, self._car.speed, route)
        if self._ticks == 0 and self._first_plan is not None:
            self._plan_score = self._graded(waypoints, self._first_plan)
        follower = WaypointFollower(waypoints.tolist(), self._car)
        for _ in range(DECISION_STEPS):
            self._tick(follower.control(self._car))
        self._measure()

    def _graded(self, waypoints: Floats, version: Version) -> dict[str, float]:
        """Return the total and the sub-scores of a plan against what was recorded."""
        scene = self._world.scene(best_proposal(self._world, version)[0])
        scores = score_waypoints(scene, waypoints[None], version)
        return {version: float(scores.total[0]), **scores.get_sub_scores(0)}

    def _tick(self, control: Control) -> None:
        """Advance by 0.05 s; the others every second time."""
        was_before = self._before_line()
        self._car = drive_car(self._car, control)
        self._ticks += 1
        if was_before and not self._before_line() and self._is_red():
            self._note("red_light")
        # the others step at 10 Hz, as in recordings and scores; the car at the 20 Hz of CARLA's
        # leaderboard
        if self._ticks % 2 == 0:
            self._step_others()

    def _step_others(self) -> None:
        poses, speeds = self._poses, self._traffic.speeds.copy()
        # the first road user is the car's recorded driver; the others see the policy's car in its
        # stead
        poses[0], speeds[0] = self._centre, self._car.speed
        has_signal, red = self._world.roads.stop is not None, self._is_red()
        self._traffic.step(poses, speeds, has_signal and red, has_signal and not red)
        self._poses = self._traffic.poses()
        offset = self._poses[1:, :2] - poses[0, :2]
        # centres farther apart than 6 m cannot touch: half diagonals are 2.8 m and 2.5 m
        near = np.flatnonzero((offset**2).sum(-1) < 36.0) + 1
        if len(near):
            self._note_collisions(poses[0], near)

    def _note_collisions(self, centre: Floats, near: np.ndarray) -> None:
        repeated = np.repeat(centre[None], len(near), 0)
        others = self._poses[near]
        meet = boxes_overlap(
            repeated[:, :2],
            directions(repeated[:, 2]),
            _HALVES,
            others[:, :2],
            directions(others[:, 2]),
            self._sizes[near, :2] / 2,
        )
        # each road user is one event, however long the boxes overlap
        for number in near[meet].tolist():
            if number not in self._touched:
                self._touched.add(number)
                kind = int(self._traffic.kinds[number])
                self._note(_KINDS.get(kind, "collisions_vehicle"))

    def _note(self, event: str) -> None:
        self._events[event] = self._events.get(event, 0) + 1

    def _is_red(self) -> bool:
        return self._world.signal.is_red(self._ticks * CONTROL_S)

    def _before_line(self) -> bool:
        """Return if a stop line of the route lies ahead of the front bumper."""
        stop, roads = self._world.roads.stop, self._world.roads
        if stop is None:
            return False
        position, after = roads.route[int(stop)], roads.route[int(stop) - 1]
        way = position - after
        return (
            float((position[0] - self._car.x) * way[0] + (position[1] - self._car.y) * way[1])
            > PACIFICA.front_length
        )

    def _measure(self) -> None:
        along, away = project_to_polyline(self._centre[None, :2], self._world.roads.route)
        self._reached = max(self._reached, float(along[0]) - self._start)
        self._away = float(away[0])

    def _record(self) -> RouteRecord:
        done = min(max(self._reached / GOAL, 0.0), 1.0)
        status = "Completed" if done >= 1.0 else "Failed"
        return RouteRecord(str(self._number), status, 100.0 * done, self._events)

    def _look(self) -> Observation:
        # an image takes about a millisecond, most of a step's time, and in a chunk nobody looks at
        # those in between
        if self.render_every_step or self._is_over or self._last_observation is None:
            time_s = self._ticks * CONTROL_S
            self._last_observation = self._observer.look(self._car, self._poses[1:], time_s)
        return dict(self._last_observation)
