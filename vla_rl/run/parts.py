"""The parts of pipelines: simulators, engine, learner, and, if needed, critic and reference.

    starts ─► GroupSource ─► EpisodeScheduler ◄─ SimulatorPool (processes)
                                │      ▲ actions
                                ▼      │
                     nodes ─► Learner ─► TorchEngine        one DeviceLane for all computation here
                                │        or VllmEngine      in processes of its own
                                └ Critic, Reference

Building the parts opens nothing, so a pipeline over them can be inspected. A critic or a reference
policy is created when a pipeline first reads it. Engine, learner, critic and reference are those of
a team, often of one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_rl.actors import LastingForkServers, Runtime
from vla_rl.algorithms import (
    EmbeddingConfig,
    TrajectoryEncoder,
    has_equal_rewards,
    within_accuracy,
)
from vla_rl.cluster import Hosts
from vla_rl.engines import DeviceLane, LanguageModel
from vla_rl.errors import ConfigError
from vla_rl.learner import Checkpoint, CriticTeam, ReferenceTeam
from vla_rl.models.trajectory_encoders import trajectory_encoder
from vla_rl.pipelines.config import FilterConfig, LearningConfig, MixedTrainingConfig
from vla_rl.pipelines.nodes.rewards import require_known_success
from vla_rl.pipelines.nodes.run_parts import Collect, Learn, Save, Show, is_cut_short
from vla_rl.pipelines.parts import Stateful
from vla_rl.reporting import RunDirectory, RunProgress, VideoRecorder
from vla_rl.rollout import (
    EpisodeRunner,
    EpisodeScheduler,
    GroupSource,
    LocalEpisodeRunner,
    SchedulerState,
    TaskStart,
)
from vla_rl.run.estimates import require_gpu_memory
from vla_rl.run.resuming import SCHEDULER, Restarts
from vla_rl.run.saving import CheckpointSaver, RunSnapshot
from vla_rl.run.stored_rows import find_replay, import_demonstrations, opened_replay
from vla_rl.team.devices import resolve_device
from vla_rl.team.learners import (
    make_critics,
    make_learners,
    make_references,
    sharded_learners,
)
from vla_rl.team.members import RunModel, Team, make_engines
from vla_rl.team.pools import RunPool, make_pool, start_kinds
from vla_rl.types import Agent, Group, Sampling, derive_seed, list_agents, split_by_agent

if TYPE_CHECKING:
    from vla_rl.remote_rollout.host_fleet import HostFleet


class TrainingParts:
    """All parts of a run, connected but not started.

    Args: those of `vla_rl.train`; `team`, the policies; `first_update`, the update that the run
        begins with; `restarts`, how often it was restarted before, and what was lost (None: never);
        `local_evaluation`, whether this host runs evaluations even if others run the episodes;
        `fork_servers`, those of earlier starts of the run (None: new ones).
    """

    def __init__(
        self,
        config: LearningConfig,
        starts: Sequence[TaskStart],
        team: Team,
        *,
        agent: Agent,
        first_update: int = 0,
        restarts: Restarts | None = None,
        local_evaluation: bool = False,
        fork_servers: LastingForkServers | None = None,
    ) -> None:
        self.config, self._team, self._restarts = config, team, restarts
        self._tasks = frozenset(start.task for start in starts)
        self.device = device = resolve_device(config.run)
        require_gpu_memory(config, team, device)
        for member in team.members.values():
            member.model.network.to(device)
        self.runtime = Runtime(config.run.name, fork_servers=fork_servers)
        self.pool: RunPool = make_pool(config, self.runtime, starts)
        self.lane = DeviceLane(config.run.torch_threads)
        cluster = config.cluster
        has_local_engine = not cluster.has_hosts or cluster.local_rollout or local_evaluation
        self.engine = (
            make_engines(config, team, self.lane, first_update) if has_local_engine else None
        )
        """Engines of this host; None if only others act."""

        local_runner = (
            None if self.engine is None else LocalEpisodeRunner(self.pool, self.engine, agent)
        )
        self._is_restart = restarts is not None and restarts.num_restarts > 0
        self._cluster: Hosts | None = None
        self.hosts: HostFleet | None = None
        """Runs the episodes on other hosts; None if they run on this one."""

        if cluster.has_hosts:
            # imported here, because one host pays nothing for what several need
            from vla_rl.run.hosts import find_hosts, make_host_fleet

            self._cluster = find_hosts(cluster, may_be_away=self._is_restart)
            self.hosts = make_host_fleet(
                config,
                self._cluster,
                starts,
                team,
                agent,
                self.lane,
                local_runner if cluster.local_rollout else None,
                first_update,
                episode_refs=lambda: self.scheduler.episode_refs(),
            )

        self.learner = make_learners(
            config,
            team,
            self.lane,
            self.engine,
            first_update,
            self.runtime,
            others={} if self.hosts is None else self.hosts.weights.sinks,
            lost_gpus=restarts.lost_gpus if restarts is not None else (),
        )
        # the share of what runs the episodes: with hosts, an engine of this one serves evaluations
        # alone
        acting = self.hosts or self.engine
        assert acting is not None, "a run without other hosts acts here"
        self.progress = RunProgress(
            config.run.updates,
            first_update=first_update,
            policy_busy_share=lambda: acting.busy_share,
        )
        runner = local_runner if self.hosts is None else self.hosts.runner
        assert runner is not None
        self.scheduler = make_scheduler(config, starts, runner, self.progress)
        self.saver = CheckpointSaver(
            config.run.checkpoint_every, config.run.keep_checkpoints, first_update
        )
        self.collect = Collect(self.scheduler)
        self.learn = Learn(
            self.learner,
            self.scheduler,
            mask_truncated=config.filter.mask_truncated,
            warmup_updates=lambda: config.critic.warmup_updates if self.has_critic else 0,
            snapshot=self.snapshot,
            is_due=self.saver.is_due,
        )
        self.save = Save(self.saver.prepare)
        self.show = Show()
        self._critic: CriticTeam | None = None
        self._reference: ReferenceTeam | None = None
        self._remembered: dict[str, tuple[Stateful, Any]] = {}

    @property
    def model(self) -> RunModel:
        """Policy of the run. Raises: ConfigError if several policies learn."""
        if len(self._team.members) > 1:
            raise ConfigError(
                f"pipeline {self.config.pipeline!r} needs a single policy, but this run has "
                f"several, of the agents {sorted(self._team.members)}; use grpo or another "
                "pipeline for several policies"
            )
        return next(iter(self._team.members.values())).model

    @property
    def critic(self) -> CriticTeam:
        """Critics of this run, created at the first access."""
        if self._critic is None:
            self._critic = make_critics(self.config, self._team, self.lane, self.learner)
        return self._critic

    @property
    def has_critic(self) -> bool:
        """Whether the pipeline has asked for critics."""
        return self._critic is not None

    @property
    def reference(self) -> ReferenceTeam:
        """Copies of the policies from the beginning of the run, made at the first access.

        A resume does not change them.
        """
        if self._reference is None:
            self._reference = make_references(self.config, self._team, self.lane, self.learner)
        return self._reference

    @property
    def replay(self) -> Stateful:
        """Replay buffer of the run. Raises: ConfigError if its pipeline has none."""
        return find_replay(self.learner, self.config)

    @asynccontextmanager
    async def opened_learner(
        self, run: RunDirectory, *, is_resumed: bool, has_checkpoint: bool
    ) -> AsyncIterator[None]:
        """Open the replay buffer and start the processes of the learners that have some, and close
        them on leaving.

        Args:
            run: the run, in whose folder the buffer is if the configuration names no other.
            is_resumed: whether the folder is an earlier run's.
            has_checkpoint: whether one of its checkpoints is restored next.
        """
        async with AsyncExitStack() as stack:
            buffer = opened_replay(
                self.learner,
                self.config,
                run,
                is_resumed=is_resumed,
                has_checkpoint=has_checkpoint,
                tasks=self._tasks,
            )
            stack.enter_context(buffer)
            if self._cluster is not None:
                await stack.enter_async_context(self._cluster)
                # before the learners start: their ranks are processes of the hosts that have just
                # joined
                await self._assign_ranks(self._cluster)
            for learner in self.learner.with_processes:
                await stack.enter_async_context(learner)
            if self.learner.with_processes:
                parts = (("critic", self._critic), ("reference", self._reference))
                shared = ["update", *(name for name, part in parts if part is not None)]
                ranks = self.config.learner.ranks
                print(f"{ranks} learner ranks share the {' and the '.join(shared)}", flush=True)
            yield

    async def _assign_ranks(self, cluster: Hosts) -> None:
        """Let the ranks start on the hosts of `cluster.learners`, if it names any.

        Raises: ConfigError if they cannot be placed; LearnerHostLost.
        """
        if not self.config.cluster.learners:
            return
        from vla_rl.run.hosts import assign_ranks

        lost = self._restarts.lost_devices if self._restarts is not None else ()
        assignments = await assign_ranks(
            self.config, self._team, cluster.hosts(), lost, is_restart=self._is_restart
        )
        if self._restarts is not None:
            self._restarts.assign(assignments)
        assert self.hosts is not None, "hosts that learn are listed"
        self.hosts.images.assign(assignments)
        for learner in sharded_learners(self.learner, self._team):
            learner.assign_ranks(assignments)
            learner.ranks.group.image_copier = self.hosts.images

    @asynccontextmanager
    async def opened_runners(self, run: Path) -> AsyncIterator[None]:
        """Start all that runs episodes: simulators and engines here, and other hosts.

        Other hosts that wait for a resume of the run in the folder `run` are taken over.
        """
        async with AsyncExitStack() as stack:
            if self.engine is not None:
                await stack.enter_async_context(self.pool)
                await stack.enter_async_context(self.engine)
            if self.hosts is not None:
                # in a thread, because it reads the run's folder, which may lie on a slow disk
                await asyncio.to_thread(self.hosts.belong_to, run)
                await stack.enter_async_context(self.hosts)
                ways = (
                    f"episodes run on {', '.join(self.hosts.runner.hosts)}",
                    self.hosts.image_route,
                )
                print("; ".join(filter(None, ways)), flush=True)
            yield

    def metrics(self) -> dict[str, float]:
        """Return the metrics of everything that runs episodes."""
        return {
            **self.scheduler.metrics(),
            **({} if self.engine is None else {**self.pool.metrics(), **self.engine.metrics()}),
            **({} if self.hosts is None else self.hosts.metrics()),
        }

    def trajectory_encoder(self, config: EmbeddingConfig) -> TrajectoryEncoder:
        """Make the encoder of trajectories; hosts that run the episodes compute with it too.

        Raises: ConfigError for a language policy, which sees no trajectory of images.
        """
        model = self.model
        if isinstance(model, LanguageModel):
            raise ConfigError(
                f"{type(model).__name__} is a language policy, expected one over actions: "
                "trajectories are embedded by their images or states"
            )
        encoder = trajectory_encoder(config, model, self.lane)
        if self.hosts is not None:
            self.hosts.embed_with(config, encoder)
        return encoder

    def remember(self, name: str, what: Stateful, state_type: Any) -> None:
        """Save the state of `what` in every checkpoint as `state_type`; restore it on a resume."""
        self._remembered[name] = (what, state_type)

    def write_videos(self, run: RunDirectory) -> VideoRecorder:
        """Make the node `show` write videos into `run`; the caller closes the recorder."""
        make_video = None if self.hosts is None else self.hosts.images.make_video
        videos = VideoRecorder(run.videos, self.config.run.videos_every, make_video=make_video)
        self.show.offer = videos.offer
        return videos

    async def snapshot(self) -> RunSnapshot:
        """Return the complete state of the run. Nothing may train meanwhile."""
        # one after the other and not at once: both copy from the device, and host memory holds one
        # copy more
        critic = await self._critic.snapshot() if self._critic is not None else {}
        learner = replace(await self.learner.snapshot(), critic=critic)
        others = {name: what.state() for name, (what, _) in self._remembered.items()}
        return RunSnapshot(learner, {SCHEDULER: self.scheduler.state(), **others})

    async def import_demonstrations(self) -> None:
        """Store the demonstrations that a new run begins with, if it has some."""
        await import_demonstrations(self.learner, self.config, self._team, self.lane, self._tasks)

    async def restore(self, checkpoint: Checkpoint) -> None:
        """Restore a checkpoint. Call it before anything but the lane is opened."""
        # the learner first: it publishes, and the scheduler refuses an engine with older weights
        await self.learner.restore(checkpoint.state)
        if self._critic is not None:
            await self._critic.restore(checkpoint.state.critic, checkpoint.state.critic_file)
        self.scheduler.restore(checkpoint.part(SCHEDULER, SchedulerState))
        for name, (what, state_type) in self._remembered.items():
            what.restore(checkpoint.part(name, state_type))


def make_scheduler(
    config: LearningConfig,
    starts: Sequence[TaskStart],
    runner: EpisodeRunner,
    progress: RunProgress,
) -> EpisodeScheduler:
    """Make what runs the episodes of a run on a runner, and reports each to its progress."""
    source = GroupSource(
        starts,
        config.episodes_per_group,
        derive_seed(config.run.seed, "episodes"),
        sampling=Sampling(temperature=config.temperature),
        num_greedy=1 if config.needs_greedy_baseline else 0,
        kinds=start_kinds(starts) if isinstance(config, MixedTrainingConfig) else None,
    )
    return EpisodeScheduler(
        runner,
        source,
        config.scheduler,
        keep=group_filter(config.filter),
        on_episode=progress.episode_done,
        num_updates=config.run.updates,
    )


def group_filter(config: FilterConfig) -> Callable[[Group], bool] | None:
    """Return a function that tells whether to keep a group; None if all are kept.

    The function raises EnvError if it filters by success and the environment does not report it.
    """
    # no function at all, so that a run without filters asks no environment for its success
    if config == FilterConfig():
        return None
    needs_success = tuple(config.accuracy_bounds) != (0.0, 1.0) or config.drop_equal == "success"

    def is_kept(group: Group) -> bool:
        members = group.trajectories
        if needs_success:
            require_known_success(
                group, "filter.accuracy_bounds or filter.drop_equal filters groups by success"
            )
        if not within_accuracy(group.success_rate, *config.accuracy_bounds):
            return False
        if config.drop_truncated and any(is_cut_short(member) for member in members):
            return False
        if config.drop_equal == "none":
            return True
        if config.drop_equal == "success":
            return not has_equal_rewards([float(member.is_success) for member in members])
        # with several agents, it is enough that one has a learning signal
        return not all(
            has_equal_rewards(
                [part.trajectory.undiscounted_return for part in split_by_agent(members, agent)]
            )
            for agent in list_agents(members)
        )

    return is_kept
