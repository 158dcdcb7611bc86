"""One attempt at an episode: who ended it, what its caller learns of that; engines may be behind the learner."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from rollout_fakes import CountingEngine, LatencyPool, source

from vla_rl.errors import ActorDied
from vla_rl.rollout import (
    EpisodeLost,
    EpisodeScheduler,
    LocalEpisodeRunner,
    SchedulerConfig,
    embodied_agent,
    run_episode,
)
from vla_rl.rollout.policies import EngineTeam
from vla_rl.types import Agent, Env, EpisodeSpec, Policy, Trajectory
from vla_rl.util.tasks import run_in_simulated_time

EPISODE = source(1).next_group().episodes[0]


class Counted(LatencyPool):
    """Counts the leases that were given back."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_freed = 0

    @asynccontextmanager
    async def lease(self, episode: EpisodeSpec) -> AsyncIterator[Env]:
        try:
            async with super().lease(episode) as env:
                yield env
        finally:
            self.num_freed += 1


def attempt(agent: Agent, pool: Counted | None = None, **options: float) -> Trajectory:
    async def main() -> Trajectory:
        engine = CountingEngine()
        async with engine.batcher:
            return await run_episode(pool or Counted(), engine, agent, EPISODE, **options)  # type: ignore[arg-type]

    return run_in_simulated_time(main())


async def awaits_a_cancelled_task(env: Env, policy: Policy) -> Trajectory:
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task
    return await embodied_agent(env, policy)


def test_an_await_that_others_cancelled_is_an_error_and_no_cancellation() -> None:
    pool = Counted()
    with pytest.raises(RuntimeError, match="raised CancelledError in episode 0") as failure:
        attempt(awaits_a_cancelled_task, pool)
    assert isinstance(failure.value.__cause__, asyncio.CancelledError)
    assert pool.num_freed == 1


def test_an_episode_whose_task_is_cancelled_ends_as_cancelled() -> None:
    pool, began = Counted(), asyncio.Event()

    async def waits(env: Env, policy: Policy) -> Trajectory:
        began.set()
        await asyncio.sleep(60)
        raise AssertionError

    async def main() -> None:
        running = asyncio.create_task(run_episode(pool, CountingEngine(), waits, EPISODE))
        await began.wait()
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    run_in_simulated_time(main())
    assert pool.num_freed == 1


def test_an_episode_beyond_its_deadline_is_lost_and_says_how_long_it_had() -> None:
    async def slow(env: Env, policy: Policy) -> Trajectory:
        await asyncio.sleep(60)
        raise AssertionError

    with pytest.raises(EpisodeLost, match=r"longer than episode_timeout_s=1\.5") as loss:
        attempt(slow, timeout_s=1.5)
    assert (loss.value.kind, loss.value.episode) == ("timed_out", EPISODE)


def test_a_death_in_any_depth_of_an_agents_tasks_is_a_lost_episode() -> None:
    death = ActorDied("simulator", 7, "killed", [])

    async def nested(env: Env, policy: Policy) -> Trajectory:
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [death])])

    with pytest.raises(EpisodeLost) as loss:
        attempt(nested)
    assert loss.value.kind == "died"


def test_a_death_beside_another_error_is_no_lost_episode() -> None:
    async def both(env: Env, policy: Policy) -> Trajectory:
        raise ExceptionGroup("both", [ActorDied("simulator", 7, "killed", []), KeyError("mine")])

    with pytest.raises(ExceptionGroup) as errors:
        attempt(both)
    assert "while running episode 0" in errors.value.__notes__[0]


class Behind(CountingEngine):
    """It serves new weights once `serve` is called, like engines in processes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.pending_version = 0
        self._calls: list[Callable[[], None]] = []
        self._has_started = asyncio.Event()

    def apply_in_background(self) -> None: ...

    def on_weights_applied(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    async def wait_applied(self) -> None:
        await self._has_started.wait()

    def serve(self) -> None:
        self.weight_version = self.pending_version
        self._has_started.set()
        for call in self._calls:
            call()


def test_the_next_update_begins_before_the_engine_serves_the_weights_of_the_last_one() -> None:
    async def main() -> None:
        engine = Behind()
        runner = LocalEpisodeRunner(LatencyPool(8), engine, embodied_agent)
        config = SchedulerConfig(groups_per_update=2, max_staleness=1)
        scheduler = EpisodeScheduler(runner, source(), config)
        async with engine.batcher, scheduler:
            for update in (0, 1):
                groups = [group async for group in scheduler.groups_for_update(update)]
                assert {group.dispatch_version for group in groups} == {0}
                engine.pending_version = update + 1
                scheduler.mark_trained(groups, update + 1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1000.0):
                    await anext(scheduler.groups_for_update(2))
            engine.serve()
            groups = [group async for group in scheduler.groups_for_update(2)]
            assert {group.dispatch_version for group in groups} == {2}

    run_in_simulated_time(main())


def test_a_team_is_as_far_behind_as_its_last_engine() -> None:
    async def main() -> None:
        ahead, behind = CountingEngine(), Behind()
        ahead.weight_version = behind.pending_version = 3
        team = EngineTeam({"left": ahead, "right": behind})
        assert (team.weight_version, team.pending_version) == (0, 3)
        waiting = asyncio.create_task(team.wait_applied())
        await asyncio.sleep(0)
        assert not waiting.done()
        behind.serve()
        await waiting
        assert (team.weight_version, team.pending_version) == (3, 3)

    run_in_simulated_time(main())
