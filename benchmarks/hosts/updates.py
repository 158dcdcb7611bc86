"""A run's episodes, groups and publications over hosts, without learning."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from benchmarks.hosts.measured import GROUP_SIZE
from benchmarks.hosts.rollouts import STARTS
from benchmarks.hosts.sleeping_policy import learn, sleeping_policy
from vla_rl.remote_rollout.host_fleet import HostFleet
from vla_rl.rollout import EpisodeScheduler, GroupSource, SchedulerConfig, SchedulerState
from vla_rl.types import SOLE_MEMBER, Group, Trajectory


class Updates:
    """Updates over a rollout, one after the other; a block begins where the last one ended."""

    def __init__(self, rollout: HostFleet) -> None:
        self._rollout = rollout
        self._source = GroupSource(STARTS, GROUP_SIZE, seed=0)
        self._network = sleeping_policy().network
        self._state: SchedulerState | None = None
        self._publishing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def running(
        self,
        config: SchedulerConfig,
        on_episode: Callable[[Trajectory], None],
        keep: Callable[[Group], bool] | None = None,
    ) -> AsyncIterator[EpisodeScheduler]:
        """Make updates while the block is open; the arguments are those of `EpisodeScheduler`."""
        runner = self._rollout.runner
        scheduler = EpisodeScheduler(runner, self._source, config, keep=keep, on_episode=on_episode)
        if self._state is not None:
            scheduler.restore(self._state)
        async with scheduler, asyncio.TaskGroup() as tasks:
            updating = tasks.create_task(self._update(scheduler))
            yield scheduler
            # a publication in its thread would go on after its task
            async with self._publishing:
                updating.cancel()
        self._state = scheduler.state()

    async def _update(self, scheduler: EpisodeScheduler) -> None:
        while True:
            groups = [group async for group in scheduler.groups_for_update(scheduler.version)]
            version = scheduler.version + 1
            async with self._publishing:
                learn(self._network)
                # as a learner calls it: its thread waits until all hosts have the weights
                sink = self._rollout.weights.sinks[SOLE_MEMBER]
                await asyncio.to_thread(sink.apply_weights, self._network, version)
                scheduler.mark_trained(groups, version)
