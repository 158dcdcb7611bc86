"""Images of episodes for people: contact sheets small enough to keep, and frames with captions.

A contact sheet shows a few frames of a held-out episode side by side. Of drives, it is a bird's-eye
view: one scene of each layout, for each weight version.
"""

import asyncio
import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import imageio.v3 as imageio
import msgspec
import numpy as np

from vla_rl.envs.driving.closed_loop import ClosedLoopDrivingEnv
from vla_rl.envs.driving.observing import FRONT, Observer
from vla_rl.envs.driving.plan_actions import NUM_WAYPOINTS, decode_plan
from vla_rl.envs.driving.planner import best_proposal
from vla_rl.envs.driving.roads import LAYOUTS
from vla_rl.envs.driving.scores import score_waypoints
from vla_rl.envs.driving.scores.motion import Car
from vla_rl.envs.driving.scores.scene import AX, HEADING, STEER, VX, YAW_RATE, X, Y
from vla_rl.envs.driving.world import draw_world
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


MOST_SCENES: Final = 60
"""Held-out scenes among which one of each layout is looked for."""

OPEN_LOOP: Final = "vla_rl/driving-v0"
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


async def write_drive_sheet(run: RunDirectory, weight_version: int, trajectory: Trajectory) -> None:
    """Write the contact sheet of a held-out drive, if its scene is the first one of its layout."""
    kwargs, number = trajectory.episode.env.kwargs, trajectory.episode.options["init_state_id"]
    chosen = await asyncio.to_thread(_chosen_scenes, kwargs["split"], kwargs.get("kind"))
    if number in chosen:
        name = f"drive-{chosen[number]}_scene-{number}_weights-{weight_version}.jpg"
        await asyncio.to_thread(_write_drive, run.path / "strips" / name, trajectory)


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


@functools.cache
def _chosen_scenes(split: str, kind: str | None) -> dict[int, str]:
    """Return the layout of each scene that has a contact sheet.

    If the episodes name their layout, they take the layouts in turn, and their first round is
    chosen.
    """
    if kind is not None:
        return dict.fromkeys(range(len(LAYOUTS)), kind)
    first: dict[str, int] = {}
    for number in range(MOST_SCENES):
        first.setdefault(get_layout({"split": split}, number), number)
    return {number: kind for kind, number in first.items()}


def _write_drive(path: Path, trajectory: Trajectory) -> None:
    episode = trajectory.episode
    rows = [step.chunk.actions[: step.num_executed] for step in trajectory.steps]
    actions: np.ndarray[Any, Any] = np.clip(np.concatenate(rows), -1.0, 1.0)
    draw = draw_plan if episode.env.id == OPEN_LOOP else draw_drive
    images = draw(episode.env.kwargs, episode.options["init_state_id"], actions)
    path.parent.mkdir(exist_ok=True)
    padded = [np.pad(each, ((0, 0), (0, 4), (0, 0)), constant_values=255) for each in images]
    imageio.imwrite(path, np.concatenate(padded, axis=1), quality=85)


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


NUM_IMAGES: Final = 5
"""Images of one drive, from its first moment to its last."""

_EGO: Final = (X, Y, HEADING, VX, AX, STEER, YAW_RATE)


def get_layout(kwargs: dict[str, Any], number: int) -> str:
    """Return the layout of a scene of an environment with these keywords."""
    return str(kwargs.get("kind") or draw_world(number, kwargs["split"]).kind)


def draw_plan(kwargs: dict[str, Any], number: int, rows: np.ndarray) -> list[np.ndarray]:
    """Return the motion that a plan is graded by, 0 to 4 s, among the recorded others.

    Args:
        kwargs: keywords of `OpenLoopDrivingEnv`.
        rows: [8, 3], the actions.
    """
    world = draw_world(number, kwargs["split"], kwargs.get("kind"))
    version = kwargs.get("version", "epdms_v2")
    action, speed = kwargs.get("action", "moves"), float(world.start[VX])
    observer = Observer(world, (FRONT,), 32, (0.0, 1.0))
    route = observer.route(Car(*(float(world.start[column]) for column in _EGO)))
    waypoints = decode_plan(rows[:NUM_WAYPOINTS], action, speed, route)
    reference, _ = best_proposal(world, version)
    (states,) = score_waypoints(world.scene(reference), waypoints[None], version).states
    images = []
    # the motion that was graded, which the vehicle's controller makes of the plan, and not the plan
    # itself
    for step in np.linspace(0, len(states) - 1, NUM_IMAGES).round().astype(int):
        car = Car(*(float(states[step, column]) for column in _EGO))
        others = world.tracks.poses[:, step]
        images.append(observer.from_above(car, others, states[::5, :2]))
    return images


def draw_drive(kwargs: dict[str, Any], number: int, rows: np.ndarray) -> list[np.ndarray]:
    """Return moments of a closed-loop drive, which is driven once more with the same actions.

    Args:
        kwargs: keywords of `ClosedLoopDrivingEnv` with the actions of a plan.
        rows: [K, 3], all actions of the episode.
    """
    env = ClosedLoopDrivingEnv(**{**kwargs, "image_size": 32, "render_mode": "rgb_array"})
    env.render_every_step = False
    env.reset(options={"init_state_id": number})
    moments = set(np.linspace(0, len(rows) - 1, NUM_IMAGES).round().astype(int).tolist())
    images = []
    for step, row in enumerate(rows):
        if step in moments:
            image = env.render()
            assert image is not None
            images.append(image)
        env.step(row)
    return images
