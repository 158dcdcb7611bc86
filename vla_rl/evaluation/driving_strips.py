"""Bird's-eye strips of held-out drives: one scene of each layout, for each weight version."""

import asyncio
import functools
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import imageio.v3 as imageio
import numpy as np

from vla_rl.envs.driving.birds_eye import kind_of, pictures_of_drive, pictures_of_plan
from vla_rl.envs.driving.layouts import LAYOUTS
from vla_rl.reporting import RunDirectory
from vla_rl.types import Trajectory

MOST_LOOKED_AT: Final = 60
"""Held-out scenes among which one of each layout is looked for."""

OPEN_LOOP: Final = "vla_rl/driving-v0"
_NAME: Final = re.compile(r"drive-(\w+)_scene-(\d+)_weights-(\d+)\.jpg")


class DrivePair(NamedTuple):
    """Strips of one scene by the first weights and the last."""

    kind: str
    scene: int
    before: Path
    after: Path
    versions: tuple[int, int]


async def write_drive_strip(run: RunDirectory, weight_version: int, trajectory: Trajectory) -> None:
    """Write the strip of a held-out drive, if its scene is the first one of its layout."""
    kwargs, number = trajectory.episode.env.kwargs, trajectory.episode.options["init_state_id"]
    chosen = await asyncio.to_thread(_chosen_scenes, kwargs["split"], kwargs.get("kind"))
    if number in chosen:
        name = f"drive-{chosen[number]}_scene-{number}_weights-{weight_version}.jpg"
        await asyncio.to_thread(_write, run.path / "strips" / name, trajectory)


def drive_pairs(run: RunDirectory) -> list[DrivePair]:
    """Return the strips of scenes that two weight versions drove, by layout."""
    found: dict[tuple[str, int], dict[int, Path]] = {}
    for path in sorted((run.path / "strips").glob("drive-*.jpg")):
        name = _NAME.fullmatch(path.name)
        if name is not None:
            found.setdefault((name[1], int(name[2])), {})[int(name[3])] = path
    pairs = []
    for (kind, scene), strips in found.items():
        first, last = min(strips), max(strips)
        if first != last:
            pairs.append(DrivePair(kind, scene, strips[first], strips[last], (first, last)))
    return pairs


@functools.cache
def _chosen_scenes(split: str, kind: str | None) -> dict[int, str]:
    """Return the layout of each scene that has a strip.

    If the episodes name their layout, they take the layouts in turn, and their first round is
    chosen.
    """
    if kind is not None:
        return dict.fromkeys(range(len(LAYOUTS)), kind)
    first: dict[str, int] = {}
    for number in range(MOST_LOOKED_AT):
        first.setdefault(kind_of({"split": split}, number), number)
    return {number: kind for kind, number in first.items()}


def _write(path: Path, trajectory: Trajectory) -> None:
    episode = trajectory.episode
    rows = [step.chunk.actions[: step.num_executed] for step in trajectory.steps]
    actions: np.ndarray[Any, Any] = np.clip(np.concatenate(rows), -1.0, 1.0)
    pictures_of = pictures_of_plan if episode.env.id == OPEN_LOOP else pictures_of_drive
    pictures = pictures_of(episode.env.kwargs, episode.options["init_state_id"], actions)
    path.parent.mkdir(exist_ok=True)
    apart = [np.pad(each, ((0, 0), (0, 4), (0, 0)), constant_values=255) for each in pictures]
    imageio.imwrite(path, np.concatenate(apart, axis=1), quality=85)
