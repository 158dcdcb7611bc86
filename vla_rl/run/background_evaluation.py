"""Evaluate the checkpoints of a run on its held-out starts, beside training.

    commit of update 8 ─► offer(8) ─► evaluator process ─► held_out_choose.jsonl ─► best, stop
                             │ one runs already
                             └► the one that waits; a newer one takes its place, with one line
    first, best and last weights ─► evaluator process ─► held_out.jsonl: what is reported

The starts that choose the best checkpoint are not those that are reported. Those run for the first
weights when nothing else does, and for the last and the best ones at the end.

The task belongs to `async with`: leaving the block in any way ends it and its process. A checkpoint
is kept until it is evaluated, so after a kill the resumed run finishes what is missing.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import CheckpointError
from vla_rl.evaluation.checkpoint_evaluator import (
    EvaluatorSettings,
    evaluate_checkpoint,
    evaluator_settings,
)
from vla_rl.evaluation.held_out import HeldOutEvaluator
from vla_rl.evaluation.held_out_curve import (
    Curve,
    StartSet,
    make_curve,
    read_curve,
    write_curve,
)
from vla_rl.evaluation.held_out_schedule import describe_noise, has_stopped_gaining
from vla_rl.evaluation.records import EpisodeRecord
from vla_rl.learner.checkpoint.folders import (
    find_checkpoint,
    list_checkpoints,
    set_best,
    update_in_name,
)
from vla_rl.pipelines.config import LearningConfig, TrainingConfig
from vla_rl.reporting import RunDirectory
from vla_rl.team.members import Team
from vla_rl.util.stalls import note_progress
from vla_rl.util.tasks import leave_group, run_in_thread

logger = logging.getLogger(__name__)


class BackgroundEvaluation:
    """Evaluates checkpoints one after another while the run trains on.

    Args:
        evaluator: the held-out episodes, their results, and the schedule.
        settings: the policy's class, and the simulators beside training.
        run: the run's directory.
        runtime: owns the evaluator's process.
        first: update that the run begins or resumes with.
        note: called with each version that has run all episodes of a set, and its metrics.
    """

    def __init__(
        self,
        evaluator: HeldOutEvaluator,
        settings: EvaluatorSettings,
        run: RunDirectory,
        runtime: Runtime,
        *,
        first: int,
        note: Callable[[int, dict[str, float]], Awaitable[None]],
    ) -> None:
        self._evaluator, self._settings, self._run, self._runtime = (
            evaluator,
            settings,
            run,
            runtime,
        )
        self._first, self._note, self._skipped = first, note, list[int]()
        self._choose: StartSet | None = None
        self._report: StartSet | None = None  # none in a run from before there were two sets
        self._current: int | None = None
        self._waiting: int | None = None
        self._last: int | None = None  # version that was offered last, once the run ends
        self.has_stopped_gaining = asyncio.Event()
        """Set when the schedule says that the run should end early."""
        self._offered, self._writing = asyncio.Event(), asyncio.Lock()
        self._tasks = asyncio.TaskGroup()
        self._evaluating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        earlier = await asyncio.to_thread(read_curve, self._run)
        await asyncio.to_thread(self._open, has_one_set=earlier is not None and earlier.has_one_set)
        skipped = earlier.skipped if earlier is not None else ()
        self._skipped = [version for version in skipped if version <= self._first]
        await self._write_curve()
        # before the group of tasks is open: an error of the disk needs no task to be cancelled
        unfinished = await asyncio.to_thread(self._unfinished)
        await self._tasks.__aenter__()
        for version in unfinished:
            self.offer(version)
        self._evaluating = self._tasks.create_task(self._evaluate_each(), name="held-out episodes")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._evaluating is not None
        self._evaluating.cancel()
        await leave_group(self._tasks, kind, error, traceback)

    @property
    def curve(self) -> Curve:
        """The results of all versions that have run all episodes of a set."""
        report = () if self._report is None else self._report.points
        chose = () if self._choose is None else self._choose.points
        return make_curve(
            self._evaluator.format.measure,
            chose,
            report,
            self._skipped,
            has_one_set=self._choose is not None and self._report is None,
        )

    def kept(self) -> frozenset[int]:
        """Return the updates whose checkpoints are evaluated now or later."""
        first = 0 if self._report is not None and self._report.missing(0) else None
        return frozenset(each for each in (self._current, self._waiting, first) if each is not None)

    def is_due(self, version: int) -> bool:
        """Return whether the schedule evaluates this version."""
        every = self._evaluator.schedule.every
        return every is not None and version % every == 0

    def offer(self, version: int) -> None:
        """Evaluate a saved checkpoint: now, or after the one that runs, instead of one that waits.

        Never waits itself.
        """
        assert self._choose is not None
        if version in (self._current, self._waiting) or not self._choose.missing(version):
            return
        if self._current is None:
            # taken here and not by the loop, so that `kept` protects the checkpoint from now on
            self._current = version
            self._offered.set()
            return
        if self._waiting is not None:
            self._skip(self._waiting, version)
        self._waiting = version

    async def begin(self, save: Callable[[], Awaitable[None]]) -> None:
        """Offer the weights that the run begins with; `save` writes a checkpoint if there is none."""
        if await self._find(0) is None:
            await save()
        self.update_ended(0, await self._find(0) is not None)
        self._offered.set()  # they are reported too

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
        """Evaluate the last weights, and then those that are reported, with the simulators that
        training no longer needs, and wait until all evaluations are done.
        """
        assert self._evaluating is not None
        # training has ended, so nothing is slowed down any more
        self._settings = msgspec.structs.replace(self._settings, simulators=simulators, niceness=0)
        self.offer(last)
        waited_for = {each for each in (self._current, self._waiting) if each is not None}
        if self._report is not None:
            waited_for |= {version for version in (0, last) if self._report.missing(version)}
        if waited_for:
            versions = " and ".join(map(str, sorted(waited_for)))
            print(f"waiting for the held-out episodes of weights {versions}", flush=True)
        self._last = last
        self._offered.set()
        await asyncio.wait((self._evaluating,))  # its error is raised when the block is left

    def _open(self, *, has_one_set: bool) -> None:
        evaluator, report = self._evaluator, self._evaluator.open_report(self._run)
        if has_one_set:
            self._choose = StartSet("chose", evaluator.one_set, report)
            print(
                f"{self._run.path} was begun with one set of held-out starts, which go on choosing "
                "the best checkpoint: its results are marked as such, and no other starts report it",
                flush=True,
            )
        else:
            chose = evaluator.open_choosing(self._run)
            self._report = StartSet("report", evaluator.episodes, report)
            self._choose = StartSet("chose", evaluator.choose, chose)
        patience, num = evaluator.schedule.stop_after, len(self._choose.episodes)
        if patience is not None and (line := describe_noise(num, patience)) is not None:
            print(line, flush=True)

    def _skip(self, version: int, newer: int) -> None:
        print(
            f"held-out episodes of weights {version} are skipped: those of weights "
            f"{self._current} still run, and weights {newer} are newer; raise --held-out.every or "
            "--held-out.simulators to evaluate all of them",
            flush=True,
        )
        self._skipped.append(version)
        self._tasks.create_task(self._write_curve(), name="curve of held-out episodes")

    async def _evaluate_each(self) -> None:
        assert self._choose is not None
        # who waits                    for                          woken by
        # this loop                    `_offered`                   `offer`, `begin`, `finish`
        # `evaluate_checkpoint` in it  the next record, or the end  an episode that ends; a process that dies
        # `finish`                     this loop's end              `_report_last`, an error, cancellation
        while True:
            if self._current is not None:
                await self._evaluate_version(self._current, self._choose)
                self._current, self._waiting = self._waiting, None
            elif await self._report_first():
                # training may have offered a version meanwhile, and choosing comes before reporting
                continue
            elif self._last is not None:
                await self._report_last(self._last)
                return
            else:
                self._offered.clear()
                await self._offered.wait()

    async def _report_first(self) -> bool:
        """Run the first weights on the starts that are reported; return whether there was any to
        run, and their checkpoint.
        """
        if self._report is None or not self._report.missing(0) or await self._find(0) is None:
            return False
        await self._evaluate_version(0, self._report)
        return True

    async def _report_last(self, last: int) -> None:
        """Run the last weights on the starts that are reported, and then the best."""
        if self._report is None:
            return
        best = self.curve.best
        # the last ones first: until the best are done, the newest that are reported are the last
        for version in (last, *(() if best is None else (best.weights,))):
            if not self._report.missing(version):
                continue
            if await self._find(version) is None:
                print(
                    f"weights {version} are not reported, because their checkpoint is gone",
                    flush=True,
                )
                continue
            await self._evaluate_version(version, self._report)

    async def _evaluate_version(self, version: int, starts: StartSet) -> None:
        folder = await self._find(version)
        if folder is None:
            raise CheckpointError(
                f"{self._run.checkpoints} has no checkpoint of update {version}, which its "
                "held-out episodes need; do not remove checkpoints while the run goes on"
            )
        began, settings = time.monotonic(), self._settings
        is_reported = starts is self._report or self._report is None
        if not is_reported:  # contact sheets show the starts that are reported
            settings = msgspec.structs.replace(settings, contact_sheet=None)

        async def add(record: EpisodeRecord) -> None:
            await starts.file.append_record(record)
            note_progress("held-out episodes")

        await evaluate_checkpoint(
            self._runtime,
            settings,
            self._run,
            version,
            folder / "policy",
            lambda: starts.missing(version),
            add,
        )
        # before the line is printed: a reader of the line finds the curve that it speaks of
        await self._write_curve()
        curve = self.curve
        point = next(each for each in starts.points if each.weights == version)
        prefix = "held_out" if is_reported else "held_out_choose"
        await self._note(version, curve.metrics_of(point, prefix))
        print(
            f"held out, {starts.name}: weights {version}: {curve.describe(point.all)}, in "
            f"{time.monotonic() - began:.0f} s{curve.describe_rank(point) if starts is self._choose else ''}",
            flush=True,
        )
        if starts is self._choose:
            self._stop_if_no_gain(curve)

    async def _find(self, version: int) -> Path | None:
        """Return the folder of a version's checkpoint. Listing a network disk may take seconds."""
        return await asyncio.to_thread(find_checkpoint, self._run.checkpoints, version)

    def _stop_if_no_gain(self, curve: Curve) -> None:
        patience = self._evaluator.schedule.stop_after
        if patience is None or self._last is not None:
            return
        if not has_stopped_gaining(
            [(each.all.mean * each.all.episodes, each.all.episodes) for each in curve.chose],
            patience,
        ):
            return
        assert curve.best is not None
        print(
            f"stopping: the trend of the newest evaluations is below 2 points an evaluation; the "
            f"best are weights {curve.best.weights} (--held-out.stop-after {patience})",
            flush=True,
        )
        self.has_stopped_gaining.set()

    def _unfinished(self) -> list[int]:
        """Return the versions that an earlier part of the run left unevaluated, oldest first."""
        assert self._choose is not None
        versions = {update_in_name(folder) for folder in list_checkpoints(self._run.checkpoints)}
        return sorted(
            version
            for version in versions - {None, *self._skipped}
            if version is not None and self.is_due(version) and self._choose.missing(version)
        )

    async def _write_curve(self) -> None:
        # one at a time: a skipped version and a finished one may write in the same moment
        async with self._writing:
            await run_in_thread(_write_curve_and_best, self._run, self.curve)


def _write_curve_and_best(run: RunDirectory, curve: Curve) -> None:
    """Store the curve, and link the best of the checkpoints that are still there."""
    ranked = sorted(curve.chose, key=lambda point: (-point.all.mean, point.weights))
    existing = (find_checkpoint(run.checkpoints, point.weights) for point in ranked)
    try:
        set_best(run.checkpoints, next((each for each in existing if each), None))
        write_curve(run, curve)
    except OSError as error:
        logger.warning("the curve of held-out episodes could not be written: %s", error)


def background_settings(
    evaluator: HeldOutEvaluator | None, config: LearningConfig, team: Team
) -> EvaluatorSettings | None:
    """Return the settings of evaluations beside training; None if the evaluator has no such schedule.

    Raises: ConfigError if this run cannot have them.
    """
    if evaluator is None or evaluator.schedule.every is None:
        return None
    schedule = evaluator.schedule
    schedule.require(
        len(evaluator.episodes) > 0 and len(evaluator.choose) > 0,
        "every",
        f"none, because there are {len(evaluator.episodes)} held-out starts to report and "
        f"{len(evaluator.choose)} others to choose the best checkpoint by; at least one of each is needed",
    )
    schedule.require(
        isinstance(config, TrainingConfig) and len(team.members) == 1,
        "every",
        "none but in a run of one policy in simulators",
    )
    assert isinstance(config, TrainingConfig)
    (member,) = team.members.values()
    return evaluator_settings(
        member.model,
        evaluator.format.measure,
        evaluator.contact_sheet,
        msgspec.structs.replace(config.simulators, num_envs=schedule.simulators),
        torch_threads=config.run.torch_threads,
        niceness=schedule.niceness,
    )
