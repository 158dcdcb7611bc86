"""The pool: leases, affinity, and an end that leaves nothing."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from pool_episodes import (
    run_episode,
    run_row_by_row,
    run_until_it_ends,
    until_somebody_waits,
)

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.errors import ActorDied, EnvError
from vla_rl.types import EnvSpec, EpisodeSpec

Episode = Callable[..., EpisodeSpec]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def runtime(shared_runtime: Runtime) -> Runtime:
    return shared_runtime


@pytest.fixture(params=[1, 4], ids=["a process each", "four to a process"])
def per_process(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


async def test_many_episodes_share_few_simulators(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    async with (
        asyncio.timeout(60),
        SimulatorPool(runtime, SimulatorConfig(envs_per_process=per_process, num_envs=2)) as pool,
    ):
        assert pool.num_envs == 2
        positions = await asyncio.gather(
            *(run_episode(pool, episode(number)) for number in range(8))
        )
        again = await asyncio.gather(*(run_episode(pool, episode(number)) for number in range(8)))
        assert positions == again
        assert len({tuple(position) for position in positions}) == 8
        metrics = pool.metrics()
        assert metrics["simulation/leases"] == 16
        assert metrics["simulation/idle"] == 2
        assert metrics["simulation/waiting"] == 0
        assert metrics["simulation/lease_wait_s"] > 0
        assert metrics["simulation/private_mb_max"] > 1


async def test_a_lease_waits_for_a_free_simulator(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    async with (
        asyncio.timeout(60),
        SimulatorPool(runtime, SimulatorConfig(envs_per_process=per_process, num_envs=1)) as pool,
    ):
        async with pool.lease(episode(0)):
            second = asyncio.create_task(run_episode(pool, episode(1)))
            await until_somebody_waits(pool)
            assert not second.done()
        assert len(await second) == 2


async def test_an_episode_prefers_the_simulator_that_holds_its_environment(
    runtime: Runtime, episode: Episode
) -> None:
    red, blue = episode(0, task_id=0), episode(1, task_id=2)
    async with asyncio.timeout(60), SimulatorPool(runtime, SimulatorConfig(num_envs=2)) as pool:
        used: dict[str, set[int]] = {"red": set(), "blue": set()}
        for name, spec in (
            ("red", red),
            ("blue", blue),
            ("blue", blue),
            ("red", red),
            ("red", red),
            ("blue", blue),
        ):
            async with pool.lease(spec) as env:
                used[name].add(env.process.pid)
        assert len(used["red"]) == len(used["blue"]) == 1
        assert used["red"] != used["blue"]


async def test_a_step_after_the_end_of_an_episode_is_refused_until_it_is_begun_again(
    runtime: Runtime,
) -> None:
    # gymnasium's own environments go on after their end, and an agent that overlooks it never returns
    spec = EpisodeSpec(
        episode_id=7, group_id=0, member=0, env=EnvSpec(id="Pendulum-v1"), task="up", seed=0, policy_seed=0,
    )  # fmt: skip
    still = np.zeros((200, 1), np.float32)
    async with (
        asyncio.timeout(60),
        SimulatorPool(runtime, SimulatorConfig(num_envs=1)) as pool,
        pool.lease(spec) as env,
    ):
        await env.reset()
        assert (await env.step_chunk(still)).truncated
        for step in (env.step_chunk(still), env.step(still[0])):
            with pytest.raises(ResetNeeded, match=r"episode 7 is over \(truncated\)"):
                await step
        await env.reset()
        assert not (await env.step(still[0]))[3]


async def test_a_broken_environment_is_built_anew_in_the_same_process(
    runtime: Runtime, episode: Episode, tmp_path: Path, per_process: int
) -> None:
    broken = episode(
        0, "vla_rl/faulty-v0", fault="wrong_shape", at_step=2, times=1, ledger=str(tmp_path)
    )
    async with (
        asyncio.timeout(60),
        SimulatorPool(runtime, SimulatorConfig(envs_per_process=per_process, num_envs=1)) as pool,
    ):
        before = pool.pids
        with pytest.raises(EnvError, match=r"image is uint8 \[28, 32, 3\]"):
            await run_row_by_row(pool, broken)
        await run_episode(pool, broken)
        assert pool.pids == before


async def test_a_cancelled_episode_gives_its_simulator_back(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    async with (
        asyncio.timeout(60),
        SimulatorPool(runtime, SimulatorConfig(envs_per_process=per_process, num_envs=1)) as pool,
    ):
        leased = asyncio.Event()

        async def hold() -> None:
            async with pool.lease(episode(0)):
                leased.set()
                await asyncio.Event().wait()

        holding = asyncio.create_task(hold())
        await leased.wait()
        waiting = asyncio.create_task(run_episode(pool, episode(1)))
        await until_somebody_waits(pool)
        waiting.cancel()
        holding.cancel()
        await asyncio.gather(holding, waiting, return_exceptions=True)
        await run_episode(pool, episode(2))
        assert pool.metrics()["simulation/idle"] == 1


async def test_a_lease_that_is_over_cannot_be_run(runtime: Runtime, episode: Episode) -> None:
    async with asyncio.timeout(60), SimulatorPool(runtime, SimulatorConfig(num_envs=1)) as pool:
        async with pool.lease(episode(3)) as env:
            assert env.episode.episode_id == 3
        with pytest.raises(RuntimeError, match="lease for episode 3 is over"):
            await env.reset()


async def test_an_environment_that_cannot_be_built_is_refused_and_the_pool_goes_on(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    async with (
        asyncio.timeout(60),
        SimulatorPool(runtime, SimulatorConfig(envs_per_process=per_process, num_envs=1)) as pool,
    ):
        with pytest.raises(EnvError, match="could not be made"):
            await run_episode(pool, episode(0, "vla_rl/nothing-v0"))
        await run_episode(pool, episode(1))


async def test_leaving_the_pool_leaves_no_process(runtime: Runtime, episode: Episode) -> None:
    async with asyncio.timeout(60):
        async with SimulatorPool(runtime, SimulatorConfig(num_envs=3, concurrent_starts=2)) as pool:
            pids = pool.pids
            assert len(pids) == 3
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def test_closing_the_pool_ends_every_lease_that_runs_or_waits(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    async with asyncio.timeout(60):
        async with SimulatorPool(
            runtime, SimulatorConfig(envs_per_process=per_process, num_envs=1)
        ) as pool:
            episode_task = asyncio.create_task(run_until_it_ends(pool, episode(0)))
            waiting = asyncio.create_task(run_episode(pool, episode(1)))
            await until_somebody_waits(pool)
        with pytest.raises(ActorDied, match="stopped by its owner"):
            await episode_task
        with pytest.raises(RuntimeError, match="the pool of simulators 'env' is closed"):
            await waiting
        with pytest.raises(RuntimeError, match="is closed"):
            await run_episode(pool, episode(2))


async def test_an_error_in_the_body_comes_out_as_it_is(runtime: Runtime) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with asyncio.timeout(60), SimulatorPool(runtime, SimulatorConfig(num_envs=1)):
            raise KeyError("mine")
