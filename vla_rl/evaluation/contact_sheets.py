"""Images of episodes for people: contact sheets small enough to keep, and frames with captions.

A contact sheet shows a few frames of a held-out episode side by side. `drive_sheets` draws those of drives.
"""

import asyncio
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import imageio.v3 as imageio
import msgspec
import numpy as np

from vla_rl.evaluation.records import EpisodeRecord, Key, make_record
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.videos import add_caption
from vla_rl.types import Trajectory

NUM_MOMENTS = 8


async def write_contact_sheet(
    run: RunDirectory, weight_version: int, trajectory: Trajectory
) -> None:
    """Write `NUM_MOMENTS` frames of the fixed camera, from first to last, into one JPEG."""
    path = contact_sheet_path(run, weight_version, make_record(trajectory).episode_key)
    await asyncio.to_thread(_write_frames, path, trajectory)


def contact_sheet_path(run: RunDirectory, weight_version: int, episode: Key) -> Path:
    """Return the file of a held-out episode's contact sheet."""
    task, start, seed, _ = episode
    name = f"{task.replace('/', '-')}_init-{start}_scene-{seed}_weights-{weight_version}.jpg"
    return run.path / "strips" / name


def _write_frames(path: Path, trajectory: Trajectory) -> None:
    frames = [
        *(step.observation["image"] for step in trajectory.steps),
        trajectory.final_observation["image"],
    ]
    # evenly spaced, so that sheets of episodes of any length have the same width
    chosen = np.linspace(0, len(frames) - 1, min(NUM_MOMENTS, len(frames))).round().astype(int)
    path.parent.mkdir(exist_ok=True)
    imageio.imwrite(path, np.concatenate([frames[index] for index in chosen], axis=1), quality=85)


def drive_sheet_path(run: RunDirectory, kind: str, scene: int, weight_version: int) -> Path:
    """Return the file of a drive's contact sheet."""
    return run.path / "strips" / f"drive-{kind}_scene-{scene}_weights-{weight_version}.jpg"


_NAME: Final = re.compile(r"drive-(\w+)_scene-(\d+)_weights-(\d+)\.jpg")


class DrivePair(NamedTuple):
    """Contact sheets of one scene by the first weights and the last.

    Example:
        DrivePair(kind="roundabout", scene=3, before=..., after=..., versions=(0, 50))
    """

    kind: str
    scene: int
    before: Path
    after: Path
    versions: tuple[int, int]


def drive_pairs(run: RunDirectory) -> list[DrivePair]:
    """Return the contact sheets of scenes that two weight versions drove, by layout."""
    found: dict[tuple[str, int], dict[int, Path]] = {}
    for path in sorted((run.path / "strips").glob("drive-*.jpg")):
        name = _NAME.fullmatch(path.name)
        if name is not None:
            found.setdefault((name[1], int(name[2])), {})[int(name[3])] = path
    pairs = []
    for (kind, scene), sheets in found.items():
        first, last = min(sheets), max(sheets)
        if first != last:
            pairs.append(DrivePair(kind, scene, sheets[first], sheets[last], (first, last)))
    return pairs


FRAMES_PER_S = 20.0
"""Frame rate of the video. It equals the control rate, so the video runs in real time."""


class WatchedEpisode(msgspec.Struct, frozen=True):
    """An episode that people watch."""

    record: EpisodeRecord
    frames: list[np.ndarray]
    """uint8 [S, S, 3] each, before the first control step and after every one; empty without a
    video."""

    obstacle: str | None = None
    """Why the expert stood still at the end; None if it did not."""

    @property
    def outcome(self) -> str:
        """`success` or `failure`."""
        return "success" if self.record.is_success else "failure"

    def describe(self) -> str:
        """Return one line with its start, its outcome and its length."""
        record = self.record
        reason = "" if record.is_success or self.obstacle is None else f": {self.obstacle}"
        return (
            f"{record.task} from {record.start}: {self.outcome} after {record.num_steps} "
            f"control steps{reason}"
        )


def caption_episodes(episodes: Sequence[WatchedEpisode]) -> Iterator[np.ndarray]:
    """Yield each frame with the instruction and the progress below it.

    An episode's last frame stays for a second.
    """
    for episode in episodes:
        record = episode.record
        for index, frame in enumerate(episode.frames):
            is_last = index == len(episode.frames) - 1
            moment = episode.outcome if is_last else index
            status = f"{moment}  {record.task}  initial state {record.start}"
            captioned = add_caption(frame, record.instruction, status)
            yield from [captioned] * (int(FRAMES_PER_S) if is_last else 1)
