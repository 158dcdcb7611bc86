"""One route that `vla_rl_route_server.py` runs: decisions go in, observations and the record come out."""

from collections.abc import Sequence
from typing import Any

from vla_rl.envs.bench2drive.carla_side.vla_rl_wire import (
    VERSION,
    Wire,
    WireError,
    connect,
    require_version,
)
from vla_rl.envs.bench2drive.sensing import RouteView, control_message
from vla_rl.envs.driving.closed_loop import DECISION_STEPS
from vla_rl.envs.driving.control import Control, WaypointFollower
from vla_rl.envs.driving.scores.bench2drive import RouteRecord
from vla_rl.envs.driving.scores.leaderboard_files import record_of
from vla_rl.types import Observation


class ServedRoute:
    """One route at a time on one route server.

    Args:
        server: address of the server, host:port.
        cameras: the front one first.
        image_size: side of the pictures in pixels.
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

    def start(self, route: str) -> Observation:
        """Start a route and return its first observation. Raises: WireError; ValueError."""
        wish = {"kind": "drive", "route": route, "cameras": self._cameras, "size": self._size}
        self._wire.send(wish)
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
            look = step == DECISION_STEPS - 1
            control: Control = follower.control(self._view.car)
            self._wire.send(control_message(control, look))
            message, body = self._wire.expect("tick", "record")
            if message["kind"] == "record":
                record: dict[str, Any] = message["record"]
                return record_of(record)
            self._view.note(message, control)
        return self._view.observe(message, body)

    def close(self) -> None:
        """Leave the server, which ends a running route."""
        self._wire.close()
