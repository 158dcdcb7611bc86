"""A simulator that dies, stands still, wears out or grows is replaced, and no episode is lost.

More deaths than chance explains end the pool.
"""

import asyncio
import itertools
import logging
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from durations import at_some_pace
from pool_episodes import (
    STILL,
    children_named,
    rerun_where_lost,
    run_episode,
    until_gone,
    until_there_is,
)

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.env_workers.process import SimulatorProcess
from vla_rl.errors import ActorDied, ActorFrozen, EnvError
from vla_rl.types import EpisodeSpec

Episode = Callable[..., EpisodeSpec]

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def runtime(shared_runtime: Runtime) -> Runtime:
    return shared_runtime


@pytest.fixture(params=[1, 4], ids=["a process each", "four to a process"])
def per_process(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.mark.parametrize(
    ("fault", "error"), [("kill", ActorDied), ("exit", ActorDied), ("stop", ActorFrozen)]
)
async def test_an_episode_whose_simulator_dies_runs_again_and_ends_alike(
    runtime: Runtime,
    episode: Episode,
    tmp_path: Path,
    fault: str,
    error: type[Exception],
    per_process: int,
) -> None:
    async def lose_one(scale: float) -> None:
        # resets too: where the process stops before the answer to one has left, the chunk's clock
        # has not begun
        limits = {"step_timeout_s": 0.5 * scale, "reset_timeout_s": 2.0 * scale}
        config = SimulatorConfig(envs_per_process=per_process, num_envs=2, **limits)
        ledger = tmp_path / f"{scale:g}"
        ledger.mkdir()
        kwargs: dict[str, Any] = {"fault": fault, "at_step": 3, "times": 1, "ledger": str(ledger)}
        broken = episode(0, "vla_rl/faulty-v0", **kwargs)
        async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
            (position, attempts), *others = await asyncio.gather(
                rerun_where_lost(pool, broken),
                *(rerun_where_lost(pool, episode(number)) for number in range(1, 6)),
            )
            assert attempts == 1
            # one more runs at the same time
            mates = [other_attempts for _, other_attempts in others]
            assert mates == [0] * 5 if per_process == 1 else sum(mates) <= 1
            assert position == await run_episode(
                pool, episode(0)
            )  # the sound environment, same seed
            metrics = pool.metrics()
            cause = "frozen" if error is ActorFrozen else "died"
            assert metrics[f"simulation/replaced/{cause}"] == 1
            assert sum(value for key, value in metrics.items() if "/replaced/" in key) == 1
            async with pool.lease(episode(7)), pool.lease(episode(8)):
                pass  # both seats are served again

    # a death needs no deadline
    await (at_some_pace(lose_one) if error is ActorFrozen else lose_one(120.0))


async def test_a_simulator_that_dies_while_idle_costs_no_episode(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    async with (
        asyncio.timeout(60),
        SimulatorPool(runtime, SimulatorConfig(envs_per_process=per_process, num_envs=1)) as pool,
    ):
        async with pool.lease(episode(0)) as env:
            process = env.process
        os.kill(process.pid, signal.SIGKILL)
        while process.is_alive():  # noqa: ASYNC110  # a turn of the loop at a time, until its end is known here
            await asyncio.sleep(0)
        await run_episode(pool, episode(1))
        assert pool.metrics()["simulation/replaced/died"] == 1
        assert pool.pids != [process.pid]


async def test_a_simulator_that_stands_still_costs_its_episode_no_timeout(
    runtime: Runtime, episode: Episode, tmp_path: Path, per_process: int
) -> None:
    config = SimulatorConfig(  # timeouts longer than this test may take
        envs_per_process=per_process,
        num_envs=1,
        frozen_after_s=1.0,
        step_timeout_s=3600,
        reset_timeout_s=3600,
    )
    broken = episode(0, "vla_rl/faulty-v0", fault="stop", at_step=3, times=1, ledger=str(tmp_path))
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        position, attempts = await rerun_where_lost(pool, broken)
        assert (position, attempts) == (await run_episode(pool, episode(0)), 1)
        assert pool.metrics()["simulation/replaced/frozen"] == 1
        assert pool.metrics()["simulation/replaced/died"] == 0


async def test_a_simulator_that_stands_still_while_idle_costs_no_episode(
    runtime: Runtime, episode: Episode
) -> None:
    config = SimulatorConfig(num_envs=1, frozen_after_s=1.0)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        async with pool.lease(episode(0)) as env:
            process = env.process
        os.kill(process.pid, signal.SIGSTOP)
        while process.is_alive():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await run_episode(pool, episode(1))
        assert pool.metrics()["simulation/replaced/frozen"] == 1


async def test_a_pool_whose_fork_server_stands_still_starts_another(
    runtime: Runtime, episode: Episode
) -> None:
    config = SimulatorConfig(num_envs=1, frozen_after_s=1.0)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        async with pool.lease(episode(0)) as env:
            process = env.process
        server = psutil.Process(process.pid).parent()
        assert server is not None
        server.suspend()
        os.kill(process.pid, signal.SIGKILL)
        await rerun_where_lost(pool, episode(1))
        assert psutil.Process(pool.pids[0]).parent() != server


async def test_a_simulator_is_replaced_after_its_number_of_episodes(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    config = SimulatorConfig(envs_per_process=per_process, num_envs=2, recycle_after_episodes=2)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        before, number = set(pool.pids), itertools.count()
        while pool.metrics()["simulation/replaced/recycle_after_episodes"] < 3:
            assert (await rerun_where_lost(pool, episode(next(number))))[1] == 0
        assert next(number) >= 6
        assert pool.metrics()["simulation/replaced/died"] == 0
        assert not before <= set(pool.pids)


async def test_a_worn_out_simulator_runs_on_until_its_successor_is_up(
    runtime: Runtime,
    episode: Episode,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vla_rl.env_workers.pool.available_mb", lambda: math.inf)
    config = SimulatorConfig(num_envs=1, recycle_after_episodes=3)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        (first,) = pool.pids
        with caplog.at_level(logging.INFO):
            for number in range(3):
                await run_episode(pool, episode(number))
        assert (
            "simulator env-0 is replaced (recycle_after_episodes) after 3 episodes" in caplog.text
        )
        # the fourth, at once: nobody waits for the successor
        async with pool.lease(episode(3)) as env:
            assert env.process.pid == first
            await env.reset()
            await until_there_is(b"env-0.1")
            await env.step(STILL[0])  # the successor waits for the end of the episode
        await until_gone(first)
        async with pool.lease(episode(4)) as env:
            assert env.process.pid != first
            assert env.process.num_episodes == 0
        assert pool.metrics()["simulation/replaced/recycle_after_episodes"] == 1


async def test_without_room_for_two_the_old_simulator_goes_before_the_new_one_comes(
    runtime: Runtime, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_rl.env_workers.pool.available_mb", lambda: 0.0)
    config = SimulatorConfig(num_envs=1, recycle_after_episodes=1)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        used = []
        for number in range(3):
            async with pool.lease(episode(number)) as env:
                used.append(env.process.pid)
                await env.reset()
                assert len(children_named(b"env-0")) == 1
        assert len(set(used)) == 3


async def test_a_worn_out_simulator_that_dies_before_its_successor_is_up_costs_one_attempt(
    runtime: Runtime, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, may_succeed = SimulatorProcess.start_process, asyncio.Event()

    async def start_when_it_may(
        runtime: Runtime, name: str, *args: Any, **kwargs: Any
    ) -> SimulatorProcess:
        if name != "env-0":
            await may_succeed.wait()
        return await start(runtime, name, *args, **kwargs)

    monkeypatch.setattr(SimulatorProcess, "start_process", start_when_it_may)
    monkeypatch.setattr("vla_rl.env_workers.pool.available_mb", lambda: math.inf)
    config = SimulatorConfig(num_envs=1, recycle_after_episodes=1)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        await run_episode(pool, episode(0))
        async with pool.lease(episode(1)) as env:
            os.kill(env.process.pid, signal.SIGKILL)
            with pytest.raises(ActorDied):
                await env.reset()
        assert pool.metrics()["simulation/replaced/recycle_after_episodes"] == 1
        assert pool.metrics()["simulation/replaced/died"] == 1
        may_succeed.set()
        await run_episode(pool, episode(1))
        assert pool.metrics()["simulation/replaced/died"] == 1


async def test_a_simulator_that_grows_is_replaced_and_no_episode_is_lost(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    config = SimulatorConfig(envs_per_process=per_process, num_envs=1, rss_limit_mb=150)
    leaking = {"fault": "leak", "at_step": 1, "times": 1000}
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        attempts = [
            await rerun_where_lost(pool, episode(number, "vla_rl/faulty-v0", **leaking))
            for number in range(8)
        ]
        assert [attempt for _, attempt in attempts] == [0] * 8
        assert pool.metrics()["simulation/replaced/rss_limit_mb"] >= 1


async def test_more_deaths_than_chance_explains_end_the_pool_for_everybody(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    config = SimulatorConfig(
        envs_per_process=per_process, num_envs=1, max_restarts=2, restart_window_s=60
    )
    dying = episode(0, "vla_rl/faulty-v0", fault="exit", at_step=0, times=1000)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        for _ in range(3):
            with pytest.raises(ActorDied):
                await run_episode(pool, dying)
        with pytest.raises(
            EnvError, match=r"more than 2 simulators of 'env' died within 60 s.*exit code 3"
        ):
            await run_episode(pool, dying)
        with pytest.raises(EnvError, match="more than 2 simulators"):
            await run_episode(pool, episode(1))


async def test_processes_that_never_come_up_end_the_pool_before_it_begins(
    runtime: Runtime, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(9)\n")
    config = SimulatorConfig(num_envs=2, max_restarts=1, environment={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(EnvError, match=r"more than 1 simulators.*exit code 9"):
        async with asyncio.timeout(60), SimulatorPool(runtime, config):
            pass
