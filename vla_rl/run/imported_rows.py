"""Stored episodes as rows of a replay buffer: those of another buffer, or of any data set.

    folder of a buffer ─────────► its rows, if they are of the same base and layout
    LeRobot, RLDS, HDF5, .npz ──► a decision every C control steps ─► the frozen base describes its state ─► rows

A recorded demonstration ends in a success unless its source says otherwise. An episode that ended without
one was cut off, and the state of its last decision, of which no successor is recorded, is that of the end.
"""

import asyncio
from pathlib import Path
from typing import Final

import numpy as np

from vla_rl.datasets import DatasetOptions, RecordedEpisode, open_dataset
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError, DataError
from vla_rl.learner.off_policy.run_replay import RunReplay, list_missing_segments
from vla_rl.models.steered import SteeredPolicy
from vla_rl.replay import EpisodeRows, TransitionLayout
from vla_rl.replay.segments import list_segments, read_segment
from vla_rl.replay.transitions import require_valid_rows, set_episode_columns
from vla_rl.types import Observation

DESCRIBED: Final = 16
"""Most observations that the frozen base reads at once."""


async def import_rows(
    source: Path,
    policy: SteeredPolicy,
    replay: RunReplay,
    lane: DeviceLane,
    *,
    is_demonstration: bool,
) -> int:
    """Store the episodes of a folder in the buffer of a run, and return how many they are.

    Args:
        source: folder of another buffer (or of the run that has it), or of a data set.
        policy: describes the states of a data set's episodes.
        replay: the open buffer.
        lane: computes with the policy.
        is_demonstration: whether the episodes stay for ever.

    Raises: ConfigError if the folder holds neither, or episodes that do not fit the policy; DataError for
        rows of another base or layout, and for a run whose checkpoints name rows that are missing.
    """
    folder, segments = await asyncio.to_thread(_find_segments, source)
    if segments:
        if missing := await asyncio.to_thread(list_missing_segments, source, segments):
            raise DataError(
                f"{source} misses file {missing[0]} of its rows, which a checkpoint names; name {folder} to learn "
                "from what is left."
            )
        number = 0
        for path in segments:
            episodes, is_one = await asyncio.to_thread(_read_episodes, path, replay.layout)
            stored = await asyncio.to_thread(
                replay.buffer.append,
                episodes,
                is_demonstration=is_demonstration or is_one,
                source=str(folder),
            )
            number += len(stored)
        return number
    try:
        recorded = await asyncio.to_thread(open_dataset, source, DatasetOptions())
    except DataError as error:
        raise ConfigError(
            f"{source} is neither the folder of a replay buffer nor a data set: {error}"
        ) from error
    for number, episode in enumerate(recorded):
        rows = await _describe_episode(episode, number, policy, replay.layout, lane)
        await asyncio.to_thread(
            replay.buffer.append,
            [rows],
            is_demonstration=is_demonstration,
            source=str(folder),
        )
    return len(recorded)


def _find_segments(source: Path) -> tuple[Path, list[Path]]:
    """Return the folder that a buffer or a data set is in, with its links resolved, and the buffer's files."""
    inside = source / "replay"
    folder = (inside if inside.is_dir() else source).resolve()
    if not folder.is_dir():
        raise ConfigError(f"{source} is not a folder; name one with stored episodes")
    return folder, list_segments(folder)


def _read_episodes(path: Path, layout: TransitionLayout) -> tuple[list[EpisodeRows], bool]:
    """Return the episodes of a segment, and whether they are demonstrations."""
    header, _, rows = read_segment(path)
    if difference := layout.describe_difference(header.layout):
        raise DataError(
            f"the rows of {path} are not this policy's: {difference}; give the policy that they were "
            "recorded with, or another folder."
        )
    starts = np.flatnonzero(np.diff(rows["episode"], prepend=rows["episode"][0] - 1))
    episodes = [
        EpisodeRows(
            episode_id=int(part["episode"][0]), task=header.tasks[int(part["task"][0])], rows=part
        )
        for part in np.split(rows, starts[1:])
    ]
    return episodes, header.is_demonstration


async def _describe_episode(
    episode: RecordedEpisode,
    number: int,
    policy: SteeredPolicy,
    layout: TransitionLayout,
    lane: DeviceLane,
) -> EpisodeRows:
    """Return the rows of a recorded episode. Raises: ConfigError if it does not fit the policy."""
    is_success = episode.is_success is not False
    starts = list(range(0, len(episode.actions), layout.horizon))
    if not is_success and len(starts) == 1:
        raise ConfigError(
            f"{episode.name} failed within {layout.horizon} control steps, expected more: no state is "
            "recorded after its only decision; leave it out"
        )
    observations = await asyncio.to_thread(
        lambda: [_observe(episode, policy, start) for start in starts]
    )
    try:
        described = [
            await lane.run(
                policy.describe_states, observations[first : first + DESCRIBED], work="update"
            )
            for first in range(0, len(observations), DESCRIBED)
        ]
        chunks = np.stack([_take_chunk(episode.actions, start, layout.horizon) for start in starts])
        actions = policy.encode(chunks)
    except ValueError as error:
        raise ConfigError(f"{episode.name} does not fit the policy: {error}") from error
    states = {
        name: np.concatenate([part[name] for part in described])
        for name in ("features", "proprio", "reference")
    }
    # the state of the last decision is the end of an episode that was cut off: nothing later is recorded
    kept = len(starts) if is_success else len(starts) - 1
    rows = layout.make_empty_rows(kept)
    for name, values in states.items():
        rows[name] = values[:kept]
        following = values[1 : kept + 1]
        rows[f"next_{name}"][: len(following)] = following
    rows["action"] = actions[:kept]
    for row, start in zip(rows, starts, strict=False):
        _fill_steps(row, episode, start, layout.horizon, is_success)
    set_episode_columns(rows, episode_id=number, is_success=is_success, is_cut_off=not is_success)
    require_valid_rows(rows, episode.name)
    named = episode.about.get("task")
    task = named if isinstance(named, str) else episode.instruction
    return EpisodeRows(episode_id=number, task=task, rows=rows)


def _observe(episode: RecordedEpisode, policy: SteeredPolicy, step: int) -> Observation:
    """Return what the policy would have seen before a control step."""
    missing = [name for name in policy.config.cameras if name not in episode.frames]
    if missing:
        raise ConfigError(
            f"{episode.name} has the cameras {sorted(episode.frames)}, expected {missing[0]!r} for this "
            "policy; use other data"
        )
    words = episode.instruction if episode.instructions is None else episode.instructions[step]
    return {
        **{name: episode.frames[name](step) for name in policy.config.cameras},
        **{name: values[step] for name, values in episode.vectors.items()},
        "instruction": words,
    }


def _take_chunk(actions: np.ndarray, start: int, horizon: int) -> np.ndarray:
    """Return C actions from a control step on; behind the episode's end the last one is repeated."""
    chunk = actions[start : start + horizon]
    return np.concatenate([chunk, np.repeat(chunk[-1:], horizon - len(chunk), axis=0)])


def _fill_steps(
    row: np.void, episode: RecordedEpisode, start: int, horizon: int, is_success: bool
) -> None:
    """Set rewards, their number and interventions of a decision."""
    length = min(horizon, len(episode.actions) - start)
    row["num_rewards"] = length
    if episode.rewards is not None:
        row["rewards"][:length] = episode.rewards[start : start + length]
    elif is_success and start + length == len(episode.actions):
        row["rewards"][length - 1] = 1.0
    if episode.intervened is not None:
        row["intervened"][:length] = episode.intervened[start : start + length]
