"""Bench2Drive's routes as episodes, served from the machines with CARLA.

A `ServedRoute` is one route that `vla_rl_route_server.py` runs: decisions go in, observations and the
record come out.
"""

import os
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from vla_rl.env_workers.config import PROCESS_INDEX_VARIABLE
from vla_rl.envs.bench2drive.carla_side.vla_rl_wire import (
    VERSION,
    Wire,
    WireError,
    connect,
    require_version,
)
from vla_rl.envs.bench2drive.sensing import (
    CAMERAS,
    FRONT,
    RouteView,
    get_camera_key,
    make_control_message,
)
from vla_rl.envs.driving.closed_loop import DECISION_STEPS
from vla_rl.envs.driving.observing import (
    check_route_points,
    make_observation_space,
)
from vla_rl.envs.driving.plan_actions import NUM_WAYPOINTS, PlanAction, check_action, decode_plan
from vla_rl.envs.driving.scores.bench2drive import RouteRecord
from vla_rl.envs.driving.scores.leaderboard_files import parse_record
from vla_rl.envs.driving.scores.motion import Control, WaypointFollower
from vla_rl.envs.driving.world import choose_scene
from vla_rl.types import Info, Observation


class ServedRoute:
    """One route at a time on one route server.

    Args:
        server: address of the server, host:port.
        cameras: the front one first.
        image_size: side of the images in pixels.
        timeout_s: longest wait for one message.
        start_s: longest wait for a route to start, CARLA included.
        route_points: points of the route that the state has too.
    """

    def __init__(
        self,
        server: str,
        cameras: Sequence[str],
        image_size: int,
        timeout_s: float,
        start_s: float,
        route_points: int,
    ) -> None:
        host, _, port = server.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"the server is {server!r}, expected host:port.")
        self._cameras, self._size, self._start_s = list(cameras), image_size, start_s
        self._wire: Wire = connect(host, int(port), f"the route server at {server}", timeout_s)
        self._timeout_s, self._route_points = timeout_s, route_points
        try:
            self._wire.send({"kind": "hello", "version": VERSION})
            welcome, _ = self._wire.expect("welcome")
            require_version(welcome, self._wire.peer)
        except WireError:
            self._wire.close()
            raise

    def start_route(self, route: str) -> Observation:
        """Start a route and return its first observation. Raises: WireError; ValueError."""
        wish = {"kind": "drive", "route": route, "cameras": self._cameras, "size": self._size}
        self._wire.send(wish)
        # the leaderboard starts CARLA and loads the town before its agent says hello
        self._wire.timeout_s = self._start_s
        hello, _ = self._wire.expect("hello")
        self._wire.timeout_s = self._timeout_s
        require_version(hello, "the agent on the route server")
        self._view = RouteView(hello["plan"], self._cameras, self._size, self._route_points)
        self._wire.send({"kind": "welcome", "version": VERSION})
        tick, body = self._wire.expect("tick")
        self._view.note(tick, None)
        return self._view.observe(tick, body)

    def drive(self, waypoints: list[list[float]]) -> Observation | RouteRecord:
        """Follow waypoints for 0.5 s; return what is seen then, or the record if the route ended.

        Raises: WireError; ValueError.
        """
        follower = WaypointFollower(waypoints, self._view.car)
        for step in range(DECISION_STEPS):
            # the policy sees one tick of ten, and images are nearly all of a tick's bytes
            look = step == DECISION_STEPS - 1
            control: Control = follower.control(self._view.car)
            self._wire.send(make_control_message(control, look))
            message, body = self._wire.expect("tick", "record")
            if message["kind"] == "record":
                record: dict[str, Any] = message["record"]
                return parse_record(record)
            self._view.note(message, control)
        return self._view.observe(message, body)

    def close(self) -> None:
        """Leave the server, which ends a running route."""
        self._wire.close()


class Bench2DriveEnv(gymnasium.Env[Observation, np.ndarray]):
    """Drive a route of Bench2Drive, and be graded by the leaderboard that runs it.

    Observation: as `OpenLoopDrivingEnv`'s, with CARLA's cameras.
    Action: float32 [3] in [-1, 1], one row of a plan, as `OneDecisionEnv`'s. The eighth row of a
        chunk completes the plan, which is followed for 0.5 s; the rows before it only collect.
    Reward: 0 until the route ends, then the driving score in [0, 1].
    Ends: `terminated` when the leaderboard ends the route; `truncated` after `step_limit`.
    Info: with the end, `score` with driving_score and completion (0 to 100) and the number of
        infractions of each kind; `is_success` for a finished route without any.
    Randomness: CARLA's own. `reset(seed=...)` draws a route; `options={"init_state_id": k}` takes
        the k-th of `routes`. The state cannot be saved.

    Args:
        servers: addresses of `vla_rl_route_server.py`, host:port, one for each CARLA. Process k of
            a pool takes the k-th.
        routes: ids of the routes, such as ("1711", "1773").
        cameras: any of CAMERAS, front always among them.
        image_size: side of the images in pixels, which CARLA renders.
        step_limit: rows before the episode is truncated.
        timeout_s: longest wait for one message of the server.
        start_s: longest wait for a route to start, CARLA included.
        action: moves, profiles or along_route.
        route_points: points of the route that the state has too, 0 to 10.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as gymnasium declares it

    def __init__(
        self,
        servers: Sequence[str] = (),
        routes: Sequence[str] = (),
        cameras: tuple[str, ...] = (FRONT,),
        image_size: int = 224,
        step_limit: int = NUM_WAYPOINTS * 400,
        timeout_s: float = 60.0,
        start_s: float = 600.0,
        action: PlanAction = "moves",
        route_points: int = 0,
    ) -> None:
        unknown = sorted(set(cameras) - set(CAMERAS))
        if unknown or FRONT not in cameras:
            raise ValueError(
                f"cameras are {list(cameras)}, expected {FRONT} and any of {', '.join(CAMERAS)}."
            )
        # A text is a sequence of its letters.
        if not servers or not routes or isinstance(servers, str) or isinstance(routes, str):
            raise ValueError(
                f"servers are {servers!r} and routes {routes!r}, expected lists of at least one: "
                'servers=["127.0.0.1:5700"], routes=["1711"].'
            )
        # a CARLA runs one route at a time, so each simulator process has a server of its own
        index = int(os.environ.get(PROCESS_INDEX_VARIABLE, "0"))
        if index >= len(servers):
            raise ValueError(
                f"process {index} has no server: there are {len(servers)}, {list(servers)}; start "
                f"more, or set num_envs to {len(servers)}."
            )
        self._server, self._routes = servers[index], tuple(routes)
        self._cameras = (FRONT, *(name for name in cameras if name != FRONT))
        self._size, self._step_limit = image_size, step_limit
        self._action = check_action(action)
        self._timeouts = (timeout_s, start_s)
        self._route_points = check_route_points(route_points)
        # CARLA's towns are kilometres wide, and a route may lead through all of one
        self.observation_space = make_observation_space(
            map(get_camera_key, self._cameras), image_size, route_points, reach_m=1e5
        )
        self.action_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self._route: ServedRoute | None = None
        self._rows: list[np.ndarray] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, Info]:
        """Start a route; a running one ends. Raises: WireError; ValueError."""
        super().reset(seed=seed)
        number = choose_scene(options, self.np_random, len(self._routes))
        self.close()
        route = ServedRoute(
            self._server, self._cameras, self._size, *self._timeouts, self._route_points
        )
        try:
            self._seen = route.start_route(self._routes[number])
        except (WireError, ValueError):
            route.close()
            raise
        self._route, self._rows, self._num_steps = route, [], 0
        return self._copied(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        """Add one row; the eighth completes the plan, which is driven for 0.5 s."""
        if self._route is None:
            raise gymnasium.error.ResetNeeded(
                "the episode is over or has not begun; call reset() first."
            )
        row = np.asarray(action, np.float64)
        if row.shape != (3,) or not np.isfinite(row).all():
            raise ValueError(f"the row is {action}, expected 3 finite numbers.")
        self._rows.append(np.clip(row, -1.0, 1.0))
        self._num_steps += 1
        info: Info = {"is_success": False}
        reward, terminated = 0.0, False
        if len(self._rows) == NUM_WAYPOINTS:
            rows, speed = np.array(self._rows), float(self._seen["state"][0])
            waypoints = decode_plan(rows, self._action, speed, self._seen["route"])
            outcome = self._route.drive(waypoints.tolist())
            self._rows = []
            if isinstance(outcome, RouteRecord):
                terminated, reward = True, outcome.driving_score / 100.0
                info = {"is_success": outcome.is_success, "score": _make_score(outcome)}
            else:
                self._seen = outcome
        truncated = not terminated and self._num_steps >= self._step_limit
        if terminated or truncated:
            self.close()
        return self._copied(), reward, terminated, truncated, info

    def close(self) -> None:
        """Leave the server, which ends a running route."""
        if self._route is not None:
            self._route.close()
            self._route = None

    def _copied(self) -> Observation:
        return {
            key: value.copy() if isinstance(value, np.ndarray) else value
            for key, value in self._seen.items()
        }


def _make_score(record: RouteRecord) -> dict[str, float]:
    score = {"driving_score": record.driving_score, "completion": record.completion}
    counts = {kind: float(count) for kind, count in record.infractions.items() if count}
    return {"total": record.driving_score / 100.0, **score, **counts}
