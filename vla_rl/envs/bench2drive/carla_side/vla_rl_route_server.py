"""Serve Bench2Drive's routes to a policy that learns on another machine.

    python vla_rl_route_server.py --listen 0.0.0.0:5700 --command "python \
        leaderboard/leaderboard/leaderboard_evaluator.py --routes leaderboard/data/bench2drive220.xml \
        --routes-subset {route} --agent {agent} --agent-config {config} --checkpoint {checkpoint} \
        --port 2000 --traffic-manager-port 8000 --timeout 3600"

Runs one leaderboard at a time, one route each, with vla_rl_agent.py, and passes its messages on to
the policy; at the end it sends the leaderboard's record of the route. Start one server for each
CARLA. Needs Python 3.8 and its standard library.
"""

# ruff: noqa: UP041  # in Python 3.8 socket.timeout is no TimeoutError
from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from vla_rl_wire import VERSION, Wire, WireError, require_version

FOLDER = os.path.dirname(os.path.abspath(__file__))


class LeaderboardError(Exception):
    """The leaderboard ended, or did nothing, before the route was done."""


class Leaderboard:
    """One run of the leaderboard on one route, in a process of its own.

    Args:
        command: the command line with {route}, {agent}, {config} and {checkpoint} in it.
        request: the policy's wish: route, cameras, size.
        start_s: longest wait for the agent, CARLA's start included.
        timeout_s: longest wait for one message of the agent.
    """

    def __init__(
        self, command: str, request: dict[str, Any], start_s: float, timeout_s: float
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vla_rl_route_")
        self._start_s, self._timeout_s = start_s, timeout_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        config = os.path.join(self._folder.name, "agent.json")
        self._checkpoint = os.path.join(self._folder.name, "results.json")
        with open(config, "w", encoding="utf-8") as file:
            json.dump(
                {
                    "host": "127.0.0.1",
                    "port": self._listener.getsockname()[1],
                    "cameras": request["cameras"],
                    "size": request["size"],
                    "timeout_s": 3600,  # the policy may learn for a while
                },
                file,
            )
        words = [
            word.format(
                route=request["route"],
                agent=os.path.join(FOLDER, "vla_rl_agent.py"),
                config=config,
                checkpoint=self._checkpoint,
            )
            for word in shlex.split(command)
        ]
        # a session of its own, because the leaderboard starts CARLA, and both have to end with the
        # route
        self._process = subprocess.Popen(words, start_new_session=True)

    def agent(self) -> Wire:
        """Wait for the agent and return the wire to it. Raises: LeaderboardError."""
        deadline = time.monotonic() + self._start_s
        # short, so that a leaderboard that ends at once is reported at once and not after `start_s`
        self._listener.settimeout(0.2)
        while time.monotonic() < deadline:
            try:
                connection, _ = self._listener.accept()
            except socket.timeout:
                if self._process.poll() is not None:
                    raise LeaderboardError(
                        f"the leaderboard ended with exit code {self._process.returncode} before "
                        "its agent connected; its output is that of the route server"
                    ) from None
                continue
            return Wire(connection, "the agent", self._timeout_s)
        raise LeaderboardError(f"no agent connected within {self._start_s:g} s")

    def record(self) -> dict[str, Any]:
        """Wait for the end and return the route's record. Raises: LeaderboardError."""
        try:
            self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired as error:
            raise LeaderboardError("the leaderboard did not end after its route") from error
        try:
            with open(self._checkpoint, encoding="utf-8") as file:
                record: dict[str, Any] = json.load(file)["_checkpoint"]["records"][-1]
                return record
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise LeaderboardError(f"the leaderboard wrote no record: {error!r}") from error

    def close(self) -> None:
        """End the process with everything that it started."""
        self._listener.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()


def drive(policy: Wire, arguments: argparse.Namespace, request: dict[str, Any]) -> None:
    """Run one route for the policy."""
    run = Leaderboard(arguments.command, request, arguments.start_s, arguments.timeout_s)
    try:
        agent = run.agent()
        try:
            relay(agent, policy)
        finally:
            agent.close()
        policy.send({"kind": "record", "record": run.record()})
    except LeaderboardError as error:
        policy.send({"kind": "failed", "why": str(error)})
    finally:
        run.close()


def relay(agent: Wire, policy: Wire) -> None:
    """Pass messages between both until the agent's end."""
    while True:
        try:
            message, body = agent.receive()
        except WireError as error:
            raise LeaderboardError(str(error)) from error
        if message.get("kind") == "end":
            return
        policy.send(message, body)
        answer, body = policy.receive()
        try:
            agent.send(answer, body)
        except WireError as error:
            raise LeaderboardError(str(error)) from error


def serve(listener: socket.socket, arguments: argparse.Namespace) -> None:
    """Serve one policy after the other."""
    while True:
        connection, (host, port) = listener.accept()
        policy = Wire(connection, f"the policy at {host}:{port}", arguments.timeout_s)
        try:
            hello, _ = policy.expect("hello")
            policy.send({"kind": "welcome", "version": VERSION})
            require_version(hello, policy.peer)
            while True:
                request, _ = policy.expect("drive")
                drive(policy, arguments, request)
        except WireError as error:
            print(f"left: {error}", file=sys.stderr, flush=True)
        finally:
            policy.close()


def parsed() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--listen", default="127.0.0.1:5700", help="address to listen at")
    parser.add_argument("--command", required=True, help="the leaderboard's command line")
    parser.add_argument("--start-s", type=float, default=600, help="longest start of a route")
    parser.add_argument("--timeout-s", type=float, default=3600, help="longest silence")
    return parser.parse_args()


def leave(number: int, frame: Any) -> None:
    """End the process as a signal asks, after the running leaderboard and CARLA."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    arguments = parsed()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    host, _, port = arguments.listen.rpartition(":")
    with socket.create_server((host, int(port))) as listener:
        address, taken = listener.getsockname()[:2]
        print(f"serving routes at {address}:{taken}", flush=True)
        serve(listener, arguments)


if __name__ == "__main__":
    main()
