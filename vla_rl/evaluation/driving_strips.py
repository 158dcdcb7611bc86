"""Bird's-eye strips of held-out drives: one scene of each layout, for each weight version."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import imageio.v3 as imageio
import numpy as np

from vla_rl.envs.driving.birds_eye import kind_of, pictures_of_drive, pictures_of_plan
from vla_rl.observe import RunDirectory
from vla_rl.types import EpisodeSpec, Trajectory

MOST_LOOKED_AT: Final = 60
"""Held-out scenes among which one of each layout is looked for."""

_NAME: Final = re.compile(r"drive-(\w+)_scene-(\d+)_weights-(\d+)\.jpg")


class DrivePair(NamedTuple):
    """Strips of one scene by the first weights and the last."""

    kind: str
    scene: int
    before: Path
    after: Path
    versions: tuple[int, int]


class DrivingStrips:
    """Writes a strip of each held-out drive that was chosen: the first one of each layout.

    Args:
        episodes: all held-out episodes, in order.
    """

    def __init__(self, episodes: Sequence[EpisodeSpec]) -> None:
        self._episodes = tuple(episodes)
        self._chosen: dict[int, str] | None = None

    async def __call__(
        self, run: RunDirectory, weight_version: int, trajectory: Trajectory
    ) -> None:
        """Write the strip of a trajectory, if its scene was chosen."""
        if self._chosen is None:
            self._chosen = await asyncio.to_thread(_first_of_each_kind, self._episodes)
        number = trajectory.episode.options["init_state_id"]
        if number in self._chosen:
            name = f"drive-{self._chosen[number]}_scene-{number}_weights-{weight_version}.jpg"
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


def _first_of_each_kind(episodes: Sequence[EpisodeSpec]) -> dict[int, str]:
    chosen: dict[str, int] = {}
    for episode in episodes[:MOST_LOOKED_AT]:
        number = episode.options["init_state_id"]
        chosen.setdefault(kind_of(episode.env.kwargs, number), number)
    return {number: kind for kind, number in chosen.items()}


def _write(path: Path, trajectory: Trajectory) -> None:
    episode = trajectory.episode
    rows = [step.chunk.actions[: step.num_executed] for step in trajectory.steps]
    actions: np.ndarray[Any, Any] = np.clip(np.concatenate(rows), -1.0, 1.0)
    is_closed = episode.env.kwargs.get("action") == "moves"
    pictures_of = pictures_of_drive if is_closed else pictures_of_plan
    pictures = pictures_of(episode.env.kwargs, episode.options["init_state_id"], actions)
    path.parent.mkdir(exist_ok=True)
    apart = [np.pad(each, ((0, 0), (0, 4), (0, 0)), constant_values=255) for each in pictures]
    imageio.imwrite(path, np.concatenate(apart, axis=1), quality=85)
