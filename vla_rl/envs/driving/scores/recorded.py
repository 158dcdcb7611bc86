"""Recorded scenes: a scene file with its token, its place in a log, and what the car's cameras saw.

    scenes = recorded_scenes(folder)              every .npz file of the folder, by name
    recorded = read_recorded(scenes[0])
    recorded.scene, recorded.pictures["cam_f0"]

Beside the arrays of `scene_files` a file holds token, log_name, time_s, is_synthetic, command [4],
cameras [C] and pictures [C], the cameras' files relative to the scene's folder.
`vla_rl/envs/navsim/export_scenes.py` writes such folders from a navsim install.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.scene import Scene
from vla_rl.envs.driving.scores.scene_files import read_arrays, scene_of, texts_in
from vla_rl.util.foreign_data import reading_file

NUM_COMMANDS: Final = 4
"""Left, straight, right, unknown."""

TWO_STAGES_FILE: Final = "two_stages.json"
"""File of a folder with the frames of both stages: a list of [now, before, [[now, before], ...]]."""

_FIELDS: Final = ("token", "log_name", "time_s", "is_synthetic", "command", "cameras", "pictures")


@dataclass(frozen=True)
class RecordedScene:
    """One frame of a log.

    Args:
        token: name of the frame.
        log_name: name of its log.
        time_s: time in the log.
        is_synthetic: True for frames of the second stage, which were rendered.
        command: [4], one-hot vector of left, straight, right, unknown.
        pictures: file of each camera.
        scene: what trajectories are graded in.
    """

    token: str
    log_name: str
    time_s: float
    is_synthetic: bool
    command: Floats
    pictures: Mapping[str, Path]
    scene: Scene


class TwoStages(NamedTuple):
    """Frames of one two-stage group.

    Attributes:
        now: token of the first stage's frame.
        before: token of the frame 0.5 s before it.
        second: tokens of the second stage's frames, each with the one before it.
    """

    now: str
    before: str
    second: tuple[tuple[str, str], ...]


def recorded_scenes(folder: Path) -> list[Path]:
    """Return the scene files of a folder, by name. Raises: ValueError if there are none."""
    found = sorted(folder.glob("*.npz")) if folder.is_dir() else []
    if not found:
        raise ValueError(
            f"{folder} has no scene files (*.npz), expected the folder that export_scenes.py wrote."
        )
    return found


def read_recorded(path: Path) -> RecordedScene:
    """Read a recorded scene. Raises: ValueError naming the file."""
    arrays = read_arrays(path)
    missing = [name for name in _FIELDS if name not in arrays]
    if missing:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}: it is a scene, but not a recorded one; write it "
            "with export_scenes.py."
        )
    with reading_file(path, "", "write it with export_scenes.py"):
        command = np.asarray(arrays["command"], np.float64)
        if command.shape != (NUM_COMMANDS,):
            raise ValueError(f"the command has shape {command.shape}, expected (4,), one-hot")
        cameras, files = (texts_in(arrays[name], name) for name in ("cameras", "pictures"))
        (token,), (log_name,) = (texts_in(arrays[name], name) for name in ("token", "log_name"))
        return RecordedScene(
            token=token,
            log_name=log_name,
            time_s=float(arrays["time_s"]),
            is_synthetic=bool(arrays["is_synthetic"]),
            command=command,
            pictures={
                camera: path.parent / file for camera, file in zip(cameras, files, strict=True)
            },
            scene=scene_of(arrays, path),
        )


def read_two_stages(folder: Path) -> list[TwoStages]:
    """Return the two-stage groups of a folder; empty if its split has none.

    Raises: ValueError naming the file, if it is damaged.
    """
    path = folder / TWO_STAGES_FILE
    if not path.exists():
        return []
    with reading_file(path, " is damaged", "export the scenes again"):
        return [
            TwoStages(now, before, tuple((first, second) for first, second in pairs))
            for now, before, pairs in json.loads(path.read_text(encoding="utf-8"))
        ]
