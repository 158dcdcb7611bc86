"""Hosts, their episode stores and the control process die at random moments under a seed: conservation holds.

`python -m benchmarks.faults --kinds killed_across_hosts` is the long version, with processes in
network namespaces.
"""

import asyncio
import random
from collections import Counter

import pytest
from host_cluster import RemoteHostRunner
from rollout_fakes import CountingEngine, source

from vla_rl.remote_rollout.episode_store import EpisodeStore
from vla_rl.remote_rollout.host_runner import HostEpisodeRunner
from vla_rl.rollout import EpisodeScheduler, SchedulerConfig
from vla_rl.rollout.episode_records import SchedulerState
from vla_rl.types import Group
from vla_rl.util.tasks import run_in_simulated_time

UPDATES = 6
GROUP_SIZE, GROUPS_PER_UPDATE = 4, 4
"""Of `source` and of the configuration."""


class Campaign:
    """A run over three hosts, killed and resumed until its last update, and the books of it."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.engine = CountingEngine()
        self.checkpoint: SchedulerState | None = None
        self.trained: list[list[int]] = []
        self.num_kills: Counter[str] = Counter()
        self._hosts: dict[str, RemoteHostRunner] = {}

    async def run(self) -> None:
        """One life of the control process: it ends with the last update, or is killed."""
        runner = HostEpisodeRunner(self.engine.weight_version)
        for name in ("a", "b", "c"):
            self._bring_up(runner, name)
        config = SchedulerConfig(
            groups_per_update=GROUPS_PER_UPDATE, max_staleness=1, max_attempts=1000
        )
        scheduler = EpisodeScheduler(
            runner, source(), config, keep=lambda group: group.group_id % 5 != 0
        )
        if self.checkpoint is not None:
            scheduler.restore(self.checkpoint)
        async with scheduler, asyncio.TaskGroup() as tasks:
            striking = tasks.create_task(self._strike(runner))
            updating = tasks.create_task(self._update(scheduler, runner))
            done, _ = await asyncio.wait((striking, updating), return_when=asyncio.FIRST_COMPLETED)
            for task in {striking, updating} - done:
                task.cancel()

    async def _update(self, scheduler: EpisodeScheduler, runner: HostEpisodeRunner) -> None:
        while scheduler.version < UPDATES:
            version = scheduler.version
            groups = [group async for group in scheduler.groups_for_update(version)]
            assert all(_is_whole(group) for group in groups)
            self.engine.weight_version = version + 1
            runner.mark_published(version + 1)
            scheduler.mark_trained(groups, version + 1)  # raises if an episode is missing
            # a life that was killed has trained on groups that its successor does not know
            del self.trained[version:]
            self.trained.append(
                [each.episode.episode_id for g in groups for each in g.trajectories]
            )
            self.checkpoint = scheduler.state()

    async def _strike(self, runner: HostEpisodeRunner) -> None:
        """Kill hosts, which come back later; return when the control process dies."""
        while True:
            await asyncio.sleep(self.dice.expovariate(1 / 0.2))
            victim = self.dice.choice(["a", "b", "c", "control"])
            self.num_kills[victim] += 1
            if victim == "control":
                return
            if victim in runner.hosts:
                self._hosts[victim].cut()
                # its silence is noticed later by one than by the other
                await asyncio.sleep(self.dice.uniform(0.0, 0.1))
                runner.remove_host(victim)
            else:
                self._bring_up(runner, victim)

    def _bring_up(self, runner: HostEpisodeRunner, name: str) -> None:
        num_slots = self.dice.randint(2, 4)
        self._hosts[name] = RemoteHostRunner(
            self.engine, num_slots, store=EpisodeStore(name, 1 << 20)
        )
        runner.add_host(name, self._hosts[name])


def _is_whole(group: Group) -> bool:
    return len(group.trajectories) == GROUP_SIZE and all(
        each.episode_ref is None for each in group.trajectories
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (1, 2, 3))]
)
def test_no_episode_is_lost_or_trained_on_twice(seed: int) -> None:
    async def main() -> Campaign:
        campaign = Campaign(seed)
        async with campaign.engine.batcher:
            while campaign.checkpoint is None or campaign.checkpoint.version < UPDATES:
                await campaign.run()
        return campaign

    campaign = run_in_simulated_time(main())
    assert campaign.checkpoint is not None
    ledger = campaign.checkpoint.ledger
    held = sum(len(group.plan.episodes) for group in campaign.checkpoint.groups)
    lost = ledger.dispatched - ledger.trained - ledger.filtered - sum(ledger.dropped.values())
    assert lost == held
    trained = [episode for update in campaign.trained for episode in update]
    assert len(trained) == len(set(trained)) == UPDATES * GROUPS_PER_UPDATE * GROUP_SIZE
    assert campaign.num_kills.total() > 0
