"""Write down each update: its line of metrics, then its trace. A full disk delays that and never ends a run.

A run directory that was removed is made again, so that what is learnt can be saved, and then ends the run.
"""

import asyncio
import logging
from types import TracebackType
from typing import Self

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.graph import TaskGraph, TraceWriter, Update
from vla_rl.graph.update import Values
from vla_rl.learning import Checkpoint
from vla_rl.observe import MetricLog, RunDirectory
from vla_rl.observe.outlet import Outlet
from vla_rl.observe.run_directory import RunDirectoryGone
from vla_rl.pipelines.config import LearningConfig

logger = logging.getLogger(__name__)


class RunRecord:
    """The written record of a run. Use it as a context manager; one update is noted at a time.

    Args:
        run: the directory.
        config: of the run, for a directory that has to be made again.
        graph: of an update.
        first: the update that the run begins with.
        checkpoint: what a resumed run goes on from; lines of metrics that it holds are written first.
        is_resumed: the directory is an earlier run's.

    Raises: ConfigError if wandb is asked for and not installed, or the files of an earlier run cannot be written.
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
        try:
            self._log = MetricLog.open(run, config.run.wandb_project, resumed_at=first if is_resumed else None)
        except OSError as error:
            raise ConfigError(
                f"the metrics of {run.path} cannot be written: {error}; make room, or resume later"
            ) from error
        if checkpoint is not None and checkpoint.metrics:
            self._log.add_missing(checkpoint.metrics, run.metrics)
        trace = TraceWriter(run.new_trace(first), graph)
        self._trace = Outlet(f"the trace {trace.path.name}", trace.write, trace.close)
        try:
            graph.draw(run.path / "graph.txt")
        except OSError as error:
            logger.warning("the graph could not be drawn: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._trace.close()
        self._log.close()

    def unwritten(self) -> bytes:
        """Bring the lines of metrics to the disk; gives those that found no place. Blocks."""
        return self._log.secured()

    async def note(self, update: Update, metrics: dict[str, float]) -> None:
        """Write an update down. Raises: RunDirectoryGone, once the directory was made again and the update is noted."""
        gone = await self.find_directory()
        await asyncio.to_thread(self._log.write, update.index + 1, metrics)
        traced = msgspec.structs.replace(update, values=Values())  # one that waits for room holds no tensors
        await asyncio.to_thread(self._trace.put, f"update {update.index + 1}", traced)
        if gone is not None:
            raise gone

    async def find_directory(self) -> RunDirectoryGone | None:
        """Look whether the run directory is still there. If not, it is made again and the error to raise is given."""
        return await asyncio.to_thread(self._find_directory)

    def _find_directory(self) -> RunDirectoryGone | None:
        if self._run.is_there():
            return None
        message = f"the run directory {self._run.path} was removed while the run was on, and what it held is lost"
        try:
            self._run.make_again(self._config)
        except OSError as error:
            return RunDirectoryGone(f"{message}; it cannot be made again: {error}")
        return RunDirectoryGone(f"{message}; it was made again to save what was learnt, and the run ends here")
