"""One attempt at an episode: who ended it, what its caller learns of that, what becomes of an agent that does
not end."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rollout_fakes import CountingEngine, LatencyPool, source

from vla_rl.errors import ActorDied, AgentError
from vla_rl.rollout import (
    EpisodeLost,
    EpisodeScheduler,
    LocalEpisodeRunner,
    SchedulerConfig,
    embodied_agent,
    run_episode,
)
from vla_rl.rollout.episode_tasks import RunningEpisodes, run_agent
from vla_rl.rollout.policies import EngineTeam
from vla_rl.types import Agent, Env, EpisodeSpec, Policy, Trajectory
from vla_rl.util.stalls import list_awaiting_frames
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


AgentCall = Callable[[], Coroutine[Any, Any, Any]]


async def catches_every_cancellation() -> None:
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


async def catches_everything() -> None:
    while True:
        try:
            await asyncio.sleep(60)
        except BaseException:
            continue


async def cleans_up_for_four_seconds() -> None:
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(4)


async def returns_although_cancelled() -> str:
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        await asyncio.sleep(1)
    return "its trajectory"


async def ended_after_a_cancellation(*agents: AgentCall) -> tuple[list[Any], float]:
    """Return what each agent's task ended with, and the seconds from the cancellation on."""
    clock = asyncio.get_running_loop().time
    tasks = [
        asyncio.create_task(run_agent(agent, number, f"episode {number}"))
        for number, agent in enumerate(agents)
    ]
    await asyncio.sleep(1)
    began = clock()
    for task in tasks:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    return ends, clock() - began


@pytest.mark.parametrize("agent", [catches_every_cancellation, catches_everything])
def test_agents_that_do_not_end_are_left_after_a_grace_and_one_line_names_them(
    agent: AgentCall, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ends, seconds = run_in_simulated_time(ended_after_a_cancellation(*[agent] * 12))
    assert {type(end) for end in ends} == {asyncio.CancelledError}
    assert seconds == pytest.approx(5.1)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "episodes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more did not end within 5 s of being cancelled"
    )
    assert f"The agent of episode 0 stands in {agent.__name__} ({__file__}:" in line


def test_an_agent_may_clean_up_or_return_after_a_cancellation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends, seconds = run_in_simulated_time(
        ended_after_a_cancellation(cleans_up_for_four_seconds, returns_although_cancelled)
    )
    assert (type(ends[0]), ends[1]) == (asyncio.CancelledError, "its trajectory")
    assert seconds == pytest.approx(4)
    assert not caplog.records


def test_an_agents_own_deadline_is_no_cancellation_of_its_episode() -> None:
    async def agent() -> str:
        try:
            async with asyncio.timeout(1):
                await asyncio.sleep(60)
        except TimeoutError:
            await asyncio.sleep(60)
        return "its trajectory"

    assert run_in_simulated_time(run_agent(agent, 0, "episode 0")) == "its trajectory"


class Own(BaseException):
    pass


async def exits() -> None:
    sys.exit(3)


async def raises_its_own() -> None:
    raise Own("mine")


async def raises_in_nested_groups() -> None:
    async with asyncio.TaskGroup() as outer:

        async def inner() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(raises_its_own())

        outer.create_task(inner())


def exits_at_once() -> Any:
    sys.exit("no such file")


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (exits, "SystemExit: 3"),
        (exits_at_once, "SystemExit: no such file"),
        (raises_its_own, "Own: mine"),
        (raises_in_nested_groups, "Own: mine"),
    ],
)
def test_what_is_no_exception_becomes_an_error_of_the_agent_with_its_frames(
    agent: AgentCall, said: str
) -> None:
    with pytest.raises(AgentError, match=f"the agent raised {said} while running episode 7") as end:
        run_in_simulated_time(run_agent(agent, 7, "episode 7"))
    cause = end.value.__cause__
    assert cause is not None
    assert cause.__traceback__ is not None
    frames = []
    trace = cause.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next  # type: ignore[assignment]
    assert agent.__name__ in frames


def test_what_an_agent_waits_for_can_be_seen() -> None:
    async def main() -> list[str]:
        work = run_agent(catches_every_cancellation, 0, "episode 0")
        task = asyncio.create_task(work, name="episode 0")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        named = [each for each in asyncio.all_tasks() if each.get_name() == "episode 0"]
        (agent,) = [each for each in named if each is not task]
        found = [frame.f_code.co_name for frame in list_awaiting_frames(agent.get_coro())]
        task.cancel()
        await asyncio.wait((task,))
        return found

    assert run_in_simulated_time(main())[1] == "catches_every_cancellation"


async def test_the_oldest_episode_is_cancelled_first_and_stays_counted() -> None:
    running, ends = RunningEpisodes(), []

    async def episode(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append(number)

    await running.open_tasks()
    for number in (3, 1, 2):
        running.start_episode(number, episode(number))
    await asyncio.sleep(0)
    running.cancel_all()
    await running.wait_until_ended(None, None, None)
    assert ends == [1, 2, 3]
    assert len(running) == 3  # in flight: a resume runs them again


async def test_later_errors_become_notes_on_the_first_and_nothing_starts_meanwhile() -> None:
    running, first, later = RunningEpisodes(), ValueError("first"), KeyError("later")
    await running.open_tasks()
    assert running.fails_the_run(first)
    assert not running.fails_the_run(later)
    assert not running.fails_the_run(first)
    assert first.__notes__ == ["another episode failed too: KeyError: 'later'"]
    assert not running.may_start
    running.cancel_all()
    await running.wait_until_ended(None, None, None)
    with pytest.raises(RuntimeError, match="no group will come") as error:
        running.require_running()
    assert error.value.__cause__ is first


def test_before_it_is_opened_no_group_will_come() -> None:
    with pytest.raises(RuntimeError, match="the scheduler is not open"):
        RunningEpisodes().require_running()
