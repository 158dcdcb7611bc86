"""Evaluate the checkpoints of a run on its held-out starts, beside training.

    commit of update 8 ─► offer(8) ─► evaluator process ─► held_out.jsonl ─► curve, best, stop
                             │ one runs already
                             └► the one that waits; a newer one takes its place, with one line

The task belongs to `async with`: leaving the block in any way ends it and its process. A checkpoint
is kept until it is evaluated, so after a kill the resumed run finishes what is missing.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

import msgspec

from vla_rl.actors import Runtime
from vla_rl.actors.completion import run_to_its_end
from vla_rl.actors.waits import note_progress
from vla_rl.errors import CheckpointError
from vla_rl.evaluation.evaluator import EvaluatorSettings, evaluate_checkpoint
from vla_rl.evaluation.held_out import HeldOutJudge
from vla_rl.evaluation.held_out_book import HeldOutBook
from vla_rl.evaluation.held_out_curve import (
    Curve,
    CurvePoint,
    curve_of,
    read_curve,
    write_curve,
)
from vla_rl.learning.checkpoint_folders import (
    checkpoint_of,
    list_checkpoints,
    set_best,
    update_in_name,
)
from vla_rl.observe import RunDirectory
from vla_rl.rollout.owned_tasks import leave
from vla_rl.simulation import SimulatorConfig
from vla_rl.types import EpisodeSpec

logger = logging.getLogger(__name__)


class JudgingBeside:
    """Evaluates checkpoints one after another while the run trains on.

    Args:
        judge: the held-out episodes, their results, and the schedule.
        settings: the policy's class, and the simulators beside training.
        run: the run's directory.
        runtime: owns the evaluator's process.
        first: update that the run begins or resumes with.
        note: called with each version that has run all episodes, and its metrics.
        stop: asks the run to stop in order.
    """

    def __init__(
        self,
        judge: HeldOutJudge,
        settings: EvaluatorSettings,
        run: RunDirectory,
        runtime: Runtime,
        *,
        first: int,
        note: Callable[[int, dict[str, float]], Awaitable[None]],
        stop: Callable[[], None],
    ) -> None:
        self._judge, self._settings, self._run, self._runtime = judge, settings, run, runtime
        self._first, self._note, self._stop = first, note, stop
        self._keys = [judge.format.key_of(episode) for episode in judge.episodes]
        self._book: HeldOutBook | None = None
        self._skipped: list[int] = []
        self._current: int | None = None
        self._waiting: int | None = None
        self._is_last_offered = False
        self._offered, self._writing = asyncio.Event(), asyncio.Lock()
        self._tasks = asyncio.TaskGroup()
        self._judging: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._book = await asyncio.to_thread(self._judge.open, self._run)
        earlier = await asyncio.to_thread(read_curve, self._run)
        skipped = earlier.skipped if earlier is not None else ()
        self._skipped = [version for version in skipped if version <= self._first]
        await self._write_curve()
        unfinished = await asyncio.to_thread(self._unfinished)
        await self._tasks.__aenter__()
        for version in unfinished:
            self.offer(version)
        self._judging = self._tasks.create_task(self._judge_each(), name="held-out episodes")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._judging is not None
        self._judging.cancel()
        await leave(self._tasks, kind, error, traceback)

    @property
    def curve(self) -> Curve:
        """The results of all versions that have run all episodes."""
        rows = () if self._book is None else self._book.rows
        return curve_of(rows, self._keys, self._judge.format, self._skipped)

    def kept(self) -> frozenset[int]:
        """Return the updates whose checkpoints are evaluated now or next."""
        return frozenset(each for each in (self._current, self._waiting) if each is not None)

    def is_due(self, version: int) -> bool:
        """Return whether the schedule evaluates this version."""
        every = self._judge.schedule.every
        return every is not None and version % every == 0

    def offer(self, version: int) -> None:
        """Evaluate a saved checkpoint: now, or after the one that runs, instead of one that waits.

        Never waits itself.
        """
        if version in self.kept() or not self._missing(version):
            return
        if self._current is None:
            self._current = version
            self._offered.set()
            return
        if self._waiting is not None:
            self._skip(self._waiting, version)
        self._waiting = version

    async def begin(self, save: Callable[[], Awaitable[None]]) -> None:
        """Offer the weights that the run begins with; `save` writes a checkpoint if there is none."""
        root = self._run.checkpoints
        if await asyncio.to_thread(checkpoint_of, root, 0) is None:
            await save()
        self.update_ended(0, await asyncio.to_thread(checkpoint_of, root, 0) is not None)

    def update_ended(self, version: int, is_saved: bool) -> None:
        """Offer a version if the schedule evaluates it; one line if its checkpoint is not saved."""
        if not self.is_due(version):
            return
        if is_saved:
            self.offer(version)
        else:
            print(
                f"weights {version} are not evaluated on held-out starts, because their "
                "checkpoint could not be written",
                flush=True,
            )

    async def finish(self, last: int, simulators: SimulatorConfig) -> None:
        """Evaluate the last weights, with the simulators that training no longer needs, and wait
        until all evaluations are done.
        """
        assert self._judging is not None
        # training has ended, so nothing is slowed down any more
        self._settings = msgspec.structs.replace(self._settings, simulators=simulators, niceness=0)
        self.offer(last)
        if waited_for := sorted(self.kept()):
            versions = " and ".join(map(str, waited_for))
            print(f"waiting for the held-out episodes of weights {versions}", flush=True)
        self._is_last_offered = True
        self._offered.set()
        await asyncio.wait((self._judging,))  # its error is raised when the block is left

    def _skip(self, version: int, newer: int) -> None:
        print(
            f"held-out episodes of weights {version} are skipped: those of weights "
            f"{self._current} still run, and weights {newer} are newer; raise --held-out.every or "
            "--held-out.simulators to evaluate all of them",
            flush=True,
        )
        self._skipped.append(version)
        self._tasks.create_task(self._write_curve(), name="curve of held-out episodes")

    async def _judge_each(self) -> None:
        while True:
            if self._current is not None:
                await self._judge_one(self._current)
                self._current, self._waiting = self._waiting, None
            elif self._is_last_offered:
                return
            else:
                self._offered.clear()
                await self._offered.wait()

    async def _judge_one(self, version: int) -> None:
        folder = await asyncio.to_thread(checkpoint_of, self._run.checkpoints, version)
        if folder is None:
            raise CheckpointError(
                f"{self._run.checkpoints} has no checkpoint of update {version}, which its "
                "held-out episodes need; do not remove checkpoints while the run goes on"
            )
        began = time.monotonic()
        await evaluate_checkpoint(
            self._runtime,
            self._settings,
            self._run,
            version,
            folder / "policy",
            lambda: self._missing(version),
            self._add,
        )
        await self._write_curve()
        curve = self.curve
        point = next(each for each in curve.points if each.weights == version)
        await self._note(version, curve.metrics_of(point))
        self._report(curve, point, time.monotonic() - began)

    def _report(self, curve: Curve, point: CurvePoint, seconds: float) -> None:
        best = curve.best
        assert best is not None
        rank = (
            "the best so far"
            if best.weights == point.weights
            else f"the best are weights {best.weights} with {best.all.mean:.3g}"
        )
        print(
            f"held out: weights {point.weights}: {curve.in_words(point)}, in {seconds:.0f} s; "
            f"{rank}",
            flush=True,
        )
        limit = self._judge.schedule.stop_after
        if limit is not None and curve.num_without_gain >= limit and not self._is_last_offered:
            print(
                f"stopping: evaluations without gain since weights {best.weights}: "
                f"{curve.num_without_gain} (--held-out.stop-after {limit})",
                flush=True,
            )
            self._stop()

    async def _add(self, line: bytes) -> None:
        assert self._book is not None
        await self._book.add(line)
        note_progress("held-out episodes")

    def _missing(self, version: int) -> list[EpisodeSpec]:
        assert self._book is not None
        return self._book.missing(version, self._judge.episodes)

    def _unfinished(self) -> list[int]:
        """Return the versions that an earlier part of the run left unevaluated, oldest first."""
        versions = {update_in_name(folder) for folder in list_checkpoints(self._run.checkpoints)}
        return sorted(
            version
            for version in versions - {None, *self._skipped}
            if version is not None and self.is_due(version) and self._missing(version)
        )

    async def _write_curve(self) -> None:
        async with self._writing:
            await run_to_its_end(self._write_curve_and_best, self.curve)

    def _write_curve_and_best(self, curve: Curve) -> None:
        """Store the curve, and link the best of the checkpoints that are still there."""
        ranked = sorted(curve.points, key=lambda point: (-point.all.mean, point.weights))
        there = (checkpoint_of(self._run.checkpoints, point.weights) for point in ranked)
        try:
            set_best(self._run.checkpoints, next((each for each in there if each), None))
            write_curve(self._run, curve)
        except OSError as error:
            logger.warning("the curve of held-out episodes could not be written: %s", error)
