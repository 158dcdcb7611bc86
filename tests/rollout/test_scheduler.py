"""The scheduler on a simulated clock: replacement, filters, pipelining, metrics, many episodes with faults."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rollout_fakes import (
    CountdownEnv,
    CountingEngine,
    Faults,
    LatencyPool,
    Setup,
    fingerprint,
    source,
)

from vla_rl.errors import ConfigError
from vla_rl.rollout import EpisodeScheduler, LocalEpisodeRunner, SchedulerConfig, embodied_agent
from vla_rl.types import Env, EpisodeSpec, Group, Policy, Trajectory
from vla_rl.util.stalls import list_waits
from vla_rl.util.tasks import run_in_simulated_time


def test_updates_are_made_of_whole_groups_within_the_staleness_bound() -> None:
    async def main() -> None:
        setup = Setup()
        async with setup.opened():
            for update in range(10):
                groups = await setup.update()
                assert len(groups) == 2
                for group in groups:
                    assert [t.episode.member for t in group.trajectories] == [0, 1, 2, 3]
                    assert update - group.dispatch_version in (0, 1)
        assert setup.pool.num_leased == 0
        assert setup.pool.max_leased == 4

    run_in_simulated_time(main())


def test_a_finished_episode_is_replaced_at_once_while_others_still_run() -> None:
    async def main() -> list[tuple[float, int]]:
        started: list[tuple[float, int]] = []
        clock = asyncio.get_running_loop().time

        async def agent(env: Env, policy: Policy) -> Trajectory:
            started.append((clock(), env.episode.episode_id))
            await asyncio.sleep(1.0 if env.episode.episode_id == 0 else 0.25)
            return await embodied_agent(env, policy)

        setup = Setup(pool=LatencyPool(2, mean_s=0.0, max_chunks=1), agent=agent)
        setup.engine.call_s = setup.engine.row_s = 0.0
        async with setup.opened():
            await setup.collect(0)
        return started[:6]

    # Episode 0 takes 1 s in one environment; the other one runs 1, 2, 3 and 4 in the meantime,
    # back to back.
    started = run_in_simulated_time(main())
    assert started[:5] == [(0.0, 0), (0.0, 1), (0.25, 2), (0.5, 3), (0.75, 4)]
    assert started[5][0] == 1.0


def test_filtered_groups_are_refilled_without_being_asked_for() -> None:
    async def main() -> None:
        setup = Setup(
            keep=lambda group: group.group_id % 3 == 0, max_staleness=0, deterministic=True
        )
        async with setup.opened() as scheduler:
            assert [group.group_id for group in await setup.update()] == [0, 3]
            assert [group.group_id for group in await setup.update()] == [6, 9]
            scheduler.check_conservation()
            ledger = scheduler.state().ledger
        assert (ledger.trained, ledger.filtered) == (16, 24)  # 4 groups, and 1, 2, 4, 5, 7, 8

    run_in_simulated_time(main())


def test_updates_in_flight_are_filled_one_after_the_other_and_never_beyond_the_bound() -> None:
    async def main() -> None:
        setup = Setup(max_staleness=2)
        async with setup.opened() as scheduler, asyncio.TaskGroup() as tasks:
            collecting = [tasks.create_task(setup.collect(update)) for update in range(4)]
            groups = [await collecting[update] for update in range(3)]
            await asyncio.sleep(100)
            assert not collecting[3].done()
            # 3 updates are waiting to be trained: nothing more is run
            assert setup.pool.num_leased == 0
            assert scheduler.state().groups[0].dispatch_version == 0
            setup.engine.weight_version = 1
            scheduler.mark_trained(groups[0], 1)
            assert {group.dispatch_version for group in await collecting[3]} == {1}

    run_in_simulated_time(main())


def test_asking_again_for_a_broken_off_update_gives_the_same_groups_and_then_the_rest() -> None:
    async def main() -> None:
        setup = Setup()
        async with setup.opened() as scheduler:
            iteration = scheduler.groups_for_update(0)
            first = await anext(iteration)
            await iteration.aclose()
            again = await setup.collect(0)
            assert again[0] is first
            assert len({group.group_id for group in again}) == 2

    run_in_simulated_time(main())


def test_an_update_beyond_the_last_one_is_refused_because_nothing_is_run_for_it() -> None:
    async def main() -> None:
        setup = Setup(num_updates=2)
        async with setup.opened():
            await setup.update()
            await setup.update()
            with pytest.raises(
                ValueError, match="update 2 is not one of the run's 2, counted from 0"
            ):
                await setup.collect(2)

    run_in_simulated_time(main())


def test_groups_that_were_not_handed_over_cannot_be_trained() -> None:
    async def main() -> None:
        setup = Setup()
        async with setup.opened() as scheduler:
            groups = await setup.collect(0)
            with pytest.raises(ValueError, match="expected version 1"):
                scheduler.mark_trained(groups[:1], 1)
            with pytest.raises(ValueError, match="expected version 1"):
                scheduler.mark_trained(groups, 2)
            with pytest.raises(ValueError, match="engine serves version 0, expected 1: publish"):
                scheduler.mark_trained(groups, 1)
            setup.engine.weight_version = 1
            scheduler.mark_trained(groups, 1)
            with pytest.raises(ValueError, match="update 0 was trained already"):
                await setup.collect(0)

    run_in_simulated_time(main())


def test_the_wait_graph_says_which_episodes_an_update_waits_for() -> None:
    async def main() -> None:
        setup = Setup()
        async with setup.opened() as scheduler, asyncio.TaskGroup() as tasks:
            collecting = tasks.create_task(setup.collect(0))
            await asyncio.sleep(0.001)
            lines = {f"{wait.who} waits for {wait.on}" for wait in list_waits()}
            expected = "2 of 2 groups, the oldest of 1 running is group 0: episodes 0, 1, 2, 3"
            assert f"update 0 waits for {expected}" in lines
            assert scheduler.describe_wait() == expected
            await collecting
        assert list_waits() == []

    run_in_simulated_time(main())


def test_metrics_count_what_happened_since_the_last_call() -> None:
    async def main() -> None:
        setup = Setup(max_staleness=0)
        async with setup.opened() as scheduler:
            began = asyncio.get_running_loop().time()
            groups = await setup.update() + await setup.update()
            seconds = asyncio.get_running_loop().time() - began
            metrics = scheduler.metrics()
            assert metrics["rollout/episodes_per_s"] == pytest.approx(16 / seconds)
            steps = sum(t.num_env_steps for g in groups for t in g.trajectories)
            assert metrics["rollout/env_steps_per_s"] == pytest.approx(steps / seconds)
            solved = sum(t.is_success for g in groups for t in g.trajectories)
            assert metrics["rollout/success_rate"] == solved / 16
            for task in {g.trajectories[0].episode.task for g in groups}:
                of_task = [
                    t.is_success for g in groups for t in g.trajectories if t.episode.task == task
                ]
                assert metrics[f"rollout/success_rate/{task}"] == sum(of_task) / len(of_task)
            assert metrics["rollout/staleness/share_0"] == 1.0
            busy = setup.engine.batcher.batch_stats().busy_share
            assert metrics["rollout/policy_busy_share"] == pytest.approx(busy, abs=0.01)
            assert "rollout/success_rate" not in scheduler.metrics()

    run_in_simulated_time(main())


def test_infeasible_settings_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="12 environments would never be used"):
        Setup(pool=LatencyPool(20), max_staleness=0)


def test_an_engine_with_older_weights_than_the_checkpoint_is_refused() -> None:
    async def main() -> None:
        setup = Setup()
        async with setup.opened():
            await setup.update()
        fresh = Setup()
        fresh.scheduler.restore(setup.scheduler.state())
        async with fresh.opened():
            pass

    with pytest.raises(ConfigError, match="serves weight version 0, the scheduler continues at 1"):
        run_in_simulated_time(main())


async def test_the_scheduler_runs_on_a_plain_loop_in_real_time() -> None:
    setup = Setup(pool=LatencyPool(4, mean_s=0.0005))
    setup.engine.call_s = 0.0005
    async with asyncio.timeout(30), setup.engine.batcher, setup.scheduler:
        for _ in range(3):
            await setup.update()
    assert setup.scheduler.version == 3


def test_simulated_time_says_when_nothing_will_ever_happen() -> None:
    async def main() -> None:
        await asyncio.sleep(5)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match=r"at 5.000 s of simulated time every task waits"):
        run_in_simulated_time(main())


def test_every_episode_is_leased_for_its_own_spec() -> None:
    seen: list[EpisodeSpec] = []

    class NotingPool(LatencyPool):
        @asynccontextmanager
        async def lease(self, episode: EpisodeSpec) -> AsyncIterator[CountdownEnv]:
            seen.append(episode)
            async with super().lease(episode) as env:
                yield env

    async def main() -> None:
        setup = Setup(pool=NotingPool(4))
        async with setup.opened():
            await setup.update()

    run_in_simulated_time(main())
    groups = source()
    assert seen[:8] == [*groups.next_group().episodes, *groups.next_group().episodes]


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
