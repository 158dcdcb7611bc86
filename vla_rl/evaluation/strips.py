"""Film strips: a few frames of a held-out episode side by side, small enough to keep."""

import asyncio
from pathlib import Path

import imageio.v3 as imageio
import numpy as np

from vla_rl.evaluation.results import Key, result_of
from vla_rl.reporting import RunDirectory
from vla_rl.types import Trajectory

NUM_MOMENTS = 8


async def write_strip(run: RunDirectory, weight_version: int, trajectory: Trajectory) -> None:
    """Write `NUM_MOMENTS` frames of the fixed camera, from first to last, into one JPEG."""
    path = strip_path(run, weight_version, result_of(trajectory).key)
    await asyncio.to_thread(_write, path, trajectory)


def strip_path(run: RunDirectory, weight_version: int, episode: Key) -> Path:
    """Return the file of a held-out episode's strip."""
    task, init_state_id, scene_seed = episode
    name = f"{task.replace('/', '-')}_init-{init_state_id}_scene-{scene_seed}_weights-{weight_version}.jpg"
    return run.path / "strips" / name


def _write(path: Path, trajectory: Trajectory) -> None:
    frames = [
        *(step.observation["image"] for step in trajectory.steps),
        trajectory.final_observation["image"],
    ]
    chosen = np.linspace(0, len(frames) - 1, min(NUM_MOMENTS, len(frames))).round().astype(int)
    path.parent.mkdir(exist_ok=True)
    imageio.imwrite(path, np.concatenate([frames[index] for index in chosen], axis=1), quality=85)
