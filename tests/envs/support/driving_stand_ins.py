"""Bench2Drive and navsim as processes, whose stand-ins take the place of CARLA and of navsim's packages.

The leaderboard runs with an agent or behind a route server; the exporter makes folders of scenes.
"""

import asyncio
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np
import psutil

from tests.envs.driving.scores.drawn import draw_scene
from vla_rl.envs.driving.scores.scene_files import save_scene

ENVS = Path(__file__).parents[1]
REPOSITORY = ENVS.parents[1]
CARLA_SIDE = REPOSITORY / "vla_rl" / "envs" / "bench2drive" / "carla_side"
CARLA = ENVS / "bench2drive" / "fake_carla.py"
NAVSIM = ENVS / "navsim" / "fake_navsim.py"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
SIZE = 16
EXPORTER = REPOSITORY / "vla_rl" / "envs" / "navsim" / "export_scenes.py"
SPLIT = "defaults:\n- scene_filter: drawn\n"
FILTER = "_target_: navsim.common.dataclasses.SceneFilter\nnum_history_frames: 4\nhas_route: true\n"


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
        *(sys.executable, str(CARLA), "leaderboard", "--routes-subset", "7"),
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
    """A route server whose leaderboard is the stand-in; its address.

    It is told to end, and has to leave no process and no file.
    """
    words = [
        *(
            sys.executable,
            str(CARLA),
            "leaderboard",
            "--routes-subset",
            "{route}",
            "--agent",
            "{agent}",
        ),
        *("--agent-config", "{config}", "--checkpoint", "{checkpoint}", *more),
    ]
    folder = tempfile.TemporaryDirectory()
    server = subprocess.Popen(
        [
            *(sys.executable, str(CARLA_SIDE / "vla_rl_route_server.py")),
            *("--listen", "127.0.0.1:0", "--command", shlex.join(words)),
        ],
        env={**ENVIRONMENT, "TMPDIR": folder.name},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with folder:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1]
            leaderboards = psutil.Process(server.pid).children(recursive=True)
            server.terminate()
            _, errors = server.communicate(timeout=20)
            assert server.returncode == 143, errors
            assert psutil.wait_procs(leaderboards, timeout=20)[1] == []
            assert os.listdir(folder.name) == []
        finally:
            server.kill()
            server.communicate()


def export(
    root: Path, frames: dict[str, dict[str, Any]], two_stages: Any = None
) -> subprocess.CompletedProcess[str]:
    """Run the exporter over drawn scenes; `frames` may change what the logs say of each token."""
    (root / "cache").mkdir(parents=True)
    (root / "sensors").mkdir()
    known = {}
    for number, (token, changes) in enumerate(frames.items()):
        scene, _ = draw_scene(changes.pop("seed", number))
        save_scene(root / "cache" / f"{token}.npz", scene)
        image = np.full((90, 160, 3), 20 * number, np.uint8)
        imageio.imwrite(root / "sensors" / f"{token}.png", image)
        known[token] = {
            "log_name": "log",
            "time_us": 500_000 * number,
            "synthetic": False,
            "command": [0, 1, 0, 0],
            **changes,
        }
    (root / "frames.json").write_text(json.dumps(known))
    splits = root / "navsim" / "planning" / "script" / "config" / "common" / "train_test_split"
    (splits / "scene_filter").mkdir(parents=True)
    stages = "" if two_stages is None else f"reactive_all_mapping: {json.dumps(two_stages)}\n"
    (splits / "drawn.yaml").write_text(SPLIT + stages)
    (splits / "scene_filter" / "drawn.yaml").write_text(FILTER)
    return subprocess.run(
        [
            *(sys.executable, str(NAVSIM), str(root), str(EXPORTER)),
            *("--split", "drawn", "--cache", str(root / "cache"), "--logs", str(root)),
            *("--sensors", str(root / "sensors"), "--synthetic-sensors", str(root / "sensors")),
            *("--out", str(root / "scenes")),
        ],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
