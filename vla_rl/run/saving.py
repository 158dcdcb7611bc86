"""Files that a run writes of each update: its checkpoint, its line of metrics, its trace.

    node `checkpoint`: prepare ─► line of the update in metrics.jsonl ─► commit
                       (all bytes)                                      (a rename)

A checkpoint appears only after the metrics of all its updates are on disk, in metrics.jsonl or in
the checkpoint itself. Therefore a run that is killed at any instant and resumed has a line for
every update. A full disk delays checkpoints and records, and never ends a run. If the run directory
was removed, it is made again so that the weights can be saved, and then the run ends.
"""

import asyncio
import logging
import shlex
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeAlias

import msgspec

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.graph import Slice, TaskGraph, TraceWriter, Update
from vla_rl.graph.update import Values
from vla_rl.learner import Checkpoint, PreparedCheckpoint, TeamState, prepare_checkpoint
from vla_rl.learner.checkpoint.folders import newest_name, prune
from vla_rl.pipelines.config import LearningConfig
from vla_rl.reporting import MetricLog, RunDirectory, read_metrics
from vla_rl.reporting.record_files import RetryingWriter
from vla_rl.reporting.run_directory import RunDirectoryGone
from vla_rl.util.tasks import run_in_thread

logger = logging.getLogger(__name__)


class RunSnapshot(msgspec.Struct, frozen=True):
    """The complete state of a run, taken at one instant."""

    learner: TeamState
    others: dict[str, Any]
    """States of the scheduler and of other parts, by name."""


class CheckpointSaver:
    """Saves checkpoints during a run.

    If one cannot be written, this is reported and tried again after each update.

    Args:
        every: updates between checkpoints.
        keep_last: number of checkpoints to keep.
        saved_version: update that the run resumes from.
    """

    def __init__(self, every: int, keep_last: int, saved_version: int) -> None:
        self._every, self._keep_last = every, keep_last
        self.saved_version = saved_version
        """Newest update that is on disk."""
        self._root: Path | None = None
        self._unwritten: Callable[[], bytes] = bytes
        self._is_wanted: Callable[[int], bool] = lambda version: False
        self._kept: Callable[[], Collection[int]] = tuple
        self._prepared: dict[int, PreparedCheckpoint] = {}
        self._is_overdue = False

    def open_folder(self, root: Path, unwritten: Callable[[], bytes]) -> None:
        """Prepare to save below `root`.

        `unwritten` returns the lines of metrics that found no room in their file; they are saved
        too.
        """
        self._root, self._unwritten = root, unwritten

    def also_save(self, is_due: Callable[[int], bool], kept: Callable[[], Collection[int]]) -> None:
        """Save checkpoints for another reader, too, and keep them as long as it needs them.

        Args:
            is_due: returns whether the reader wants a checkpoint of an update.
            kept: returns the updates whose checkpoints it still needs.
        """
        self._is_wanted, self._kept = is_due, kept

    def is_due(self, version: int) -> bool:
        """Return whether a checkpoint of this update is due."""
        return self._is_overdue or version % self._every == 0 or self._is_wanted(version)

    async def prepare(self, snapshot: RunSnapshot) -> None:
        """Write a checkpoint except for the final rename, which `commit` does.

        If the disk is full, log a warning.
        """
        try:
            self._prepared[snapshot.learner.weight_version] = await self._prepare(snapshot)
        except CheckpointError as error:
            self._postpone(error)

    async def commit(self, version: int) -> None:
        """Make the checkpoint of an update visible, if one was prepared.

        If the disk is full, log a warning.
        """
        prepared = self._prepared.pop(version, None)
        if prepared is None:
            return
        try:
            await self._commit(prepared, version)
        except CheckpointError as error:
            self._postpone(error)

    async def save_checkpoint(self, snapshot: RunSnapshot) -> Path:
        """Save a checkpoint now. Raises: CheckpointError; older checkpoints remain."""
        await self.discard()
        return await self._commit(await self._prepare(snapshot), snapshot.learner.weight_version)

    async def save_before_raising(
        self,
        error: BaseException,
        run: RunDirectory,
        version: int,
        take_snapshot: Callable[[], Awaitable[RunSnapshot]] | None,
    ) -> None:
        """Save the weights of `version` before `error` ends the run.

        A note of the error names the folder, or the reason why nothing was saved. `take_snapshot` is
        None if the weights may be half updated.
        """
        if take_snapshot is None:
            newest = await asyncio.to_thread(newest_name, run.checkpoints)
            error.add_note(
                f"the learner itself failed, so nothing was saved; the newest checkpoint is: {newest}"
            )
            return
        if self.saved_version == version:
            return
        try:
            folder = await self.save_checkpoint(await take_snapshot())
        except Exception as failure:  # the error that ended the run has to be raised, not this one
            error.add_note(
                f"the progress since update {self.saved_version} could not be saved: {failure}"
            )
        else:
            error.add_note(
                f"the progress until then was saved in {folder}; continue with "
                f"--resume {shlex.quote(str(run.path))}"
            )

    async def discard(self) -> None:
        """Remove checkpoints that were prepared and never committed."""
        while self._prepared:
            _, prepared = self._prepared.popitem()
            await prepared.discard()

    async def prune(self) -> None:
        """Remove the checkpoints that were kept for another reader and are not needed any more."""
        assert self._root is not None
        await run_in_thread(prune, self._root, self._keep_last, self._kept())

    async def _prepare(self, snapshot: RunSnapshot) -> PreparedCheckpoint:
        assert self._root is not None
        return await prepare_checkpoint(self._root, snapshot.learner, snapshot.others)

    async def _commit(self, prepared: PreparedCheckpoint, version: int) -> Path:
        # lines that find no room on a full disk travel in the checkpoint, so none is ever missing
        unwritten = await run_in_thread(self._unwritten)
        folder = await prepared.commit(
            keep_last=self._keep_last, keep=self._kept(), metrics=unwritten
        )
        if self._is_overdue:
            logger.warning("checkpoints can be written again: %s", folder)
        self.saved_version, self._is_overdue = version, False
        return folder

    def _postpone(self, error: CheckpointError) -> None:
        if not self._is_overdue:
            assert self._root is not None
            newest = newest_name(self._root)
            logger.warning(
                "%s The newest checkpoint is: %s. It is tried again after each update",
                error,
                newest,
            )
        self._is_overdue = True


Facts: TypeAlias = Mapping[str, Mapping[str, float]]
"""Numbers to show with nodes, by node."""


Slices: TypeAlias = Mapping[str, Sequence[Slice]]
"""Work of other processes, by the name of a lane."""


def _print_missing(run: RunDirectory, first: int) -> None:
    """Print a line if updates before `first` have no line of metrics, since theirs were damaged."""
    present = (
        {line["update"] for line in read_metrics(run.metrics)} if run.metrics.exists() else set()
    )
    missing = [str(update) for update in range(1, first + 1) if update not in present]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        print(
            f"{run.metrics} has no line for update {', '.join(missing[:10])}{more}; these updates are "
            "not made again",
            flush=True,
        )


class RunRecord:
    """The written record of a run. Use it as a context manager; record one update at a time.

    Args:
        run: the run's directory.
        config: the run's configuration, for a directory that has to be made again.
        graph: graph of an update.
        first: first update of the run.
        checkpoint: checkpoint that the run resumes from; the lines of metrics in it are written
            first.
        is_resumed: whether the directory is an earlier run's.

    Raises: ConfigError if wandb is requested and not installed, or the files of an earlier run
    cannot be written.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: LearningConfig,
        graph: TaskGraph,
        first: int,
        *,
        checkpoint: Checkpoint | None = None,
        is_resumed: bool = False,
    ) -> None:
        self._run, self._config = run, config
        self._turn = asyncio.Lock()
        try:
            self._log = MetricLog.open_log(
                run, config.run.wandb_project, resumed_at=first if is_resumed else None
            )
        except OSError as error:
            raise ConfigError(
                f"the metrics of {run.path} cannot be written: {error}; make room, or resume later"
            ) from error
        if checkpoint is not None and checkpoint.metrics:
            self._log.add_missing(checkpoint.metrics, run.metrics)
        if is_resumed:
            _print_missing(run, first)
        trace = TraceWriter(run.new_trace(first), graph)
        self._trace = RetryingWriter[tuple[Update, Facts, Slices]](
            f"the trace {trace.path.name}", lambda record: trace.write_update(*record), trace.close
        )
        try:
            graph.draw(run.path / "graph.txt")
        except OSError as error:
            logger.warning("the graph could not be drawn: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._trace.close()
        self._log.close()

    def unwritten(self) -> bytes:
        """Write the waiting lines of metrics to the disk; return those that find no room.

        Blocks.
        """
        return self._log.secured()

    async def note(
        self,
        update: Update,
        metrics: dict[str, float],
        facts: Facts = MappingProxyType({}),
        slices: Slices = MappingProxyType({}),
    ) -> None:
        """Record an update; `facts` are numbers for the trace by node, `slices` what other
        processes did meanwhile.

        Raises: RunDirectoryGone, after the directory was made again and the update recorded in it.
        """
        gone = await self.find_directory()
        async with self._turn:  # the log is for one thread at a time
            await asyncio.to_thread(self._log.write, update.index + 1, metrics)
        # an update that waits for room must hold no tensors
        traced = msgspec.structs.replace(update, values=Values())
        await asyncio.to_thread(
            self._trace.put, f"update {update.index + 1}", (traced, facts, slices)
        )
        if gone is not None:
            raise gone

    async def note_late(self, update: int, metrics: dict[str, float]) -> None:
        """Add values that were measured after an update's line to the curves of that update."""
        async with self._turn:
            await asyncio.to_thread(self._log.write_late, update, metrics)

    async def find_directory(self) -> RunDirectoryGone | None:
        """Check that the run directory still exists.

        If not, make it again and return the error to raise.
        """
        return await asyncio.to_thread(self._find_directory)

    def _find_directory(self) -> RunDirectoryGone | None:
        if self._run.is_there():
            return None
        message = (
            f"the run directory {self._run.path} was removed during the run, and its files are lost"
        )
        try:
            self._run.make_again(self._config)
        except OSError as error:
            return RunDirectoryGone(f"{message}; it cannot be made again: {error}")
        return RunDirectoryGone(
            f"{message}; it was made again to save the weights, and the run ends here"
        )
