"""The real scheduler on a simulated clock: many episodes, faults, one training input from one seed."""

import asyncio
import random
from collections import Counter

import pytest
from rollout_fakes import CountingEngine, Faults, LatencyPool, fingerprint, source

from vla_rl.rollout import EpisodeScheduler, LocalEpisodeRunner, SchedulerConfig, embodied_agent
from vla_rl.types import Group
from vla_rl.util.tasks import run_in_simulated_time

GROUP_SIZE, GROUPS_PER_UPDATE, MAX_STALENESS, NUM_ENVS = 4, 8, 2, 32
FAULTS = Faults(death=0.01, freeze=0.005, slow=0.02)


class Observed:
    """What the simulated learner saw."""

    def __init__(self) -> None:
        self.episodes: Counter[int] = Counter()
        self.staleness: Counter[int] = Counter()
        self.filtered: set[int] = set()
        self.trained: set[int] = set()
        self.attempts: Counter[int] = Counter()

    def note(self, group: Group, version: int) -> None:
        assert [trajectory.episode.member for trajectory in group.trajectories] == list(
            range(GROUP_SIZE)
        )
        assert {trajectory.episode.group_id for trajectory in group.trajectories} == {
            group.group_id
        }
        assert all(
            trajectory.oldest_version >= group.dispatch_version for trajectory in group.trajectories
        )
        self.staleness[version - group.dispatch_version] += 1
        self.trained.add(group.group_id)
        for trajectory in group.trajectories:
            self.episodes[trajectory.episode.episode_id] += 1
            self.attempts[trajectory.episode.attempt] += 1


async def train(num_episodes: int, seed: int) -> tuple[Observed, EpisodeScheduler, LatencyPool]:
    """Updates with a learner of random speed, until that many episodes were begun."""
    seen, learner = Observed(), random.Random(seed)
    pool = LatencyPool(NUM_ENVS, seed=seed, faults=FAULTS, max_chunks=3)
    engine = CountingEngine()
    config = SchedulerConfig(
        groups_per_update=GROUPS_PER_UPDATE, max_staleness=MAX_STALENESS, max_attempts=10
    )

    def keep(group: Group) -> bool:
        if group.success_rate in (0.0, 1.0):
            seen.filtered.add(group.group_id)
            return False
        return True

    async with engine.batcher:
        scheduler = EpisodeScheduler(
            LocalEpisodeRunner(pool, engine, embodied_agent),
            source(100, GROUP_SIZE, seed),
            config,
            keep=keep,
        )
        async with scheduler:
            update = 0
            while pool.num_leases < num_episodes:
                groups = [group async for group in scheduler.groups_for_update(update)]
                await asyncio.sleep(learner.expovariate(1 / 0.3))
                for group in groups:
                    seen.note(group, update)
                update += 1
                engine.weight_version = update
                scheduler.mark_trained(groups, update)
    return seen, scheduler, pool


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_episodes", [5_000, pytest.param(100_000, marks=pytest.mark.proof)])
def test_thousands_of_episodes_with_faults_keep_every_invariant(num_episodes: int) -> None:
    """Conservation is checked by the scheduler itself at each of the updates."""
    seen, scheduler, pool = run_in_simulated_time(train(num_episodes, seed=1))
    scheduler.check_conservation()
    assert pool.num_leases >= num_episodes
    assert pool.num_leased == 0

    # The hard bound, with generation running ahead as far as it may.
    assert max(seen.staleness) == MAX_STALENESS

    # Nobody is trained twice, and every group that left was trained or filtered: nothing is thrown
    # away for its age.
    assert set(seen.episodes.values()) == {1}
    state = scheduler.state()
    outstanding = {group.plan.group_id for group in state.groups}
    assert sorted(seen.trained | seen.filtered | outstanding) == list(
        range(state.source.next_group_id)
    )
    assert not seen.trained & seen.filtered
    assert state.ledger.dropped == {}

    # Nobody starves: what is outstanding was dispatched within the last updates, however slow its
    # simulators were.
    assert min(group.dispatch_version for group in state.groups) >= state.version - MAX_STALENESS

    # Faults did strike, and struck episodes were trained on like any other.
    assert seen.attempts[1] > num_episodes / 200
    assert pool.num_leases > state.ledger.dispatched


async def run(
    num_envs: int, timing_seed: int, *, filtered: bool, faults: Faults, run_seed: int = 0
) -> list[str]:
    """Four synchronous updates of 4 groups of 4; the digest of each."""
    pool = LatencyPool(num_envs, seed=timing_seed, faults=faults, deadline_s=0.2)
    engine = CountingEngine(deterministic=True)
    config = SchedulerConfig(
        groups_per_update=4, max_staleness=0, deterministic=True, max_attempts=50
    )
    scheduler = EpisodeScheduler(
        LocalEpisodeRunner(pool, engine, embodied_agent),
        source(20, 4, run_seed),
        config,
        keep=(lambda group: 0.0 < group.success_rate < 1.0) if filtered else None,
    )
    digests = []
    async with asyncio.timeout(36_000), engine.batcher, scheduler:
        for update in range(4):
            groups = [group async for group in scheduler.groups_for_update(update)]
            digests.append(fingerprint(groups))
            engine.weight_version = update + 1
            scheduler.mark_trained(groups, update + 1)
    return digests


@pytest.mark.parametrize("filtered", [False, True], ids=["all groups", "dynamic sampling"])
def test_training_input_does_not_depend_on_timing_or_on_how_many_environments_run(
    filtered: bool,
) -> None:
    reference = run_in_simulated_time(run(1, 0, filtered=filtered, faults=Faults()))
    assert len(set(reference)) == 4
    for num_envs, timing_seed in ((2, 0), (7, 0), (7, 1), (16, 1)):
        other = run_in_simulated_time(
            run(num_envs, timing_seed, filtered=filtered, faults=Faults())
        )
        assert other == reference, f"{num_envs} environments, timing {timing_seed}"


def test_dead_and_frozen_simulators_do_not_change_the_training_input() -> None:
    faults = Faults(death=0.1, freeze=0.1, slow=0.1)
    reference = run_in_simulated_time(run(1, 0, filtered=True, faults=Faults()))
    for timing_seed in range(2):
        assert run_in_simulated_time(run(5, timing_seed, filtered=True, faults=faults)) == reference


def test_another_run_seed_gives_other_training_input() -> None:
    one = run_in_simulated_time(run(4, 0, filtered=False, faults=Faults(), run_seed=0))
    other = run_in_simulated_time(run(4, 0, filtered=False, faults=Faults(), run_seed=1))
    assert not set(one) & set(other)
