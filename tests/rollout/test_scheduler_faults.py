"""What the scheduler does when episodes are lost, when something is broken, and when it has to
stop.
"""

import asyncio

import msgspec
import pytest
from rollout_fakes import Faults, LatencyPool, Setup

from vla_rl.errors import ActorDied, AgentError, EnvError
from vla_rl.rollout import EpisodeLost, embodied_agent
from vla_rl.types import Agent, Env, Policy, Trajectory
from vla_rl.util.tasks import run_in_simulated_time


def test_a_dead_simulator_costs_a_replay_of_the_same_episode_and_nothing_else() -> None:
    async def main(faults: Faults) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
        setup = Setup(
            pool=LatencyPool(4, faults=faults), max_attempts=20, max_staleness=0, deterministic=True
        )
        lengths, attempts = [], []
        async with setup.opened() as scheduler:
            for _ in range(20):
                groups = await setup.update()
                lengths += [[len(t.steps) for t in group.trajectories] for group in groups]
                attempts += [
                    (t.episode.episode_id, t.episode.attempt)
                    for g in groups
                    for t in g.trajectories
                ]
            lost = scheduler.metrics()
        assert scheduler.version == 20
        return lengths, [
            attempts,
            lost.get("rollout/lost/died", 0),
            lost.get("rollout/lost/frozen", 0),
        ]

    calm, (_, died, frozen) = run_in_simulated_time(main(Faults()))
    assert (died, frozen) == (0, 0)
    stormy, (attempts, died, frozen) = run_in_simulated_time(main(Faults(death=0.2, freeze=0.1)))
    assert died > 0
    assert frozen > 0
    assert stormy == calm  # the very same episodes
    assert sum(attempt for _, attempt in attempts) == died + frozen


def test_an_episode_lost_too_often_fails_the_run_and_names_episode_and_cause() -> None:
    async def main() -> None:
        setup = Setup(pool=LatencyPool(4, faults=Faults(death=1.0)), max_attempts=3)
        async with setup.opened():
            await setup.collect(0)

    with pytest.raises(
        EpisodeLost, match=r"task-\d.*attempt 3\) was lost: .*SIGKILL.*\n.*a last word"
    ) as caught:
        run_in_simulated_time(main())
    assert caught.value.__notes__[0] == "that was the last of max_attempts=3"
    assert isinstance(caught.value.__cause__, ActorDied)


def test_an_episode_that_takes_too_long_is_run_again() -> None:
    async def main() -> dict[str, float]:
        async def agent(env: Env, policy: Policy) -> Trajectory:
            if env.episode.episode_id == 2 and env.episode.attempt == 0:
                await asyncio.Event().wait()
            return await embodied_agent(env, policy)

        setup = Setup(agent=agent, episode_timeout_s=60.0)
        async with setup.opened() as scheduler:
            (group,) = [
                group
                for group in await setup.collect(0) + await setup.collect(1)
                if group.group_id == 0
            ]
            assert [t.episode.attempt for t in group.trajectories] == [0, 0, 1, 0]
            return scheduler.metrics()

    assert run_in_simulated_time(main())["rollout/lost/timed_out"] == 1


def test_a_broken_environment_ends_the_run_with_its_own_error_and_frees_all_others() -> None:
    pool = LatencyPool(4)

    async def agent(env: Env, policy: Policy) -> Trajectory:
        if env.episode.episode_id == 3:
            raise EnvError("observation 'image' is float64, expected uint8")
        return await embodied_agent(env, policy)

    async def main() -> None:
        setup = Setup(pool=pool, agent=agent)
        async with setup.opened():
            await setup.collect(0)

    with pytest.raises(EnvError, match="float64, expected uint8") as caught:
        run_in_simulated_time(main())
    assert "while running episode 3 (task-" in caught.value.__notes__[0]
    assert caught.traceback[-1].name == "agent"
    assert pool.num_leased == 0


def test_a_timeout_of_the_agents_own_is_a_bug_and_not_a_lost_episode() -> None:
    async def agent(env: Env, policy: Policy) -> Trajectory:
        async with asyncio.timeout(0.001):
            await asyncio.sleep(1)
        return await embodied_agent(env, policy)

    async def main() -> None:
        setup = Setup(agent=agent, episode_timeout_s=60.0)
        async with setup.opened():
            await setup.collect(0)

    with pytest.raises(TimeoutError):
        run_in_simulated_time(main())


def test_an_agent_whose_work_is_cancelled_by_others_ends_the_run_and_is_named() -> None:
    async def agent(env: Env, policy: Policy) -> Trajectory:
        if env.episode.episode_id == 2:
            shared = asyncio.get_running_loop().create_future()
            shared.cancel()
            await shared
        return await embodied_agent(env, policy)

    async def main() -> None:
        setup = Setup(agent=agent)
        async with setup.opened():
            await setup.collect(0)

    with pytest.raises(
        RuntimeError,
        match=r"raised CancelledError in episode 2 \(task-.*but the episode was not cancelled",
    ):
        run_in_simulated_time(main())


def test_a_death_inside_an_agents_own_task_group_is_a_lost_episode_too() -> None:
    async def agent(env: Env, policy: Policy) -> Trajectory:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(embodied_agent(env, policy))
        return running.result()

    async def main() -> float:
        setup = Setup(pool=LatencyPool(4, faults=Faults(death=0.3)), agent=agent, max_attempts=20)
        async with setup.opened() as scheduler:
            for _ in range(5):
                await setup.update()
            return scheduler.metrics()["rollout/lost/died"]

    assert run_in_simulated_time(main()) > 0


def test_an_agent_that_returns_something_else_is_told_what_was_expected() -> None:
    async def agent(env: Env, policy: Policy) -> Trajectory:
        return "done"

    async def main() -> None:
        setup = Setup(agent=agent)
        async with setup.opened():
            await setup.collect(0)

    with pytest.raises(
        AgentError, match="returned a str 'done', expected the Trajectory of episode 0"
    ) as caught:
        run_in_simulated_time(main())
    assert (
        "another episode failed too: AgentError: "
        "the agent returned a str 'done'" in caught.value.__notes__[0]
    )


async def without_return(env: Env, policy: Policy) -> None:
    await embodied_agent(env, policy)


def not_async(env: Env, policy: Policy) -> str:
    return "done"


async def with_another_stop_reason(env: Env, policy: Policy) -> Trajectory:
    return msgspec.structs.replace(await embodied_agent(env, policy), stop_reason="success")


async def with_other_steps(env: Env, policy: Policy) -> Trajectory:
    return msgspec.structs.replace(await embodied_agent(env, policy), steps=("a step",))


async def with_the_tuple_of_reset(env: Env, policy: Policy) -> None:
    observation = await env.reset()
    await policy.act(observation)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (
            without_return,
            r"returned None, expected the Trajectory of episode .*; is a `return` missing\?$",
        ),
        (not_async, r"returned a str 'done' at once; expected `async def agent\(env, policy\)`"),
        (with_another_stop_reason, r"stop_reason='success' for episode .*, expected a StopReason"),
        (
            with_other_steps,
            r"returned a str 'a step' among the steps of episode .*, expected Steps",
        ),
        (
            with_the_tuple_of_reset,
            r"a tuple \(observation, info\); expected .*: `observation, info = await env.reset\(\)`",
        ),
    ],
)
def test_a_mistake_of_an_agent_is_reported_with_its_remedy(agent: Agent, message: str) -> None:
    async def main() -> None:
        setup = Setup(agent=agent)
        async with setup.opened():
            await setup.collect(0)

    with pytest.raises(AgentError, match=message):
        run_in_simulated_time(main())


def test_every_ended_episode_is_counted_once_and_lost_ones_are_not() -> None:
    ended: list[tuple[int, int]] = []

    async def main() -> int:
        setup = Setup(
            pool=LatencyPool(4, faults=Faults(death=0.2)),
            max_attempts=20,
            on_episode=lambda lengths: ended.append(
                (lengths.episode.episode_id, lengths.episode.attempt)
            ),
        )
        async with setup.opened() as scheduler:
            await setup.update()
            return scheduler.metrics()["rollout/lost/died"]

    assert run_in_simulated_time(main()) > 0
    assert len({episode_id for episode_id, _ in ended}) == len(ended)
    assert any(attempt > 0 for _, attempt in ended)


def test_an_episode_that_does_not_end_is_asked_about_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_rl.rollout.policies.LONG_EPISODE", 3)

    async def endless(env: Env, policy: Policy) -> Trajectory:
        observation, _ = await env.reset()
        for _ in range(5):
            await policy.act(observation)
        return await embodied_agent(env, policy)

    async def main() -> None:
        setup = Setup(agent=endless)
        async with setup.opened():
            await setup.update()

    run_in_simulated_time(main())
    asked = [
        record.getMessage() for record in caplog.records if "has not ended" in record.getMessage()
    ]
    assert len(asked) == 1
    assert "has made 3 decisions and has not ended" in asked[0]
    assert "max_episode_steps" in asked[0]


def test_an_episode_without_a_decision_is_refused_by_name() -> None:
    async def agent(env: Env, policy: Policy) -> Trajectory:
        return msgspec.structs.replace(await embodied_agent(env, policy), steps=())

    async def main() -> None:
        setup = Setup(agent=agent)
        async with setup.opened():
            await setup.collect(0)

    with pytest.raises(
        AgentError,
        match=r"a Trajectory without steps for episode \d+ .*expected at least one decision",
    ):
        run_in_simulated_time(main())


def test_a_filter_that_keeps_nothing_says_so_and_ends_the_run_instead_of_running_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        setup = Setup(keep=lambda group: False, max_filtered_in_a_row=25)
        async with setup.opened():
            await setup.collect(0)

    with pytest.raises(
        RuntimeError, match="25 groups in a row were filtered and none was kept, so update 0"
    ):
        run_in_simulated_time(main())
    assert [record.message for record in caplog.records if record.name.startswith("vla_rl")] == [
        f"{number} groups in a row were filtered and none was kept: update 0 is waiting for one"
        for number in (10, 20)
    ]


def test_leaving_the_block_early_cancels_every_episode_and_awaits_its_end() -> None:
    async def main() -> tuple[LatencyPool, list[int]]:
        ended: list[int] = []

        async def agent(env: Env, policy: Policy) -> Trajectory:
            try:
                return await embodied_agent(env, policy)
            finally:
                ended.append(env.episode.episode_id)

        setup = Setup(agent=agent)
        async with setup.opened() as scheduler:
            await asyncio.sleep(0.015)
        scheduler.check_conservation()
        assert len(asyncio.all_tasks()) == 1
        return setup.pool, ended

    pool, ended = run_in_simulated_time(main())
    assert pool.num_leased == 0
    assert ended == [0, 1, 2, 3]


def test_cancelling_the_owner_cancels_the_episodes() -> None:
    pool = LatencyPool(4)

    async def main() -> None:
        setup = Setup(pool=pool)
        async with asyncio.timeout(0.01), setup.engine.batcher, setup.scheduler:
            await setup.collect(0)

    with pytest.raises(TimeoutError):
        run_in_simulated_time(main())
    assert pool.num_leased == 0


def test_an_error_of_the_owner_is_raised_as_it_was() -> None:
    async def main() -> None:
        setup = Setup()
        async with setup.opened():
            raise KeyError("learner")

    with pytest.raises(KeyError, match="learner"):
        run_in_simulated_time(main())


def test_a_batch_that_fails_ends_the_run_once_and_with_its_own_error() -> None:
    async def main() -> None:
        setup = Setup()
        setup.engine.failure = ValueError("observation has no 'image'")
        async with setup.opened():
            await setup.collect(0)

    with pytest.raises(ValueError, match="observation has no 'image'"):
        run_in_simulated_time(main())


def test_whoever_waits_for_groups_of_a_closed_scheduler_is_told() -> None:
    async def main() -> None:
        setup = Setup()
        with pytest.raises(RuntimeError, match="the scheduler is not open"):
            await setup.collect(0)
        async with asyncio.TaskGroup() as other:
            async with setup.opened():
                waiting = other.create_task(asyncio.wait([asyncio.ensure_future(setup.collect(0))]))
                await asyncio.sleep(0.01)
            done, _ = await waiting
        with pytest.raises(RuntimeError, match="the scheduler is not open"):
            done.pop().result()

    run_in_simulated_time(main())


def test_a_failure_of_the_learner_and_one_of_an_episode_are_both_raised() -> None:
    async def agent(env: Env, policy: Policy) -> Trajectory:
        try:
            return await embodied_agent(env, policy)
        except asyncio.CancelledError:
            raise EnvError("close() raised") from None

    async def main() -> None:
        setup = Setup(agent=agent)
        async with setup.opened():
            await asyncio.sleep(0.01)
            raise KeyError("learner")

    with pytest.raises(ExceptionGroup) as caught:
        run_in_simulated_time(main())
    assert caught.group_contains(KeyError)
    assert caught.group_contains(EnvError)
