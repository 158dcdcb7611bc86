"""The stand-in leaderboard as a process, with an agent or behind a route server."""

import asyncio
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[2]
CARLA_SIDE = REPOSITORY / "vla_rl" / "envs" / "bench2drive" / "carla_side"
LEADERBOARD = FOLDER / "fake_leaderboard.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
SIZE = 16


def config_in(folder: Path, port: int, size: int, cameras: str) -> str:
    path = folder / "agent.json"
    path.write_text(
        json.dumps(
            {
                "host": "127.0.0.1",
                "port": port,
                "cameras": cameras.split(),
                "size": size,
                "timeout_s": 60,
                "rides": str(folder / "rides"),
            }
        )
    )
    return str(path)


async def drive(
    folder: Path, port: int, size: int = SIZE, cameras: str = "front front_left"
) -> tuple[int | None, str]:
    """Run the stand-in leaderboard on route 7 and return its exit status and its errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(LEADERBOARD), "--routes-subset", "7"),
        *("--agent", str(CARLA_SIDE / "vla_rl_agent.py")),
        *("--agent-config", config_in(folder, port, size, cameras)),
        *("--checkpoint", str(folder / "results.json")),
        env=ENVIRONMENT,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    return process.returncode, errors.decode()


@contextmanager
def route_server(*more: str) -> Iterator[str]:
    """A route server whose leaderboard is the stand-in; its address."""
    words = [
        *(sys.executable, str(LEADERBOARD), "--routes-subset", "{route}", "--agent", "{agent}"),
        *("--agent-config", "{config}", "--checkpoint", "{checkpoint}", *more),
    ]
    server = subprocess.Popen(
        [
            *(sys.executable, str(CARLA_SIDE / "vla_rl_route_server.py")),
            *("--listen", "127.0.0.1:0", "--command", shlex.join(words)),
        ],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1]
    finally:
        server.kill()
        server.communicate()
