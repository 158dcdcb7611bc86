"""A replay buffer whose episodes outlive the process that stored them.

    append ──► one segment of successes, one of failures: written, synced, renamed ──► rows in memory
    sample ──► positions from (seed, update, row) ──► one copy out of memory
    state  ──► names of the live segments, for a checkpoint
    restore ─► the same segments in the same order; newer ones are removed or taken over

The folder belongs to one process at a time: the one that has the learner. Episodes of other hosts reach
it as trajectories do, over their encrypted connections, and are stored there.

Memory holds all live rows. A segment that capacity drops stays on the disk as long as a checkpoint names it.
"""

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
import numpy as np

from vla_rl.errors import DataError
from vla_rl.replay.config import ReplayConfig
from vla_rl.replay.episode_ids import EpisodeIds, IdRanges
from vla_rl.replay.live_rows import LiveRows
from vla_rl.replay.sampling import EVERY_ROW, Stratum, require_strata
from vla_rl.replay.segment_folder import LoadedSegment, SegmentFolder, UnwrittenSegment
from vla_rl.replay.segments import SegmentHeader, SegmentName, list_segments, read_header
from vla_rl.replay.transitions import EpisodeRows, TransitionLayout, join_rows, list_tasks

logger = logging.getLogger(__name__)

KEPT_STATES: Final = 2
"""Newest states whose segments stay, whatever checkpoints are found: the last one may be of a checkpoint
that is being written, and the one before it of the newest that is whole."""


class ReplayState(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of a buffer, as a checkpoint names them.

    Example:
        ReplayState(run="7c0f...", segments=(SegmentName(number=12, num_rows=96, checksum=2774181210),),
                    next_number=13, tasks=("libero_goal/3",), stored={"7c0f...": ((0, 95),)})
    """

    run: str
    """Source of the episodes that the run itself collected."""

    segments: tuple[SegmentName, ...]
    next_number: int
    tasks: tuple[str, ...]
    stored: dict[str, IdRanges]
    """Ids of all episodes that were ever stored, by source, dropped ones included."""

    waiting: tuple[UnwrittenSegment, ...] = ()
    """Segments that found no room on the disk."""


class ReplayBuffer:
    """Rows of episodes in a folder and in memory. Use it as a context manager.

    Threads may call it, one after another; what a batch holds depends on which calls came before.

    Args:
        folder: its folder, made if it is missing.
        layout: the policy's layout; `config.features` replaces the type of its features.
        config: capacity, and what happens to files that are found.
        tasks: the tasks to learn; rows of others are refused. None: any.
        find_needed: returns the numbers of the segments that checkpoints on the disk name; others are
            removed once capacity has dropped them. None: all that a state has named stay.
    """

    def __init__(
        self,
        folder: Path,
        layout: TransitionLayout,
        config: ReplayConfig | None = None,
        *,
        tasks: Collection[str] | None = None,
        find_needed: Callable[[], Collection[int]] | None = None,
    ) -> None:
        self.folder = folder
        self.config = config if config is not None else ReplayConfig()
        self.layout = msgspec.structs.replace(layout, features_dtype=self.config.features)
        self._known_tasks = None if tasks is None else frozenset(tasks)
        self._find_needed = find_needed
        self._files = SegmentFolder(folder, self.layout, self.config)
        self._rows = LiveRows(self.layout, self.config)
        self._ids = EpisodeIds()
        self._states: list[ReplayState] = []
        self._run = uuid.uuid4().hex
        self._next_number = 0
        self._is_started = False
        self._turn = threading.Lock()

    def __enter__(self) -> Self:
        self._files.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.__exit__(kind, error, trace)

    @property
    def num_rows(self) -> int:
        """Rows that can be sampled."""
        return self._rows.num_rows

    @property
    def num_episodes(self) -> int:
        """Episodes whose rows can be sampled."""
        return self._rows.num_episodes

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names that the column `task` of sampled rows counts."""
        return tuple(self._rows.tasks)

    def start(self) -> None:
        """Begin without a checkpoint. The first `append` or `sample` does it, too.

        Rows that the folder already has are refused, or loaded if `config.existing` says so.

        Raises: DataError, also for damaged segments and for rows of another policy or task.
        """
        if self._is_started:
            return
        found = list_segments(self.folder)
        if found and self.config.existing == "refuse":
            raise DataError(
                f"{self.folder} has {len(found)} segments of rows, expected none for a run that does not "
                "resume; choose another folder, resume the run that wrote them, or load them with existing = "
                "'load' (--replay.existing load)."
            )
        self._load(self._files.load_all())
        self._is_started = True

    def append(
        self, episodes: Sequence[EpisodeRows], *, is_demonstration: bool = False, source: str = ""
    ) -> list[int]:
        """Store episodes; when it returns, they are synced to the disk.

        Without room on the disk, they wait in memory with one warning, and checkpoints carry them.

        Args:
            episodes: rows of whole episodes. Those whose id was stored before are left out.
            is_demonstration: whether they stay for ever.
            source: where they were imported from; ids are unique within a source. Empty: this run.

        Returns: the ids of the episodes that are new.
        Raises: DataError if rows have another layout or task, or are more than the capacity.
        """
        with self._turn:
            self.start()
            source = source or self._run
            new = self._ids.select_new(source, episodes)
            self._require_fit(new, is_demonstration)
            for is_success in (True, False):
                part = [episode for episode in new if episode.is_success == is_success]
                if part:
                    self._add_segment(part, is_success, is_demonstration, source)
            self._files.write()
            self._files.retire(self._rows.drop_oldest())
            return [episode.episode_id for episode in new]

    def list_changed(self, episodes: Sequence[EpisodeRows], *, source: str) -> list[int]:
        """Return the ids under which a source has other episodes here, as two copies of one run that both went
        on have; `append` leaves their episodes out. Episodes that were dropped are not compared.
        """
        with self._turn:
            return self._rows.list_changed(source, episodes)

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
            if missing := self._rows.list_missing(strata):
                raise DataError(
                    f"the replay buffer {self.folder} has no row of {', '.join(missing)} among its "
                    f"{self.num_rows}, expected some for a batch of {dict(strata)}; collect or import them "
                    "first, or set their share to 0."
                )
            return self._rows.draw_rows(seed, update, batch, strata)

    def missing_strata(self, strata: Mapping[Stratum, float] = EVERY_ROW) -> list[Stratum]:
        """Return the strata of a batch that have no row yet; a learner waits until there are none."""
        with self._turn:
            require_strata(strata)
            return self._rows.list_missing(strata)

    def state(self) -> ReplayState:
        """Return the names of the live segments, and remove files that no checkpoint needs."""
        with self._turn:
            self.start()
            self._files.write_waiting()
            state = ReplayState(
                run=self._run,
                segments=self._rows.names,
                next_number=self._next_number,
                tasks=self.tasks,
                stored=self._ids.as_ranges(),
                waiting=self._files.list_waiting(),
            )
            self._states.append(state)
            # without `find_needed`, nothing tells whether the checkpoint of a state was ever written
            if self._find_needed is not None:
                self._states = self._states[-KEPT_STATES:]
            of_states = {name.number for each in self._states for name in each.segments}
            found = self._find_needed() if self._find_needed is not None else ()
            self._files.remove_retired(of_states.union(found))
            return state

    def restore(self, state: ReplayState) -> None:
        """Continue from a checkpoint, before anything is stored or sampled.

        Segments that are newer are removed, or taken over if `config.newer` says so.

        Raises: DataError for a segment that is damaged or missing, unless `config.damaged` drops it, for
            rows of another policy or task, and for newer ones of another run that would be removed.
        """
        with self._turn:
            assert not self._is_started, "a buffer is restored before it is used"
            newer = self._files.list_newer(state.segments, state.next_number)
            if self.config.newer == "truncate":
                self._require_own(newer, state)
            self._run = state.run
            self._rows.tasks = list(state.tasks)
            self._ids = EpisodeIds.from_ranges(state.stored)
            waiting = {each.header.number for each in state.waiting}
            written = [name for name in state.segments if name.number not in waiting]
            loaded = self._files.load_named(written) + self._files.restore_waiting(state.waiting)
            self._load(sorted(loaded, key=lambda segment: segment[1].number))
            self._next_number = state.next_number
            if newer and self.config.newer == "take_over":
                self._load(self._files.load_paths(newer))
            elif newer:
                # also after somebody deleted the checkpoints: then it is every row that was collected
                logger.warning(
                    "%s: %d segments of rows are newer than the checkpoint and are removed; newer = 'take_over' "
                    "(--replay.newer take_over) keeps such rows.",
                    self.folder,
                    len(newer),
                )
                for path in newer:
                    path.unlink()
            self._files.retire(self._rows.drop_oldest())
            self._states = [state]
            self._is_started = True

    def metrics(self, head_version: int) -> dict[str, float]:
        """Return sizes and shares of the live rows, and their mean age in updates.

        Args:
            head_version: the head's newest version.
        """
        with self._turn:
            waiting = float(self._files.num_waiting_rows)
            return {**self._rows.describe(head_version), "replay/waiting_rows": waiting}

    def _require_own(self, newer: Sequence[Path], state: ReplayState) -> None:
        """Raise DataError if another run wrote one of the segments that would be removed."""
        known = {state.run, *state.stored}
        for path in newer if state.run else ():
            try:
                source = read_header(path)[0].source
            except DataError:
                continue  # nobody can read it
            if source not in known:
                raise DataError(
                    f"{path} is newer than the checkpoint, and another run wrote it; expected this run's rows "
                    "alone, because newer ones are removed. Set newer = 'take_over' (--replay.newer take_over), or "
                    "resume with a copy of the folder."
                )

    def _load(self, segments: Sequence[LoadedSegment]) -> None:
        for header, name, rows in segments:
            for task in header.tasks:
                self._require_known(task, str(self.folder / name.file_name))
            self._ids.add(header.source, rows["episode"])
            self._rows.add_segment(header, name, rows)
            self._next_number = max(self._next_number, name.number + 1)
        found = self._rows.num_rows
        self._files.retire(self._rows.drop_oldest())
        if dropped := found - self._rows.num_rows:
            logger.warning("%s: %s", self.folder, self.config.describe_dropped(dropped))

    def _require_fit(self, episodes: Sequence[EpisodeRows], is_demonstration: bool) -> None:
        num_rows = sum(len(episode.rows) for episode in episodes)
        if not is_demonstration and num_rows > self.config.capacity:
            raise DataError(
                f"{num_rows} rows are to be stored at once, and the replay buffer's capacity is "
                f"{self.config.capacity}; expected more than one update's rows: raise it (--replay.capacity)."
            )
        for episode in episodes:
            if episode.rows.dtype != self.layout.row_dtype:
                raise DataError(
                    f"the rows of episode {episode.episode_id} are {episode.rows.dtype.itemsize} bytes each, "
                    f"expected {self.layout.row_dtype.itemsize}; make them with this buffer's layout."
                )
            self._require_known(episode.task, f"episode {episode.episode_id}")

    def _require_known(self, task: str, where: str) -> None:
        if self._known_tasks is not None and task not in self._known_tasks:
            raise DataError(
                f"{where} is of the task {task!r}, expected one of {sorted(self._known_tasks)}."
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
        name = self._files.add(header, rows)
        self._next_number += 1
        self._ids.add(source, rows["episode"])
        self._rows.add_segment(header, name, rows)
