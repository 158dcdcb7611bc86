"""One run from its start to its last update or its end: everything around the graph of one update.

    TrainingParts ─► pipeline ─► customise ─► graph ─► executor ─► updates ─► metrics, trace, live view
                                                                       └► run directory: checkpoints, videos

`train` of `run/train.py` builds it, and builds the next one if ranks of the learner have to be
restarted.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from vla_rl.actors import LastingForkServers, Watchdog
from vla_rl.evaluation.held_out import HeldOutEvaluator
from vla_rl.evaluation.held_out_curve import Curve, curve_tables
from vla_rl.graph import Executor, NodeFailed, NodeType, Pipeline, TaskGraph, Update
from vla_rl.learner import Checkpoint
from vla_rl.learner.checkpoint.folders import BEST
from vla_rl.pipelines.config import LearningConfig, TrainingConfig
from vla_rl.pipelines.registry import customise_pipeline, make_pipeline, refuse_unused_settings
from vla_rl.reporting import LiveView, RunDirectory, Snapshot, print_summary
from vla_rl.reporting.waits import WaitsSocket
from vla_rl.rollout import TaskStart, embodied_agent
from vla_rl.run.background_evaluation import (
    BackgroundEvaluation,
    background_settings,
)
from vla_rl.run.parts import TrainingParts
from vla_rl.run.resuming import Restarts
from vla_rl.run.saving import RunRecord
from vla_rl.run.terminal import StopSignal, lasting_output, unless_set
from vla_rl.run.update_metrics import UpdateMetrics, UpdateProfiler, node_facts
from vla_rl.team.members import Team, Trainable
from vla_rl.team.pools import chaos, describe_environments, simulator_pids
from vla_rl.types import Agent, derive_seed
from vla_rl.util.tasks import finish_despite_cancellation
from vla_rl.util.values import plain_console

Customise: TypeAlias = Callable[[Pipeline], Pipeline]
"""Changes a pipeline before it is built:
`lambda p: p.replace_node("reward", my_reward, reads="groups")`."""


@dataclass(frozen=True)
class Outcome:
    """The result of a training run.

    Example:
        Outcome(run=RunDirectory(Path("runs/srpo_toy-20250101-120000")), progress=..., was_stopped=False)
    """

    run: RunDirectory
    progress: Snapshot
    was_stopped: bool
    """True if the run was asked to stop before its last update."""

    stopped_by: signal.Signals | None = None
    """Signal that stopped the run, if one did."""


class TrainingRun:
    """A pipeline over the parts of a run, not started.

    Building one opens nothing, so its graph can be inspected.

    Args: those of `train`; `first_update`, the update that the run begins with; `restarts`, how
        often it was restarted before, and what was lost (None: never); `fork_servers`, those of
        earlier starts (None: new ones).
    """

    def __init__(
        self,
        config: LearningConfig,
        starts: Sequence[TaskStart],
        model: Trainable,
        *,
        agent: Agent = embodied_agent,
        customise: Customise = lambda pipeline: pipeline,
        evaluator: HeldOutEvaluator | None = None,
        first_update: int = 0,
        restarts: Restarts | None = None,
        fork_servers: LastingForkServers | None = None,
    ) -> None:
        self._config, self._evaluator, team = config, evaluator, Team.of(model)
        if evaluator is not None:
            for member in team.members.values():
                evaluator.require_means(member.model)
        self._evaluation_settings = background_settings(evaluator, config, team)
        self._parts = TrainingParts(
            config,
            starts,
            team,
            agent=agent,
            first_update=first_update,
            restarts=restarts,
            # held-out episodes run on the hosts
            local_evaluation=evaluator is not None and not evaluator.runs_on_hosts,
            fork_servers=fork_servers,
        )
        self.graph: TaskGraph = customise_pipeline(make_pipeline(self._parts), customise).build()
        if self._parts.hosts is not None:
            # imported here, because one host pays nothing for what several need
            from vla_rl.run.hosts import choose_image_route

            choose_image_route(config, self.graph, team, self._parts.hosts)
        self._metrics = UpdateMetrics(
            config, self._parts, restarts.num_restarts if restarts is not None else 0
        )
        refuse_unused_settings(
            config,
            self.graph,
            has_critic=self._parts.has_critic,
            makes_videos=any(node.func is self._parts.show for node in self.graph.nodes.values()),
        )
        self._evaluation: BackgroundEvaluation | None = None
        self._stop: StopSignal | None = None
        self.has_started = False
        """Whether the learner has started."""

    @property
    def config(self) -> LearningConfig:
        """Settings of the run."""
        return self._config

    @property
    def saved_version(self) -> int:
        """Newest update that is on disk; 0 if none is."""
        return self._parts.saver.saved_version

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether the run was asked to end."""
        is_stopped = self._stop is not None and self._stop.is_asked
        return is_stopped or self._has_stopped_gaining

    @property
    def _has_stopped_gaining(self) -> bool:
        return self._evaluation is not None and self._evaluation.has_stopped_gaining.is_set()

    @property
    def simulator_pids(self) -> list[int]:
        """Simulator processes that are running."""
        return simulator_pids(self._parts.pool)

    async def execute(
        self, run: RunDirectory, checkpoint: Checkpoint | None = None, *, is_resumed: bool = False
    ) -> Outcome:
        """Make the updates and write all files into `run`.

        With `is_resumed` it is an earlier run's; `checkpoint`, if given, is where to start.

        Call it once.
        """
        parts = self._parts
        with (
            lasting_output(),
            Watchdog(stall_after_s=self._config.run.stall_warning_s),
            WaitsSocket(run.path),
            StopSignal() as stop,
        ):
            self._stop = stop
            print(
                f"run {run.path}: starting {parts.pool.num_envs} {describe_environments(self._config)}",
                flush=True,
            )
            opened = parts.opened_learner(
                run, is_resumed=is_resumed, has_checkpoint=checkpoint is not None
            )
            async with parts.runtime, parts.lane, opened:
                self.has_started = True
                if checkpoint is not None:
                    await parts.restore(checkpoint)
                else:
                    await parts.import_demonstrations()
                if is_resumed:
                    # not before: settings that do not fit the checkpoint must leave the run as it was
                    run.record_resume(self._config)
                before, first = parts.scheduler.state().ledger, parts.scheduler.version
                videos = parts.write_videos(run)
                make = partial(
                    RunRecord, run, self._config, self.graph, first
                )  # slow: it imports much, and may go on-line
                record = await asyncio.to_thread(make, checkpoint=checkpoint, is_resumed=is_resumed)
                parts.saver.open_folder(run.checkpoints, record.unwritten)
                self._evaluation = self._make_background_evaluation(run, record)
                try:
                    with record:
                        await self._carry_out(run, record, stop)
                finally:
                    await asyncio.to_thread(videos.close)
                    await parts.saver.discard()
            progress = parts.progress.snapshot()
            counted = parts.scheduler.state().ledger.since(before)
            print_summary(progress, counted.filtered, counted.dropped)
            if self._evaluation is not None:
                print_curve(self._evaluation.curve, run, parts.scheduler.version)
            return Outcome(
                run, progress, was_stopped=self.is_asked_to_stop, stopped_by=stop.received
            )

    def _make_background_evaluation(
        self, run: RunDirectory, record: RunRecord
    ) -> BackgroundEvaluation | None:
        """Return the evaluations beside training, for which the run saves checkpoints too."""
        if self._evaluation_settings is None:
            return None
        assert isinstance(self._evaluator, HeldOutEvaluator)
        parts = self._parts
        background = BackgroundEvaluation(
            self._evaluator,
            self._evaluation_settings,
            run,
            parts.runtime,
            first=parts.scheduler.version,
            note=record.note_late,
        )
        parts.saver.also_save(background.is_due, background.kept)
        return background

    async def _carry_out(self, run: RunDirectory, record: RunRecord, stop: StopSignal) -> None:
        """Make the updates; when they end for any reason, save what is not saved yet."""
        parts = self._parts
        try:
            await stop.unless_asked(self._make_updates(run, record))
        except BaseException as error:
            is_of_learner = (
                isinstance(error, NodeFailed)
                and self.graph.nodes[error.node].node_type is NodeType.MODEL_TRAIN
            )
            is_whole = parts.learn.is_between_updates and not is_of_learner
            await parts.saver.save_before_raising(
                error, run, parts.scheduler.version, parts.snapshot if is_whole else None
            )
            raise
        is_early = stop.is_asked and parts.scheduler.version < self._config.run.updates
        # if stopped early, episodes were run since the last checkpoint, or there is none yet
        if is_early or parts.saver.saved_version != parts.scheduler.version:
            await self._save_early(record)

    async def _save_early(self, record: RunRecord) -> None:
        """Save the weights and what was run since. Raises: RunDirectoryGone, after saving."""
        gone = await record.find_directory()
        await self._parts.saver.save_checkpoint(await self._parts.snapshot())
        if gone is not None:
            raise gone

    async def _make_updates(self, run: RunDirectory, record: RunRecord) -> None:
        background = self._evaluation
        if background is None:
            await self._make_updates_and_evaluate(run, record, self._evaluator)
            return
        assert isinstance(self._config, TrainingConfig)
        scheduler = self._parts.scheduler
        # who waits       for                                      woken by
        # `unless_set`    the last update, or the end of gains     `_train`, or `has_stopped_gaining`
        # `finish`        all evaluations                          the loop of `BackgroundEvaluation`
        async with background:
            updates = self._make_updates_and_evaluate(run, record, None)
            await unless_set(background.has_stopped_gaining, updates)
            if scheduler.version == self._config.run.updates:
                await self._save_last()
            elif background.has_stopped_gaining.is_set():
                await self._save_early(record)
            else:
                return
            await background.finish(scheduler.version, self._config.simulators)
            await self._parts.saver.prune()

    async def _make_updates_and_evaluate(
        self, run: RunDirectory, record: RunRecord, evaluator: HeldOutEvaluator | None
    ) -> None:
        """Make the updates; `evaluator` evaluates before the first and after the last of them."""
        parts, last = self._parts, self._config.run.updates
        seed = derive_seed(self._config.run.seed, "chaos")
        broken = chaos(lambda: self.simulator_pids, self._config.run.chaos_every_s, seed)
        # faults last in and first out: a simulator that closes must not be frozen meanwhile
        async with parts.opened_runners(run.path), broken:
            if parts.scheduler.version == 0:
                if evaluator is not None:
                    await self._evaluate(run, evaluator)
                if self._evaluation is not None:
                    await self._evaluation.begin(self._save_now)
            if parts.scheduler.version < last:
                await self._train(run, record)
            if evaluator is not None and parts.scheduler.version == last:
                await self._save_last()  # the evaluated weights have to be on disk
                await self._evaluate(run, evaluator)

    async def _evaluate(self, run: RunDirectory, evaluator: HeldOutEvaluator) -> None:
        """Evaluate the current weights: on the hosts that run episodes, if there are any."""
        parts = self._parts
        if parts.hosts is not None and evaluator.runs_on_hosts:
            await parts.hosts.weights.wait_applied()
            await evaluator.evaluate_on_hosts(run, parts.hosts.evaluators)
        else:
            assert parts.engine is not None  # `evaluates_here` has this process keep one
            await parts.engine.wait_applied()
            await evaluator(run, parts.pool, parts.engine)

    async def _save_last(self) -> None:
        if self._parts.saver.saved_version != self._config.run.updates:
            await self._save_now()

    async def _save_now(self) -> None:
        """Save the current weights; a full disk is a warning."""
        parts = self._parts
        await parts.saver.prepare(await parts.snapshot())
        await parts.saver.commit(parts.scheduler.version)

    async def _train(self, run: RunDirectory, record: RunRecord) -> None:
        parts = self._parts
        profiler = UpdateProfiler(parts.lane, self._config.run.profiled, run.path)
        first = parts.scheduler.version
        executor = Executor(self.graph, max_in_flight=self._config.scheduler.max_staleness + 1)
        updates = executor.run(self._config.run.updates - first, first=first)
        # who waits            for                               woken by
        # `async for` below    the next update in order          the last node of an update; a node that fails
        # `_note`              the record, then the rename       a thread that has written
        # `profiler.before`    the device lane                   the job before it
        # a node of an update  groups, values or a resource      the scheduler, other nodes: graph/executor.py
        with LiveView(parts.progress) as view:
            parts.progress.updates_begin()
            try:
                await profiler.before(first + 1)
                async with parts.scheduler, updates:
                    async for update in updates:
                        # carried through, so that a finished update has its line of metrics also on
                        # Ctrl-C
                        _, is_cancelled = await finish_despite_cancellation(
                            self._note(update, record, view)
                        )
                        if is_cancelled:
                            raise asyncio.CancelledError
                        await profiler.after(update.index + 1)
                        await profiler.before(update.index + 2)
            finally:
                await finish_despite_cancellation(profiler.close())
                for update in updates.cut_short:
                    if update.index < parts.scheduler.version:
                        await finish_despite_cancellation(self._note(update, record, view))

    async def _note(self, update: Update, record: RunRecord, view: LiveView) -> None:
        """Show a finished update, write its record, and commit its checkpoint."""
        parts = self._parts
        node_seconds = {node: span.busy_s for node, span in update.spans.items()}
        report = self._metrics.report_of(update)
        note = "" if report is None else report.note
        parts.progress.update_done(node_seconds, str(update.critical_path), note)
        view.after_update()
        # in this order: a run killed in between has a line too many, which a resume sets aside;
        # the other way round, it would have a checkpoint whose update has no line
        metrics = await self._metrics.measure(update)
        slices = {} if report is None else report.slices
        await record.note(update, metrics, node_facts(self.graph, metrics), slices)
        version = update.index + 1
        await parts.saver.commit(version)
        # the last version waits for the simulators of training
        if self._evaluation is not None and version < self._config.run.updates:
            self._evaluation.update_ended(version, parts.saver.saved_version == version)


def print_curve(curve: Curve, run: RunDirectory, version: int) -> None:
    """Print all points, and in one line the results of the final weights, the best and the first."""
    for table in curve_tables(curve):
        plain_console().print(table)
    link = run.checkpoints / BEST
    where = f", {link}" if link.is_symlink() else ""
    print(f"{curve.final_line(version)}{where}", flush=True)
