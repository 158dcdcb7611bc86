"""Bench2Drive's routes, both ways, with a stand-in for CARLA and its leaderboard."""

import ast
import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from driving_stand_ins import CARLA, CARLA_SIDE, ENVIRONMENT, SIZE, drive, route_server

import vla_rl.envs  # noqa: F401  # registers ours
from vla_rl.envs.bench2drive.carla_side.vla_rl_wire import MAGIC, PREFIX, Wire, WireError, packed
from vla_rl.envs.bench2drive.policy_host import PolicyHost, find_cameras
from vla_rl.envs.bench2drive.sensing import CAMERAS, RouteView
from vla_rl.envs.driving.scores.bench2drive import FirstJunction
from vla_rl.envs.driving.scores.leaderboard_files import (
    read_first_junctions,
    read_records,
    read_rides,
)
from vla_rl.types import Observation

AHEAD = np.tile(np.array([0.2, 0.0, 0.0], np.float32), (8, 1))
"""Moves of 4.4 m: some 9 m/s straight on."""


def test_the_carla_side_is_python_3_8_and_needs_nothing_beside_its_standard_library() -> None:
    allowed = {*sys.stdlib_module_names, "carla", "agents", "leaderboard", "vla_rl_wire"}
    for file in CARLA_SIDE.glob("*.py"):
        tree = ast.parse(file.read_text(), feature_version=(3, 8))
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.split(".")[0] for name in names} <= allowed, file
    agent = ast.parse((CARLA_SIDE / "vla_rl_agent.py").read_text())
    cameras = next(
        ast.literal_eval(node.value)
        for node in agent.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CAMERAS"
    )
    assert tuple(cameras) == CAMERAS


def host_of(seen: list[Observation], timeout_s: float = 60.0) -> PolicyHost:
    async def decide(observation: Observation) -> np.ndarray:
        seen.append(observation)
        return AHEAD

    cameras = find_cameras(("image", "image_front_left"))
    return PolicyHost(decide, ("127.0.0.1", 0), cameras, SIZE, timeout_s)


async def test_a_policy_drives_a_route_of_the_leaderboard(tmp_path: Path) -> None:
    seen: list[Observation] = []
    async with host_of(seen) as host:
        status, errors = await drive(tmp_path, host.port)
    assert status == 0, errors
    (record,) = read_records([tmp_path / "results.json"])
    assert (record.route_id, record.is_success, record.efficiency) == ("7", True, 80.0)
    first = seen[0]
    assert first["image"].shape == (SIZE, SIZE, 3)
    assert first["image_front_left"][0, 0].tolist() == [30, 20, 10]
    # the route leads straight ahead, whatever CARLA's axes
    np.testing.assert_allclose(first["route"][:, 0], 5.0 * np.arange(1, 11), atol=1.0)
    np.testing.assert_allclose(first["route"][:, 1], 0.0, atol=0.05)
    assert first["instruction"] == "go straight"
    assert first["state"][0] == 5.0
    # a plan lasts for ten ticks; the speed that it asks for is reached
    assert 4 <= len(seen) <= 10
    assert seen[-1]["state"][0] > 6.0
    # one entry for each tick, in the folder that the results name
    (ride,) = read_rides([record], tmp_path / "rides")
    assert 10 * (len(seen) - 1) < len(ride.yaw_rate) <= 10 * len(seen)
    np.testing.assert_allclose((ride.acceleration * ride.right).sum(-1), 0.0, atol=0.1)


async def test_an_agent_with_images_of_another_size_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with host_of([]) as host:
        with caplog.at_level(logging.WARNING):
            status, errors = await drive(tmp_path, host.port, size=8)
    assert status != 0
    assert "the image of front is 8 x 8" in errors
    assert "set the agent's size to 16" in caplog.text


async def test_a_silent_agent_and_one_of_another_version_end_their_route_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with host_of([], timeout_s=0.2) as host:
        with caplog.at_level(logging.WARNING):
            reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
            assert b"sent nothing for 0.2 s" in await reader.read()
            writer.close()

            def converse() -> str:
                other = Wire(socket.create_connection(("127.0.0.1", host.port)), "the host", 60)
                other.send({"kind": "hello", "version": 7, "route": "x", "plan": []})
                with pytest.raises(WireError) as caught:
                    other.expect("welcome")
                other.close()
                return str(caught.value)

            assert "speaks version 7, expected 1" in await asyncio.to_thread(converse)
    assert host.num_routes == 0


def make(server: str, **more: Any) -> gymnasium.Env[Any, Any]:
    kwargs = {"servers": (server,), "routes": ("7", "8"), "image_size": SIZE, **more}
    return gymnasium.make("vla_rl/bench2drive-v0", disable_env_checker=True, **kwargs)


def test_a_route_is_an_episode_that_the_leaderboard_grades() -> None:
    with route_server() as server:
        env = make(server)
        observation, _ = env.reset(options={"init_state_id": 1})
        assert observation in env.observation_space
        env.reset(options={"init_state_id": 0})  # the running route ends
        terminated, num_steps = False, 0
        while not terminated:
            observation, reward, terminated, truncated, info = env.step(AHEAD[0])
            num_steps += 1
            assert not truncated
            assert terminated or reward == 0.0
        assert num_steps % 8 == 0
        assert (reward, info["is_success"]) == (1.0, True)
        assert info["score"]["driving_score"] == 100.0
        env.reset(options={"init_state_id": 1})
        env.close()


def test_a_server_that_is_told_to_end_ends_the_leaderboard_that_it_runs() -> None:
    with route_server("--ticks", "100000") as server:
        env = make(server)
        env.reset()
    env.close()


def test_a_leaderboard_that_fails_is_named_with_its_exit_code() -> None:
    broken = "exit code 2 before its agent connected"
    with route_server("--no-such-option") as server, pytest.raises(WireError, match=broken):
        make(server).reset()


async def test_a_host_that_closes_ends_the_routes_of_its_agents() -> None:
    started = asyncio.Event()

    async def never(observation: Observation) -> np.ndarray:
        started.set()
        await asyncio.Event().wait()
        return AHEAD

    async with PolicyHost(never, ("127.0.0.1", 0), ("front",), SIZE) as host:
        reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
        plan = [[0.0, 0.0, 4], [0.0, 1.0, 4]]
        hello = {"kind": "hello", "version": 1, "route": "x", "plan": plan}
        tick = {
            "kind": "tick",
            "gps": [0.0, 0.0],
            "speed": 0.0,
            "imu": [0.0] * 7,
            "pictures": {"front": [SIZE, SIZE]},
        }
        writer.write(packed(hello) + packed(tick, bytes(4 * SIZE * SIZE)))
        await started.wait()
    assert b"welcome" in await reader.read()
    assert reader.at_eof()
    writer.close()


@contextmanager
def answering(answer: Callable[[Wire], Any]) -> Iterator[str]:
    """A server that answers one connection in a thread; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            wire = Wire(listener.accept()[0], "the client", 60)
            answer(wire)
            wire.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(60)


@pytest.mark.parametrize("header", [b"\xff", b"{", b"7", b"[1]", b"[" * 100_000, b"null"])
def test_a_header_that_holds_no_fields_is_named_with_the_peer(header: bytes) -> None:
    prefix = PREFIX.pack(MAGIC, len(header), 0)
    with answering(lambda wire: wire._socket.sendall(prefix + header)) as server:  # noqa: SIM117
        with pytest.raises(WireError, match=r"route server at 127.* sent a header"):
            make(server).reset()


def test_a_silent_server_one_of_another_version_and_no_server_are_named() -> None:
    gone = threading.Event()
    with answering(lambda wire: gone.wait(60)) as silent:
        with pytest.raises(WireError, match=r"route server at 127.* sent nothing for 0\.2 s"):
            make(silent, timeout_s=0.2).reset()
        gone.set()
    other_version = {"kind": "welcome", "version": 3}
    other = "speaks version 3, expected 1; copy the files"
    with answering(lambda wire: wire.send(other_version)) as server:  # noqa: SIM117
        with pytest.raises(WireError, match=other):
            make(server).reset()
    with pytest.raises(WireError, match="does not answer"):
        make("127.0.0.1:1").reset()
    with pytest.raises(ValueError, match="the server is 'nowhere', expected host:port"):
        make("nowhere").reset()


def test_a_process_without_a_server_of_its_own_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLA_RL_PROCESS_INDEX", "2")
    with pytest.raises(ValueError, match="process 2 has no server: there are 1"):
        make("127.0.0.1:1")


def test_turns_and_slopes_of_carla_come_out_in_our_frame() -> None:
    east = 111_319.49  # metres of a degree at the equator
    plan = [[0.0, 0.0, 4], [0.0, 50 / east, 5], [50 / east, 50 / east, 1]]
    view = RouteView(plan, ("front",), SIZE)
    tick = {
        "gps": [0.0, 20 / east],
        "speed": 4.0,
        "imu": [1.0, 0.0, 9.8, 0.0, 0.0, -0.2, np.pi / 2],  # CARLA: facing east, turning left
        "pictures": {"front": [SIZE, SIZE]},
    }
    view.note(tick, None)
    observation = view.observe(tick, bytes(4 * SIZE * SIZE))
    assert observation["instruction"] == "turn left"  # RoadOption 5, a lane change to the left
    np.testing.assert_allclose(observation["state"][:5], [4.0, 0.0, 1.0, 0.8, 0.2], atol=1e-6)
    # 30 m straight on, then the route bends to the north, which is left
    np.testing.assert_allclose(observation["route"][5], [30.0, 0.0], atol=0.1)
    np.testing.assert_allclose(observation["route"][9], [30.0, 20.0], atol=0.1)
    view.note({**tick, "imu": [0.0] * 6 + [None]}, None)  # a compass without a value yet
    assert view.car.heading == pytest.approx(0.0)


def test_the_state_of_a_route_ends_with_its_nearest_points_if_asked() -> None:
    plan = [[0.0, 0.0, 4], [0.0, 0.001, 4]]
    tick = {
        "gps": [0.0, 0.0],
        "speed": 4.0,
        "imu": [0.0] * 6 + [np.pi / 2],  # facing east, along the route
        "pictures": {"front": [SIZE, SIZE]},
    }
    view = RouteView(plan, ("front",), SIZE, route_points=2)
    view.note(tick, None)
    state = view.observe(tick, bytes(4 * SIZE * SIZE))["state"]
    np.testing.assert_allclose(state[10:], [5.0, 0.0, 10.0, 0.0], atol=0.01)


ROUTE = (
    '<route id="{}" town="{}"><waypoints><position x="0.0" y="0" z="0"/><position x="20.0" y="0" '
    'z="0"/><position x="{}" y="0" z="0"/></waypoints></route>'
)


def write_junctions(folder: Path, *routes: tuple[str, str, float]) -> tuple[Path, str]:
    """Write the file for routes through towns whose junctions are at 30 to 40 m; its errors."""
    for town in (folder / "maps" / "OpenDrive", folder / "maps" / "Town12" / "OpenDrive"):
        town.mkdir(parents=True)
    (folder / "maps" / "OpenDrive" / "Town01.xodr").write_text("30 40")
    (folder / "maps" / "Town12" / "OpenDrive" / "Town12.xodr").write_text("0 10")
    xml = folder / "routes.xml"
    xml.write_text("<routes>" + "".join(ROUTE.format(*route) for route in routes) + "</routes>")
    out = folder / "first_junctions.json"
    words = ["--routes", str(xml), "--maps", str(folder / "maps"), "--out", str(out)]
    script = str(CARLA_SIDE / "vla_rl_first_junctions.py")
    done = subprocess.run(
        [sys.executable, str(CARLA), "planner", script, *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    return out, done.stderr


def test_first_junctions_of_small_and_large_towns_are_written_and_read(tmp_path: Path) -> None:
    out, errors = write_junctions(
        tmp_path, ("1", "Town12", 60.0), ("2", "Town01", 60.0), ("3", "Town01", 25.0)
    )
    assert "route 1 (3 of 3) on Town12" in errors
    assert read_first_junctions(out) == {
        "1": FirstJunction(1, 60),
        "2": FirstJunction(31, 60),  # 30 points lie before the one at 30 m
        "3": FirstJunction(None, 25),
    }


def test_a_town_without_a_map_is_named_with_both_places(tmp_path: Path) -> None:
    out, errors = write_junctions(tmp_path, ("1", "Town13", 60.0))
    assert not out.exists()
    assert "the map of Town13 is neither" in errors
    assert "OpenDrive/Town13.xodr nor" in errors


def test_the_format_that_is_written_is_the_one_that_is_read(tmp_path: Path) -> None:
    out, _ = write_junctions(tmp_path, ("1", "Town12", 60.0))
    assert json.loads(out.read_text())["format"] == 1
