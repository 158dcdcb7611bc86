"""Train a policy in environments, by any pipeline: what happens around the graph of one update.

    TrainingParts ─► pipeline ─► customise ─► graph ─► executor ─► updates ─► metrics, trace, live view
                                                                       └► run directory: checkpoints, videos

To train on something else, hand in other starts, another model, agent or pipeline; the README shows each.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from vla_rl.actors import Watchdog
from vla_rl.engines import Checkpoint, latest_checkpoint, load_checkpoint
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.graph import Executor, Pipeline, TaskGraph, TraceWriter, Update
from vla_rl.observe import LiveView, MetricLog, RunDirectory, Snapshot, print_summary
from vla_rl.observe.sinks import import_wandb
from vla_rl.recipes.agents import agent_of, digest_of_run, recorded
from vla_rl.recipes.chaos import chaos
from vla_rl.recipes.evaluation.held_out import Judge
from vla_rl.recipes.parts import TrainingParts
from vla_rl.recipes.pipelines import make_pipeline
from vla_rl.recipes.pools import simulator_pids, what_plays
from vla_rl.recipes.stopping import StopSignal
from vla_rl.recipes.team import RunModel, Team
from vla_rl.recipes.training_config import LearningConfig, RunConfig
from vla_rl.rollout import TaskStart, embodied_agent
from vla_rl.types import Agent, derive_seed

Customise: TypeAlias = Callable[[Pipeline], Pipeline]
"""Changes a pipeline before it is built: `lambda p: p.replace_node("reward", my_reward, reads="groups")`."""


@dataclass(frozen=True)
class Outcome:
    """What a training run came to."""

    run: RunDirectory
    progress: Snapshot
    was_stopped: bool
    """True where the run was asked to stop before its last update."""


async def train(
    config: LearningConfig,
    starts: Sequence[TaskStart],
    model: RunModel | Team,
    *,
    agent: Agent | None = None,
    customise: Customise = lambda pipeline: pipeline,
    resume: RunDirectory | None = None,
    about: Mapping[str, str] | None = None,
    judge: Judge | None = None,
) -> Outcome:
    """Train `model` in place from `starts` until `config.run.updates` updates are made, or Ctrl-C.

    Args:
        config: the pipeline and its settings, sizes, seeds and what the run leaves behind.
        starts: what to play: environments, tasks and initial states.
        model: the policy, or a `Team` of them.
        agent: plays one episode; without one, that of `agent_of`. Recorded where `config.run.record_to` is set.
        customise: changes the pipeline before it is built.
        resume: the directory of an earlier run, to go on from its newest checkpoint.
        about: what results depend on besides the configuration, such as which assets were found; for `about.json`.
        judge: evaluates the policy before the first update and after the last.

    Raises: ConfigError, GraphError before anything starts; CheckpointError where there is nothing whole to resume from;
        what an environment, agent or node raised, after everything was closed in order.
    """
    if config.run.wandb_project is not None:
        await asyncio.to_thread(import_wandb, config.run.wandb_project)
    played_by = [msgspec.structs.replace(config, run=RunConfig(seed=config.run.seed)), about]
    envs = [start.env for start in starts]
    agent = await recorded(agent or agent_of(config), config.run.record_to, envs, digest_of_run(played_by))
    if resume is None:
        training = TrainingRun(config, starts, model, agent=agent, customise=customise, judge=judge)
        run = RunDirectory.create(Path(config.run.root), config.run.name, config)
        (run.path / "about.json").write_bytes(msgspec.json.format(msgspec.json.encode(about or {})) + b"\n")
        return await training.execute(run)
    if judge is not None:
        judge.check(resume)
    checkpoint = await _newest(resume)
    first_update = checkpoint.state.weight_version
    training = TrainingRun(
        config, starts, model, agent=agent, customise=customise, judge=judge, first_update=first_update
    )
    resume.go_on_with(config)
    return await training.execute(resume, checkpoint)


class TrainingRun:
    """A pipeline over the parts of a run, not started yet: building one opens nothing, so its graph can be looked at.

    Args: those of `train`, and `first_update`, the update that the run begins with.
    """

    def __init__(
        self,
        config: LearningConfig,
        starts: Sequence[TaskStart],
        model: RunModel | Team,
        *,
        agent: Agent = embodied_agent,
        customise: Customise = lambda pipeline: pipeline,
        judge: Judge | None = None,
        first_update: int = 0,
    ) -> None:
        self._config, self._judge = config, judge
        self._parts = TrainingParts(config, starts, model, agent=agent, first_update=first_update)
        self.graph: TaskGraph = customise(make_pipeline(self._parts)).build()
        if config.overlong.max_length is not None and "overlong" not in self.graph.nodes:
            raise ConfigError(
                f"overlong.max_length is {config.overlong.max_length}, but pipeline {config.pipeline!r} has no node "
                "'overlong' to punish long replies; take dapo, or insert that node"
            )

    @property
    def simulator_pids(self) -> list[int]:
        """Simulator processes that are up now."""
        return simulator_pids(self._parts.pool)

    async def execute(self, run: RunDirectory, checkpoint: Checkpoint | None = None) -> Outcome:
        """Make the updates, leave everything in `run`; from `checkpoint` where there is one. Once only."""
        parts = self._parts
        videos = parts.write_to(run)
        self.graph.draw(run.path / "graph.txt")
        with Watchdog(stall_after_s=self._config.run.stall_warning_s), StopSignal() as stop:
            print(f"run {run.path}: starting {parts.pool.num_envs} {what_plays(self._config)}", flush=True)
            async with parts.runtime, parts.lane:
                if checkpoint is not None:
                    await parts.restore(checkpoint)
                before = parts.scheduler.state().ledger
                try:
                    await stop.unless_asked(self._make_updates(run))
                finally:
                    await asyncio.to_thread(videos.close)
                # stopped early, episodes were played since the last checkpoint, or there is none yet
                if stop.is_asked or parts.saved_version != parts.scheduler.version:
                    await parts.save(await parts.snapshot())
        progress, ledger = parts.progress.snapshot(), parts.scheduler.state().ledger
        dropped = {cause: number - before.dropped.get(cause, 0) for cause, number in ledger.dropped.items()}
        print_summary(progress, ledger.filtered - before.filtered, dropped)
        return Outcome(run, progress, was_stopped=stop.is_asked)

    async def _make_updates(self, run: RunDirectory) -> None:
        parts, last = self._parts, self._config.run.updates
        seed = derive_seed(self._config.run.seed, "chaos")
        broken = chaos(lambda: self.simulator_pids, self._config.run.chaos_every_s, seed)
        async with parts.pool, parts.engine, broken:
            if self._judge is not None and parts.scheduler.version == 0:
                await self._judge(run, parts.pool, parts.engine)
            if parts.scheduler.version < last:
                await self._train(run)
            if self._judge is not None and parts.scheduler.version == last:
                await self._judge(run, parts.pool, parts.engine)

    async def _train(self, run: RunDirectory) -> None:
        parts = self._parts
        first = parts.scheduler.version
        executor = Executor(self.graph, max_in_flight=self._config.scheduler.max_staleness + 1)
        with ExitStack() as files:
            log = files.enter_context(MetricLog.open(run, self._config.run.wandb_project))
            trace = files.enter_context(TraceWriter(run.trace(first), self.graph))
            view = files.enter_context(LiveView(parts.progress))
            parts.progress.updates_begin()
            async with parts.scheduler, executor.run(self._config.run.updates - first, first=first) as updates:
                async for update in updates:
                    node_seconds = {node: span.busy_s for node, span in update.spans.items()}
                    parts.progress.update_done(node_seconds, str(update.critical_path))
                    view.after_update()
                    await asyncio.to_thread(trace.write, update)
                    await asyncio.to_thread(log.write, update.index + 1, await self._metrics(update))

    async def _metrics(self, update: Update) -> dict[str, float]:
        parts = self._parts
        lag = await parts.runtime.loop_lag()
        return {
            **update.metrics,
            **parts.scheduler.metrics(),
            **parts.pool.metrics(),
            **parts.engine_metrics(),
            **{f"time/node/{node}_s": span.busy_s for node, span in update.spans.items()},
            "time/update_s": update.duration_s,
            "time/device_busy_share": parts.lane.busy_share(),
            "time/loop_lag_p99_s": lag.p99_s,
            "time/loop_lag_max_s": lag.max_s,
        }


async def _newest(run: RunDirectory) -> Checkpoint:
    folder = latest_checkpoint(run.checkpoints)
    if folder is None:
        raise CheckpointError(f"{run.checkpoints} holds no whole checkpoint, so there is nothing to resume from")
    return await load_checkpoint(folder)
