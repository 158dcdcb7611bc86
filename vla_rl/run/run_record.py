"""Record each update: its line of metrics, then its trace.

A full disk delays the record and never ends a run.

If the run directory was removed, it is made again so that the weights can be saved, and then the
run ends.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Self, TypeAlias

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.graph import Slice, TaskGraph, TraceWriter, Update
from vla_rl.graph.update import Values
from vla_rl.learner import Checkpoint
from vla_rl.pipelines.config import LearningConfig
from vla_rl.reporting import MetricLog, RunDirectory, read_metrics
from vla_rl.reporting.outlet import Outlet
from vla_rl.reporting.run_directory import RunDirectoryGone

logger = logging.getLogger(__name__)

Facts: TypeAlias = Mapping[str, Mapping[str, float]]
"""Numbers to show with nodes, by node."""


Slices: TypeAlias = Mapping[str, Sequence[Slice]]
"""Work of other processes, by the name of a lane."""


def _say_missing(run: RunDirectory, first: int) -> None:
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
            self._log = MetricLog.open(
                run, config.run.wandb_project, resumed_at=first if is_resumed else None
            )
        except OSError as error:
            raise ConfigError(
                f"the metrics of {run.path} cannot be written: {error}; make room, or resume later"
            ) from error
        if checkpoint is not None and checkpoint.metrics:
            self._log.add_missing(checkpoint.metrics, run.metrics)
        if is_resumed:
            _say_missing(run, first)
        trace = TraceWriter(run.new_trace(first), graph)
        self._trace = Outlet[tuple[Update, Facts, Slices]](
            f"the trace {trace.path.name}", lambda record: trace.write(*record), trace.close
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
