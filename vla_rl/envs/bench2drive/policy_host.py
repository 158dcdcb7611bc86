"""Answers CARLA's agents with a policy: one coroutine for each route that is being driven."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import numpy as np

from vla_rl.envs.bench2drive.carla_side.vla_rl_wire import (
    PREFIX,
    VERSION,
    WireError,
    decode_message,
    packed,
    require_version,
    unpack_sizes,
)
from vla_rl.envs.bench2drive.sensing import CAMERAS, RouteView, get_camera_key, make_control_message
from vla_rl.envs.driving.closed_loop import DECISION_STEPS
from vla_rl.envs.driving.plan_actions import NUM_WAYPOINTS, PlanAction, decode_plan
from vla_rl.envs.driving.scores.motion import Control, WaypointFollower
from vla_rl.types import Observation

logger = logging.getLogger(__name__)

Decide = Callable[[Observation], Awaitable[np.ndarray]]
"""Returns an action chunk [8 or more, 3] for an observation."""

GOODBYE_S: Final = 5.0


class PolicyHost:
    """Serves a policy to any number of `VlaRlAgent`s.

    Use it as an asynchronous context manager; it listens from the start to the end of the block. A
    route whose agent is silent, gone or of another version ends with one line in the log; the
    others go on.

    Args:
        decide: the policy.
        address: host and port to listen at; port 0 takes a free one.
        cameras: names of the cameras that the policy reads, the front one first.
        image_size: side of the images in pixels.
        timeout_s: longest wait for one message of an agent.
        action: meaning of the policy's rows: moves, profiles or along_route.
        route_points: points of the route that the policy reads with the state.
    """

    def __init__(
        self,
        decide: Decide,
        address: tuple[str, int],
        cameras: tuple[str, ...],
        image_size: int,
        timeout_s: float = 600.0,
        action: PlanAction = "moves",
        route_points: int = 0,
    ) -> None:
        self._decide, self._address, self._timeout_s = decide, address, timeout_s
        self._action, self._route_points = action, route_points
        self._cameras, self._size = cameras, image_size
        self.num_routes = 0
        self._server: asyncio.Server | None = None
        self._routes: set[asyncio.Task[Any]] = set()

    @property
    def port(self) -> int:
        """The port that it listens at."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def serve(self) -> None:
        """Serve until cancelled."""
        assert self._server is not None
        await self._server.serve_forever()

    async def __aenter__(self) -> "PolicyHost":
        self._server = await asyncio.start_server(self._serve, *self._address)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._routes:
            task.cancel()
        await asyncio.gather(*self._routes, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._routes.add(task)
        agent = _Agent(reader, writer, self._timeout_s)
        try:
            await self._drive(agent)
            self.num_routes += 1
        except (WireError, ValueError) as error:
            logger.warning("a route ended early: %s", error)
            await agent.report_error(str(error))
        except KeyError as error:
            # a message that lacks a field is of files of another version, whose number nobody
            # raised
            logger.warning("a route ended early: %s sent no %s", agent.peer, error)
            await agent.report_error(
                f"a message has no {error}; compare the files with `vla-rl export carla`"
            )
        except asyncio.CancelledError:
            # Python 3.11's streams ask a cancelled task for its exception, which raises in the loop
            pass
        finally:
            self._routes.discard(task)
            writer.close()

    async def _drive(self, agent: "_Agent") -> None:
        hello, _ = await agent.expect("hello")
        require_version(hello, agent.peer)
        agent.peer = f"the agent of {hello['route']}"
        view = RouteView(hello["plan"], self._cameras, self._size, self._route_points)
        await agent.send_to_server({"kind": "welcome", "version": VERSION})
        logger.info("%s drives", agent.peer)
        message, body = await agent.expect("tick")
        view.note(message, None)
        while True:
            seen = view.observe(message, body)
            rows = np.asarray(await self._decide(seen))[:NUM_WAYPOINTS]
            waypoints = decode_plan(rows, self._action, view.car.speed, seen["route"])
            follower = WaypointFollower(waypoints.tolist(), view.car)
            for step in range(DECISION_STEPS):
                control: Control = follower.control(view.car)
                # images of the last tick alone: they are nearly all of a message's bytes
                await agent.send_to_server(
                    make_control_message(control, look=step == DECISION_STEPS - 1)
                )
                message, body = await agent.expect("tick", "end")
                if message["kind"] == "end":
                    return
                view.note(message, control)


class _Agent:
    """The connection of one agent, on the asynchronous side."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timeout_s: float
    ) -> None:
        self._reader, self._writer, self._timeout_s = reader, writer, timeout_s
        self.peer = f"the agent at {writer.get_extra_info('peername')}"

    async def send_to_server(self, message: dict[str, Any]) -> None:
        """Send a message. Raises: WireError."""
        self._writer.write(packed(message))
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._writer.drain()
        except OSError as error:  # TimeoutError is one
            raise WireError(f"{self.peer} takes no message: {error}") from error

    async def expect(self, *kinds: str) -> tuple[dict[str, Any], bytes]:
        """Return the next message, of one of `kinds`. Raises: WireError."""
        try:
            async with asyncio.timeout(self._timeout_s):
                prefix = await self._reader.readexactly(PREFIX.size)
                header_size, body_size = unpack_sizes(prefix, self.peer)
                header = await self._reader.readexactly(header_size)
                body = await self._reader.readexactly(body_size)
        except TimeoutError as error:
            raise WireError(f"{self.peer} sent nothing for {self._timeout_s:g} s") from error
        except (OSError, asyncio.IncompleteReadError) as error:
            raise WireError(f"{self.peer} is gone before its route ended: {error}") from error
        message = decode_message(header, self.peer)
        kind = message.get("kind")
        if kind not in kinds:
            raise WireError(f"{self.peer} sent {kind!r}, expected {' or '.join(kinds)}")
        return message, body

    async def report_error(self, why: str) -> None:
        """Tell the agent why its route ends, if it still listens."""
        try:
            async with asyncio.timeout(GOODBYE_S):
                self._writer.write(packed({"kind": "refused", "why": why}))
                await self._writer.drain()
        except OSError:
            logger.debug("an agent left before it was told why")


def find_cameras(keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the cameras behind a policy's keys, such as image and image_front_left.

    Raises: ValueError for a key of no camera.
    """
    by_key = {get_camera_key(name): name for name in CAMERAS}
    unknown = sorted(set(keys) - set(by_key))
    if unknown or not keys or keys[0] != "image":
        raise ValueError(f"cameras are {list(keys)}, expected image and any of {list(by_key)}.")
    return tuple(by_key[key] for key in keys)
