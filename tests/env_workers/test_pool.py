"""The pool: leases, affinity, replacement of the dead, the frozen and the worn out, and an end to
restart storms.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from durations import at_some_pace

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.env_workers.process import SimulatorProcess
from vla_rl.errors import ActorDied, ActorFrozen, EnvError
from vla_rl.types import EpisodeSpec

Episode = Callable[..., EpisodeSpec]
STILL = np.zeros((4, 7), np.float32)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def runtime(shared_runtime: Runtime) -> Runtime:
    return shared_runtime


@pytest.fixture(params=[1, 4], ids=["a process each", "four to a process"])
def per_process(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


async def play(pool: SimulatorPool, spec: EpisodeSpec) -> list[float]:
    """Play one chunk; the hand's place after it."""
    async with pool.lease(spec) as env:
        await env.reset()
        outcome = await env.step_chunk(STILL)
        place: list[float] = outcome.observation["state"].tolist()
        return place


async def play_row_by_row(pool: SimulatorPool, spec: EpisodeSpec) -> None:
    async with pool.lease(spec) as env:
        await env.reset()
        for row in STILL:
            await env.step(row)


async def play_until_it_ends(pool: SimulatorPool, spec: EpisodeSpec) -> None:
    async with pool.lease(spec) as env:
        while True:
            await env.reset()


async def play_again_where_lost(pool: SimulatorPool, spec: EpisodeSpec) -> tuple[list[float], int]:
    """What a scheduler does: play the episode again for as long as its process dies."""
    for attempt in range(10):
        try:
            return await play(pool, spec), attempt
        except ActorDied:
            continue
    raise AssertionError("it died ten times")


async def test_many_episodes_share_few_simulators(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    async with (
        asyncio.timeout(60),
        SimulatorPool(runtime, SimulatorConfig(envs_per_process=per_process, num_envs=2)) as pool,
    ):
        assert pool.num_envs == 2
        places = await asyncio.gather(*(play(pool, episode(number)) for number in range(8)))
        again = await asyncio.gather(*(play(pool, episode(number)) for number in range(8)))
        assert places == again
        assert len({tuple(place) for place in places}) == 8
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
            second = asyncio.create_task(play(pool, episode(1)))
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


@pytest.mark.parametrize(
    ("fault", "error"), [("kill", ActorDied), ("exit", ActorDied), ("stop", ActorFrozen)]
)
async def test_an_episode_whose_simulator_dies_plays_again_and_ends_alike(
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
            (place, attempts), *others = await asyncio.gather(
                play_again_where_lost(pool, broken),
                *(play_again_where_lost(pool, episode(number)) for number in range(1, 6)),
            )
            assert attempts == 1
            # one more plays at the same time
            mates = [other_attempts for _, other_attempts in others]
            assert mates == [0] * 5 if per_process == 1 else sum(mates) <= 1
            assert place == await play(pool, episode(0))  # the sound environment, same seed
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
        await play(pool, episode(1))
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
        place, attempts = await play_again_where_lost(pool, broken)
        assert (place, attempts) == (await play(pool, episode(0)), 1)
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
        await play(pool, episode(1))
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
        await play_again_where_lost(pool, episode(1))
        assert psutil.Process(pool.pids[0]).parent() != server


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
            await play_row_by_row(pool, broken)
        await play(pool, broken)
        assert pool.pids == before


async def test_a_simulator_is_replaced_after_its_number_of_episodes(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    config = SimulatorConfig(envs_per_process=per_process, num_envs=2, recycle_after_episodes=2)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        before, number = set(pool.pids), itertools.count()
        while pool.metrics()["simulation/replaced/recycle_after_episodes"] < 3:
            assert (await play_again_where_lost(pool, episode(next(number))))[1] == 0
        assert next(number) >= 6
        assert pool.metrics()["simulation/replaced/died"] == 0
        assert not before <= set(pool.pids)


async def test_a_worn_out_simulator_plays_on_until_its_successor_is_up(
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
                await play(pool, episode(number))
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
    start, may_succeed = SimulatorProcess.start, asyncio.Event()

    async def start_when_it_may(
        runtime: Runtime, name: str, *args: Any, **kwargs: Any
    ) -> SimulatorProcess:
        if name != "env-0":
            await may_succeed.wait()
        return await start(runtime, name, *args, **kwargs)

    monkeypatch.setattr(SimulatorProcess, "start", start_when_it_may)
    monkeypatch.setattr("vla_rl.env_workers.pool.available_mb", lambda: math.inf)
    config = SimulatorConfig(num_envs=1, recycle_after_episodes=1)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        await play(pool, episode(0))
        async with pool.lease(episode(1)) as env:
            os.kill(env.process.pid, signal.SIGKILL)
            with pytest.raises(ActorDied):
                await env.reset()
        assert pool.metrics()["simulation/replaced/recycle_after_episodes"] == 1
        assert pool.metrics()["simulation/replaced/died"] == 1
        may_succeed.set()
        await play(pool, episode(1))
        assert pool.metrics()["simulation/replaced/died"] == 1


async def test_a_simulator_that_grows_is_replaced_and_no_episode_is_lost(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    config = SimulatorConfig(envs_per_process=per_process, num_envs=1, rss_limit_mb=150)
    leaking = {"fault": "leak", "at_step": 1, "times": 1000}
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        attempts = [
            await play_again_where_lost(pool, episode(number, "vla_rl/faulty-v0", **leaking))
            for number in range(8)
        ]
        assert [attempt for _, attempt in attempts] == [0] * 8
        assert pool.metrics()["simulation/replaced/rss_limit_mb"] >= 1


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
        waiting = asyncio.create_task(play(pool, episode(1)))
        await until_somebody_waits(pool)
        waiting.cancel()
        holding.cancel()
        await asyncio.gather(holding, waiting, return_exceptions=True)
        await play(pool, episode(2))
        assert pool.metrics()["simulation/idle"] == 1


async def test_a_lease_that_is_over_cannot_be_played(runtime: Runtime, episode: Episode) -> None:
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
            await play(pool, episode(0, "vla_rl/nothing-v0"))
        await play(pool, episode(1))


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
                await play(pool, dying)
        with pytest.raises(
            EnvError, match=r"more than 2 simulators of 'env' died within 60 s.*exit code 3"
        ):
            await play(pool, dying)
        with pytest.raises(EnvError, match="more than 2 simulators"):
            await play(pool, episode(1))


async def test_processes_that_never_come_up_end_the_pool_before_it_begins(
    runtime: Runtime, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os\nos._exit(9)\n")
    config = SimulatorConfig(num_envs=2, max_restarts=1, environment={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(EnvError, match=r"more than 1 simulators.*exit code 9"):
        async with asyncio.timeout(60), SimulatorPool(runtime, config):
            pass


async def test_leaving_the_pool_leaves_no_process(runtime: Runtime, episode: Episode) -> None:
    async with asyncio.timeout(60):
        async with SimulatorPool(runtime, SimulatorConfig(num_envs=3, concurrent_starts=2)) as pool:
            pids = pool.pids
            assert len(pids) == 3
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


async def test_closing_the_pool_ends_every_lease_that_plays_or_waits(
    runtime: Runtime, episode: Episode, per_process: int
) -> None:
    async with asyncio.timeout(60):
        async with SimulatorPool(
            runtime, SimulatorConfig(envs_per_process=per_process, num_envs=1)
        ) as pool:
            playing = asyncio.create_task(play_until_it_ends(pool, episode(0)))
            waiting = asyncio.create_task(play(pool, episode(1)))
            await until_somebody_waits(pool)
        with pytest.raises(ActorDied, match="stopped by its owner"):
            await playing
        with pytest.raises(RuntimeError, match="the pool of simulators 'env' is closed"):
            await waiting
        with pytest.raises(RuntimeError, match="is closed"):
            await play(pool, episode(2))


async def test_an_error_in_the_body_comes_out_as_it_is(runtime: Runtime) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with asyncio.timeout(60), SimulatorPool(runtime, SimulatorConfig(num_envs=1)):
            raise KeyError("mine")


async def until_somebody_waits(pool: SimulatorPool) -> None:
    while pool.metrics()["simulation/waiting"] == 0:  # noqa: ASYNC110  # a turn of the loop at a time
        await asyncio.sleep(0)


async def until_gone(pid: int) -> None:
    """Until the process is reaped, which the runtime's loop does; a turn of the loop at a time."""
    while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0)


async def until_there_is(name: bytes) -> None:
    """Until a process of that name has started, which is nobody's event here."""
    while not children_named(name):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def children_named(name: bytes) -> list[int]:
    """Processes below this one whose name begins like that."""
    found, waiting = [], [os.getpid()]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            if Path(f"/proc/{pid}/comm").read_bytes().startswith(name):
                found.append(pid)
    return found
