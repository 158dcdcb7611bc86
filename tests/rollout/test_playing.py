"""One attempt at an episode: who ended it, and what its caller learns of that."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from rollout_fakes import CountingEngine, LatencyPool, source

from vla_rl.errors import ActorDied
from vla_rl.rollout import EpisodeLost, embodied_agent, run_episode
from vla_rl.types import Agent, Env, EpisodeSpec, Policy, Trajectory
from vla_rl.util.simulated_time import run_in_simulated_time

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
        playing = asyncio.create_task(run_episode(pool, CountingEngine(), waits, EPISODE))
        await began.wait()
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()

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
