"""A replay buffer whose episodes outlive the process that stored them.

    append ──► one segment of successes, one of failures: written, synced, renamed ──► rows in memory
    sample ──► positions from (seed, update, row) ──► one copy out of memory
    state  ──► names of the live segments, for a checkpoint
    restore ─► the same segments in the same order; newer ones are removed or taken over

The folder belongs to one process at a time: the one that has the learner. Episodes of other hosts reach
it as trajectories do, over their encrypted connections, and are stored there.

Memory holds all live rows. A segment that capacity drops stays on disk until `release` says that no
checkpoint needs it.
"""

import contextlib
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
import numpy as np

from vla_rl.errors import DataError
from vla_rl.replay.config import ReplayConfig
from vla_rl.replay.row_store import RowStore
from vla_rl.replay.sampling import (
    EVERY_ROW,
    STRATUM_FLAGS,
    Stratum,
    draw_positions,
    require_strata,
    split_batch,
)
from vla_rl.replay.segments import SegmentHeader, SegmentName, list_segments, write_segment
from vla_rl.replay.transitions import EpisodeRows, TransitionLayout, join_rows, list_tasks
from vla_rl.util.ownership import sole_owner

logger = logging.getLogger(__name__)

OWNER_FILE: Final = "owner.json"


class LiveSegment(msgspec.Struct, kw_only=True):
    """A segment whose rows are in memory."""

    header: SegmentHeader
    name: SegmentName
    slots: np.ndarray
    episodes: frozenset[int]
    flags: dict[str, np.ndarray]
    """[n] each: the columns that strata and metrics read. They are apart from the rows, because reading a
    flag in each of 50,000 rows of 17 KB would touch as many pages of memory."""


class ReplayBuffer:
    """Rows of episodes in a folder and in memory. Use it as a context manager, one call at a time.

    Args:
        folder: its folder, made if it is missing.
        layout: the policy's layout; `config.features` replaces the type of its features.
        config: capacity, and what happens to files that are found.
        tasks: the tasks to learn; rows of others are refused. None: any.
    """

    def __init__(
        self,
        folder: Path,
        layout: TransitionLayout,
        config: ReplayConfig | None = None,
        *,
        tasks: Collection[str] | None = None,
    ) -> None:
        self.folder = folder
        self.config = config if config is not None else ReplayConfig()
        self.layout = msgspec.structs.replace(layout, features_dtype=self.config.features)
        self._known_tasks = None if tasks is None else frozenset(tasks)
        self._tasks: list[str] = []
        self._store = RowStore(self.layout, self.config.capacity)
        self._live: dict[int, LiveSegment] = {}
        self._stored: set[tuple[str, int]] = set()
        self._next_number = 0
        self._is_started = False
        self._positions: dict[Stratum, np.ndarray] = {}
        self._turn = threading.Lock()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        owner = sole_owner(self.folder / OWNER_FILE, f"the replay buffer {self.folder}")
        self._exits.enter_context(owner)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._exits.close()

    @property
    def num_rows(self) -> int:
        """Rows that can be sampled."""
        return sum(segment.name.num_rows for segment in self._live.values())

    @property
    def num_episodes(self) -> int:
        """Episodes whose rows can be sampled."""
        return sum(len(segment.episodes) for segment in self._live.values())

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names that the column `task` of sampled rows counts."""
        return tuple(self._tasks)

    def start(self) -> None:
        """Begin without a checkpoint. The first `append` or `sample` does it, too.

        Raises: DataError if the folder has rows already.
        """
        if self._is_started:
            return
        if found := list_segments(self.folder):
            raise DataError(
                f"{self.folder} has {len(found)} segments of rows, expected none for a run that does not resume; "
                "choose another folder, resume the run that wrote them, or load them with existing = 'load'."
            )
        self._is_started = True

    def append(
        self, episodes: Sequence[EpisodeRows], *, is_demonstration: bool = False, source: str = ""
    ) -> list[int]:
        """Store episodes; when it returns, they are synced to the disk.

        Args:
            episodes: rows of whole episodes. Those whose id was stored before are left out.
            is_demonstration: whether they stay for ever.
            source: where they were imported from; ids are unique within a source.

        Returns: the ids of the episodes that are new.
        Raises: DataError if rows have another layout or task, or are more than the capacity.
        """
        with self._turn:
            self.start()
            new = self._select_new(episodes, source)
            self._require_fit(new, is_demonstration)
            for is_success in (True, False):
                part = [episode for episode in new if episode.is_success == is_success]
                if part:
                    self._add_segment(part, is_success, is_demonstration, source)
            self._drop_oldest()
            return [episode.episode_id for episode in new]

    def sample(
        self, *, seed: int, update: int, batch: int, strata: Mapping[Stratum, float] = EVERY_ROW
    ) -> np.ndarray:
        """Return a batch of rows, the same for the same arguments and the same live rows.

        Args:
            seed: seed of the run.
            update: number of the gradient step.
            batch: rows to draw, with replacement.
            strata: share of the batch that comes from each stratum, in the order of the batch.

        Returns: rows [batch] of `layout.row_dtype`; `task` counts `tasks`.
        Raises: DataError if a stratum has no row; `missing_strata` says so before.
        """
        with self._turn:
            self.start()
            require_strata(strata)
            if missing := self._list_missing(strata):
                raise DataError(
                    f"the replay buffer {self.folder} has no row of {', '.join(missing)} among its "
                    f"{self.num_rows}, expected some for a batch of {dict(strata)}; collect or import them first, "
                    "or set their share to 0."
                )
            slots = [
                (live := self._get_positions(name))[
                    draw_positions(seed, update, name, count, len(live))
                ]
                for name, count in split_batch(batch, strata).items()
                if count
            ]
            return self._store.take_rows(np.concatenate(slots))

    def missing_strata(self, strata: Mapping[Stratum, float] = EVERY_ROW) -> list[Stratum]:
        """Return the strata of a batch that have no row yet; a learner waits until there are none."""
        with self._turn:
            require_strata(strata)
            return self._list_missing(strata)

    def metrics(self, head_version: int) -> dict[str, float]:
        """Return sizes and shares of the live rows, and their mean age in updates.

        Args:
            head_version: the head's newest version.
        """
        with self._turn:
            if not self._live:
                return {"replay/rows": 0.0}
            rows = self._read_flag("head_version")
            shares = {
                "success": "is_success", "demonstration": "is_demonstration", "intervened": "intervened"
            }  # fmt: skip
            return {
                "replay/rows": float(len(rows)),
                "replay/episodes": float(self.num_episodes),
                **{
                    f"replay/{name}_share": float(self._read_flag(flag).mean())
                    for name, flag in shares.items()
                },
                "replay/age": float(head_version - rows.mean()),
            }

    def _select_new(self, episodes: Sequence[EpisodeRows], source: str) -> list[EpisodeRows]:
        known, new = set(self._stored), []
        for episode in episodes:
            if (source, episode.episode_id) not in known:
                known.add((source, episode.episode_id))
                new.append(episode)
        return new

    def _require_fit(self, episodes: Sequence[EpisodeRows], is_demonstration: bool) -> None:
        num_rows = sum(len(episode.rows) for episode in episodes)
        if not is_demonstration and num_rows > self.config.capacity:
            raise DataError(
                f"{num_rows} rows are to be stored at once, and the replay buffer's capacity is "
                f"{self.config.capacity}; expected more than one update's rows: raise capacity."
            )
        for episode in episodes:
            if episode.rows.dtype != self.layout.row_dtype:
                raise DataError(
                    f"the rows of episode {episode.episode_id} are {episode.rows.dtype.itemsize} bytes each, expected "
                    f"{self.layout.row_dtype.itemsize}; make them with this buffer's layout."
                )
            if self._known_tasks is not None and episode.task not in self._known_tasks:
                raise DataError(
                    f"episode {episode.episode_id} is of the task {episode.task!r}, expected one of "
                    f"{sorted(self._known_tasks)}."
                )

    def _add_segment(
        self, episodes: Sequence[EpisodeRows], is_success: bool, is_demonstration: bool, source: str
    ) -> None:
        tasks = list_tasks(episodes)
        rows = join_rows([episode.rows for episode in episodes])
        rows["task"] = np.repeat(
            [tasks.index(episode.task) for episode in episodes],
            [len(each.rows) for each in episodes],
        )
        header = SegmentHeader(
            number=self._next_number,
            layout=self.layout,
            tasks=tasks,
            num_rows=len(rows),
            is_success=is_success,
            is_demonstration=is_demonstration,
            source=source,
        )
        name = write_segment(self.folder, header, rows)
        self._next_number += 1
        self._admit(header, name, rows)

    def _admit(self, header: SegmentHeader, name: SegmentName, rows: np.ndarray) -> None:
        """Take the rows of a written segment into memory."""
        self._tasks += [task for task in header.tasks if task not in self._tasks]
        rows["task"] = np.array([self._tasks.index(task) for task in header.tasks])[rows["task"]]
        flags = {key: rows[key].copy() for key in ("head_version", "is_success", "has_expert")}
        flags["intervened"] = np.asarray(rows["intervened"].any(axis=1))
        flags["is_demonstration"] = np.full(len(rows), header.is_demonstration)
        episodes = frozenset(rows["episode"].tolist())
        self._stored |= {(header.source, episode) for episode in episodes}
        self._live[name.number] = LiveSegment(
            header=header,
            name=name,
            slots=self._store.add_rows(rows),
            episodes=episodes,
            flags=flags,
        )
        self._positions.clear()

    def _drop_oldest(self) -> None:
        """Drop segments until the rows besides demonstrations are at most the capacity."""
        while True:
            kept = [each for each in self._live.values() if not each.header.is_demonstration]
            if sum(each.name.num_rows for each in kept) <= self.config.capacity:
                return
            successes = sum(each.name.num_rows for each in kept if each.header.is_success)
            spare = [
                each
                for each in kept
                if not each.header.is_success
                or successes - each.name.num_rows >= self.config.min_success_rows
            ]
            oldest = (spare or kept)[0]
            del self._live[oldest.name.number]
            self._store.remove_rows(oldest.slots)
            self._positions.clear()

    def _list_missing(self, strata: Mapping[Stratum, float]) -> list[Stratum]:
        return [
            name for name, share in strata.items() if share and not len(self._get_positions(name))
        ]

    def _read_flag(self, name: str) -> np.ndarray:
        """Return one of `LiveSegment.flags` of all live rows, oldest first."""
        return np.concatenate([segment.flags[name] for segment in self._live.values()])

    def _get_positions(self, stratum: Stratum) -> np.ndarray:
        """Return the slots of a stratum's rows, int64 [n], oldest first."""
        if not self._live:
            return np.zeros(0, np.int64)
        if stratum not in self._positions:
            slots = np.concatenate([segment.slots for segment in self._live.values()])
            flag, is_set = STRATUM_FLAGS[stratum]
            if flag is not None:
                slots = slots[self._read_flag(flag) == is_set]
            self._positions[stratum] = slots
        return self._positions[stratum]
