"""Stored episodes as rows of a replay buffer: those of another buffer, or of any data set.

    folder of a buffer ─────────► its rows, if they are of the same base and layout
    LeRobot, RLDS, HDF5, .npz ──► a decision every C control steps ─► the frozen base describes its state ─► rows

A recorded demonstration ends in a success unless its source says otherwise. An episode that ended without
one was cut off, and the state of its last decision, of which no successor is recorded, is that of the end.
What has only one decision then has no state after it, and is left out.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from vla_rl.datasets import DatasetOptions, RecordedEpisode, open_dataset
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError, DataError
from vla_rl.learner.off_policy.calibration import describe_impossible_return
from vla_rl.learner.off_policy.learner import OffPolicyLearner
from vla_rl.learner.off_policy.run_replay import list_missing_segments
from vla_rl.models.steered import SteeredPolicy
from vla_rl.replay import EpisodeRows, TransitionLayout
from vla_rl.replay.segments import (
    find_buffer,
    list_segments,
    read_header,
    read_segment,
    require_layout,
)
from vla_rl.replay.transitions import require_valid_rows, set_episode_columns
from vla_rl.types import Observation

_log = logging.getLogger(__name__)

DESCRIBED: Final = 16
"""Most observations that the frozen base reads at once."""


class _Part(NamedTuple):
    """Episodes that are stored together."""

    episodes: list[EpisodeRows]
    is_demonstration: bool
    source: str
    """Run or data set within which their ids are unique."""


class RowImporter:
    """Stores the episodes of folders in the replay buffer of a run, before its first gradient step.

    Args:
        policy: describes the states of a data set's episodes.
        learner: has the open buffer.
        lane: computes with the policy.
        tasks: tasks of the run; episodes that name another one are left out. None: any.
    """

    def __init__(
        self,
        policy: SteeredPolicy,
        learner: OffPolicyLearner,
        lane: DeviceLane,
        tasks: Collection[str] | None = None,
    ) -> None:
        self._policy, self._learner, self._lane = policy, learner, lane
        self._tasks = None if tasks is None else frozenset(tasks)
        self._options = learner.replay.config.data
        self._left_out: Counter[str] = Counter()

    async def import_rows(self, source: Path, *, is_demonstration: bool) -> int:
        """Store the episodes of a folder, and return how many of them are new. One line counts what is left out.

        Args:
            source: folder of another buffer (or of the run that has it), or of a data set.
            is_demonstration: whether the episodes stay for ever.

        Raises: ConfigError if the folder holds neither, or episodes that do not fit the policy or the range of
            returns; DataError for rows of another base or layout, and for damaged or missing ones unless
            `replay.damaged` drops them.
        """
        buffer = self._learner.replay.buffer
        self._left_out.clear()
        folder, segments = await asyncio.to_thread(_find_segments, source)
        parts = self._read_segments(source, segments) if segments else self._read_data_set(folder)
        number, expected_rows = 0, buffer.num_rows
        async for part in parts:
            for episode in part.episodes:
                if problem := describe_impossible_return(episode.rows, self._learner.config):
                    raise ConfigError(f"episode {episode.episode_id} of {source} has {problem}")
            for each in self._split_changed(part, folder):
                stored = await asyncio.to_thread(
                    buffer.append,
                    each.episodes,
                    is_demonstration=is_demonstration or part.is_demonstration,
                    source=each.source,
                )
                number += len(stored)
                lengths = {one.episode_id: len(one.rows) for one in reversed(each.episodes)}
                expected_rows += sum(lengths[one] for one in stored)
        if dropped := expected_rows - buffer.num_rows:
            _log.warning("%s: %s", source, buffer.config.describe_dropped(dropped))
        if self._left_out:
            reasons = "; ".join(f"{count} {why}" for why, count in self._left_out.items())
            _log.warning("%s: left out episodes: %s.", source, reasons)
        return number

    def _split_changed(self, part: _Part, folder: Path) -> list[_Part]:
        """Return a part as it is stored: episodes whose ids its source has for others come from the folder.

        Copies of one run that both went on have its name, and the same ids for what each did later.
        """
        changed = set(self._learner.replay.buffer.list_changed(part.episodes, source=part.source))
        if not changed:
            return [part]
        own = [each for each in part.episodes if each.episode_id not in changed]
        others = [each for each in part.episodes if each.episode_id in changed]
        return [
            part._replace(episodes=own),
            part._replace(episodes=others, source=f"{folder}/{part.source}"),
        ]

    async def _read_segments(self, source: Path, segments: list[Path]) -> AsyncIterator[_Part]:
        replay = self._learner.replay
        is_dropping = replay.buffer.config.damaged == "drop"
        if missing := await asyncio.to_thread(list_missing_segments, source, segments):
            problem = f"{source} misses file {missing[0]} of its rows, which a checkpoint names"
            if not is_dropping:
                raise DataError(
                    f"{problem}; to learn from what is left, name {segments[0].parent}, or set damaged = 'drop' "
                    "(--replay.damaged drop)."
                )
            _log.warning("%s; %d files are missing, and are left out.", problem, len(missing))
        for path in segments:
            try:
                header, _, rows = await asyncio.to_thread(read_segment, path)
            except DataError as error:
                if not is_dropping:
                    raise DataError(
                        f"{error} To go on without its rows, set damaged = 'drop' (--replay.damaged drop)."
                    ) from error
                _log.warning("%s Its rows are left out.", error)
                continue
            require_layout(path, header, replay.layout)
            starts = np.flatnonzero(np.diff(rows["episode"], prepend=rows["episode"][0] - 1))
            episodes = [
                EpisodeRows(
                    episode_id=int(part["episode"][0]),
                    task=header.tasks[int(part["task"][0])],
                    rows=part,
                )
                for part in np.split(rows, starts[1:])
            ]
            # a run's episodes name its tasks; those that it imported may have an instruction for a name
            if "/" not in header.source:
                episodes = [each for each in episodes if self._is_wanted(each.task)]
            # ids are unique within a run and within a data set, but not within a buffer that has rows of both
            origin = header.source or str(path.parent)
            yield _Part(episodes, header.is_demonstration, origin)

    async def _read_data_set(self, folder: Path) -> AsyncIterator[_Part]:
        replay = self._learner.replay
        recorded = await asyncio.to_thread(_open_dataset, folder, self._options)
        if unrewarded := sum(_is_unrewarded(episode) for episode in recorded):
            _log.warning(
                "%s: %d of %d episodes count as successes, and all their rewards are 0, so a critic learns that a "
                "success earns nothing; set the last reward of each to 1, or leave the rewards out of the data.",
                folder,
                unrewarded,
                len(recorded),
            )
        for number, episode in enumerate(recorded):
            task = episode.about.get("task")
            if isinstance(task, str) and not self._is_wanted(task):
                continue
            horizon = replay.layout.horizon
            if episode.is_success is False and episode.num_steps <= horizon:
                why = f"failed within {horizon} control steps, and no state after their only decision is recorded"
                self._left_out[why] += 1
                continue
            rows = await _describe_episode(episode, number, self._policy, replay.layout, self._lane)
            yield _Part([rows], False, str(folder))

    def _is_wanted(self, task: str) -> bool:
        if self._tasks is None or task in self._tasks:
            return True
        self._left_out[f"are of {task}, which is no task of this run"] += 1
        return False


def check_source(source: Path, layout: TransitionLayout, options: DatasetOptions) -> int:
    """Look at a folder of episodes without storing them: headers of rows, or a data set's numbers. Blocks.

    Returns: how many rows besides demonstrations it has, those of other tasks included.
    Raises: ConfigError if it holds neither; DataError for rows of another policy.
    """
    folder, segments = _find_segments(source)
    if not segments:
        recorded = _open_dataset(folder, options)
        return sum(_count_rows(each, layout.horizon) for each in recorded)
    headers = [read_header(path)[0] for path in segments]
    for path, header in zip(segments, headers, strict=True):
        require_layout(path, header, layout)
    return sum(header.num_rows for header in headers if not header.is_demonstration)


def _open_dataset(folder: Path, options: DatasetOptions) -> list[RecordedEpisode]:
    try:
        return open_dataset(folder, options)
    except DataError as error:
        raise ConfigError(
            f"{folder} has no rows of a replay buffer, and cannot be read as a data set: {error}"
        ) from error


def _find_segments(source: Path) -> tuple[Path, list[Path]]:
    """Return the folder that a buffer or a data set is in, with its links resolved, and the buffer's files."""
    folder = find_buffer(source).resolve()
    return folder, list_segments(folder)


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
    kept = _count_rows(episode, layout.horizon)
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


def _is_unrewarded(episode: RecordedEpisode) -> bool:
    is_success = episode.is_success is not False
    return is_success and episode.rewards is not None and not episode.rewards.any()


def _count_rows(episode: RecordedEpisode, horizon: int) -> int:
    """Return how many decisions of a recorded episode become rows."""
    decisions = -(-len(episode.actions) // horizon)
    # the state of the last decision is the end of an episode that was cut off: nothing later is recorded
    return decisions - 1 if episode.is_success is False else decisions


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
