"""Folders of exported scenes: made by the exporter itself, in a process with a stand-in navsim."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import numpy as np

from tests.envs.driving.scores.drawn import draw_scene
from vla_rl.envs.driving.scores.scene_files import save_scene

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[2]
EXPORTER = REPOSITORY / "vla_rl" / "envs" / "navsim" / "export_scenes.py"
SPLIT = "defaults:\n- scene_filter: drawn\n"
FILTER = "_target_: navsim.common.dataclasses.SceneFilter\nnum_history_frames: 4\nhas_route: true\n"


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
            *(sys.executable, str(FOLDER / "fake_navsim.py"), str(root), str(EXPORTER)),
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
