"""Train a policy in environments: everything around a graph, put together once for every embodied recipe.

    starts ─► GroupSource ─► EpisodeScheduler ◄─ SimulatorPool (processes)
                                │      ▲ actions
                                ▼      │
               graph (executor) ─► Learner ─► TorchEngine        one DeviceLane for both
                                │
                    run directory: metrics, trace, checkpoints, videos

To train on something else, hand in other starts, another model, agent, filter or pipeline; the README shows each.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import torch

from vla_rl.actors import Runtime, Watchdog
from vla_rl.algorithms import within_accuracy
from vla_rl.engines import (
    Checkpoint,
    DeviceLane,
    Learner,
    PolicyModel,
    TorchEngine,
    TrainingState,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.graph import Executor, NodeOutput, Pipeline, TaskGraph, TraceWriter, Update
from vla_rl.observe import LiveView, MetricLog, RunDirectory, RunProgress, Snapshot, VideoRecorder, print_summary
from vla_rl.recipes.embodied_srpo import embodied_srpo, members_of
from vla_rl.recipes.stopping import StopSignal, carried_through
from vla_rl.recipes.training_config import RunConfig, TrainingConfig
from vla_rl.rollout import EpisodeScheduler, GroupSource, SchedulerState, TaskStart, embodied_agent
from vla_rl.simulation import SimulatorPool
from vla_rl.types import Agent, Env, Group, Policy, Sampling, Trajectory, derive_seed

Customise: TypeAlias = Callable[[Pipeline], Pipeline]
"""Changes a pipeline before it is built: `lambda p: p.replace_node("reward", my_reward, reads="groups")`."""


@dataclass(frozen=True)
class Outcome:
    """What a training run came to."""

    run: RunDirectory
    progress: Snapshot
    was_stopped: bool
    """True where the run was asked to stop before its last update."""


class RunSnapshot(msgspec.Struct, frozen=True):
    """Everything that a run goes on from, taken at one instant."""

    learner: TrainingState
    scheduler: SchedulerState


async def train(
    config: TrainingConfig,
    starts: Sequence[TaskStart],
    model: PolicyModel[Any],
    *,
    agent: Agent = embodied_agent,
    customise: Customise = lambda pipeline: pipeline,
    resume: RunDirectory | None = None,
) -> Outcome:
    """Train `model` in place from `starts` until `config.run.updates` updates are made, or Ctrl-C.

    Args:
        config: sizes, seeds and what the run leaves behind.
        starts: what to play: environments, tasks and initial states.
        model: the policy.
        agent: plays one episode.
        customise: changes SRPO's pipeline before it is built.
        resume: the directory of an earlier run, to go on from its newest checkpoint.

    Raises: ConfigError, GraphError before anything starts; CheckpointError where there is nothing whole to resume from;
        what an environment, agent or node raised, after everything was closed in order.
    """
    if resume is None:
        training = TrainingRun(config, starts, model, agent=agent, customise=customise)
        return await training.execute(RunDirectory.create(Path(config.run.root), config.run.name, config))
    checkpoint = await _newest(resume)
    first_update = checkpoint.state.weight_version
    training = TrainingRun(config, starts, model, agent=agent, customise=customise, first_update=first_update)
    return await training.execute(resume, checkpoint)


class TrainingRun:
    """All parts of a run, put together but not started: building one opens nothing, so its graph can be looked at.

    Args: those of `train`, and `first_update`, the update that the run begins with.
    """

    def __init__(
        self,
        config: TrainingConfig,
        starts: Sequence[TaskStart],
        model: PolicyModel[Any],
        *,
        agent: Agent = embodied_agent,
        customise: Customise = lambda pipeline: pipeline,
        first_update: int = 0,
    ) -> None:
        self._config = config
        model.network.to(device_of(config.run))
        self._runtime = Runtime(config.run.name)
        self._pool = SimulatorPool(self._runtime, config.simulators)
        self._lane = DeviceLane(config.run.torch_threads)
        self._engine = TorchEngine(model, self._lane, config.engine)
        self._learner = Learner(model, self._lane, config.learner, publish_to=[self._engine])
        self._progress = RunProgress(
            config.run.updates, first_update=first_update, policy_busy_share=lambda: self._engine.stats().busy_share
        )
        source = GroupSource(
            starts,
            config.group_size,
            derive_seed(config.run.seed, "episodes"),
            sampling=Sampling(temperature=config.temperature),
        )
        self._scheduler = EpisodeScheduler(
            self._pool,
            self._engine,
            _counted(agent, self._progress),
            source,
            config.scheduler,
            keep=_filter(config.accuracy_bounds),
            num_updates=config.run.updates,
        )
        self.graph: TaskGraph = customise(self._pipeline()).build()
        self._run: RunDirectory | None = None
        self._videos: VideoRecorder | None = None
        self._saved_version = first_update

    @property
    def simulator_pids(self) -> list[int]:
        """Simulator processes that are up now."""
        return self._pool.pids

    async def execute(self, run: RunDirectory, checkpoint: Checkpoint | None = None) -> Outcome:
        """Make the updates, leave everything in `run`; from `checkpoint` where there is one. Once only."""
        self._run, self._videos = run, VideoRecorder(run.videos, self._config.run.videos_every)
        with Watchdog(stall_after_s=self._config.run.stall_warning_s), StopSignal() as stop:
            print(f"run {run.path}: starting {self._pool.num_envs} simulators", flush=True)
            async with self._runtime, self._lane:
                if checkpoint is not None:
                    await self._learner.restore(checkpoint.state)
                    self._scheduler.restore(checkpoint.part("scheduler", SchedulerState))
                try:
                    await stop.unless_asked(self._make_updates(run))
                finally:
                    await asyncio.to_thread(self._videos.close)
                # stopped early, episodes were played since the last checkpoint, or there is none yet
                if stop.is_asked or self._saved_version != self._scheduler.version:
                    await self._save(await self._snapshot())
        progress, ledger = self._progress.snapshot(), self._scheduler.state().ledger
        print_summary(progress, ledger.filtered, ledger.dropped)
        return Outcome(run, progress, was_stopped=self._scheduler.version < self._config.run.updates)

    async def _make_updates(self, run: RunDirectory) -> None:
        first = self._scheduler.version
        executor = Executor(self.graph, max_in_flight=self._config.scheduler.max_staleness + 1)
        with ExitStack() as files:
            log = files.enter_context(MetricLog.open(run, self._config.run.wandb_project))
            trace = files.enter_context(TraceWriter(run.trace(first), self.graph))
            view = files.enter_context(LiveView(self._progress))
            updates_left = self._config.run.updates - first
            async with (
                self._pool,
                self._engine,
                self._scheduler,
                executor.run(updates_left, first=first) as updates,
            ):
                async for update in updates:
                    node_seconds = {node: span.busy_s for node, span in update.spans.items()}
                    self._progress.update_done(node_seconds, str(update.critical_path))
                    view.after_update()
                    await asyncio.to_thread(trace.write, update)
                    await asyncio.to_thread(log.write, update.index + 1, await self._metrics(update))

    def _pipeline(self) -> Pipeline:
        """SRPO over this run's scheduler, learner and directory."""
        return embodied_srpo(
            collect=self._scheduler.groups_for_update,
            learn=self._learn,
            save=self._save,
            show=self._show,
            embedding=self._config.embedding,
            srpo=self._config.srpo,
        )

    async def _learn(self, groups: Sequence[Group], advantages: np.ndarray) -> NodeOutput:
        """One update, booked; gives what to save where a checkpoint is due.

        Once begun it is carried to its end, so that weights and books never disagree about the version.
        """
        trajectories = members_of(groups)
        report, is_cancelled = await carried_through(self._learner.update(trajectories, advantages.tolist()))
        self._scheduler.trained(groups, report.weight_version)
        if is_cancelled:
            raise asyncio.CancelledError
        is_due = report.weight_version % self._config.run.checkpoint_every == 0
        snapshot = await self._snapshot() if is_due else None
        return NodeOutput(values={"snapshot": snapshot}, metrics=report.metrics)

    async def _save(self, snapshot: RunSnapshot | None) -> None:
        """Write a checkpoint, if there is something to write."""
        if snapshot is None:
            return
        assert self._run is not None
        await save_checkpoint(
            self._run.checkpoints,
            snapshot.learner,
            {"scheduler": snapshot.scheduler},
            keep_last=self._config.run.keep_checkpoints,
        )
        self._saved_version = snapshot.learner.weight_version

    async def _show(self, update: int, groups: Sequence[Group]) -> None:
        """Hand episodes to the video recorder, which picks and never waits."""
        assert self._videos is not None
        self._videos.offer(update, members_of(groups))

    async def _snapshot(self) -> RunSnapshot:
        # nothing trains between the two lines: only this node, or the loop after its end, takes snapshots
        learner = await self._learner.snapshot()
        return RunSnapshot(learner, self._scheduler.state())

    async def _metrics(self, update: Update) -> dict[str, float]:
        lag = await self._runtime.loop_lag()
        return {
            **update.metrics,
            **self._scheduler.metrics(),
            **self._pool.metrics(),
            **{f"time/node/{node}_s": span.busy_s for node, span in update.spans.items()},
            "time/update_s": update.duration_s,
            "time/device_busy_share": self._lane.busy_share(),
            "time/loop_lag_p99_s": lag.p99_s,
            "time/loop_lag_max_s": lag.max_s,
        }


def device_of(config: RunConfig) -> torch.device:
    """The device that a run computes on. Raises: ConfigError where a GPU is asked for and there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("RunConfig.device is 'cuda', but torch sees no GPU; expected 'cpu' or 'auto' on this machine")
    if config.device == "auto" and not torch.cuda.is_available():
        print("no GPU: the policy and the learner compute on the CPU", flush=True)
    return torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")


def _counted(agent: Agent, progress: RunProgress) -> Agent:
    async def counted(env: Env, policy: Policy) -> Trajectory:
        trajectory = await agent(env, policy)
        progress.episode_done(trajectory)
        return trajectory

    return counted


def _filter(bounds: tuple[float, float]) -> Callable[[Group], bool] | None:
    if bounds == (0.0, 1.0):
        return None
    return lambda group: within_accuracy(group.success_rate, *bounds)


async def _newest(run: RunDirectory) -> Checkpoint:
    folder = latest_checkpoint(run.checkpoints)
    if folder is None:
        raise CheckpointError(f"{run.checkpoints} holds no whole checkpoint, so there is nothing to resume from")
    return await load_checkpoint(folder)
