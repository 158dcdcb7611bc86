"""Several environments in one process: each with its own episode and its own faults, all with the
same end; under kills nothing is lost.
"""

import asyncio
import contextlib
import math
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from durations import at_some_pace
from pool_episodes import until_gone

from vla_rl.actors import Runtime
from vla_rl.env_workers import LeasedEnv, SimulatorConfig, SimulatorPool
from vla_rl.env_workers.process import SimulatorProcess
from vla_rl.errors import ActorDied, ActorFrozen, EnvError
from vla_rl.rollout import (
    EpisodeScheduler,
    GroupSource,
    LocalEpisodeRunner,
    SchedulerConfig,
    TaskStart,
    embodied_agent,
)
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Group, Observation, Sampling

Episode = Callable[..., EpisodeSpec]
STILL = np.zeros(7, np.float32)


@asynccontextmanager
async def leases(
    pool: SimulatorPool, episodes: Sequence[EpisodeSpec]
) -> AsyncIterator[list[LeasedEnv]]:
    """All of them at the same time, each at its start."""
    async with AsyncExitStack() as stack:
        envs = [await stack.enter_async_context(pool.lease(episode)) for episode in episodes]
        await asyncio.gather(*(env.reset() for env in envs))
        yield envs


async def run_episode(pool: SimulatorPool, spec: EpisodeSpec) -> bytes:
    """Single steps and a chunk; every byte that was observed."""
    dice = np.random.default_rng(spec.seed)
    rows = dice.uniform(-0.3, 0.3, (8, 7)).astype(np.float32)
    async with pool.lease(spec) as env:
        seen = [(await env.reset())[0]]
        seen += [(await env.step(row))[0] for row in rows[:4]]
        seen.append((await env.step_chunk(rows[4:])).observation)
        return b"".join(frame["image"].tobytes() + frame["state"].tobytes() for frame in seen)


async def outcome_of(env: LeasedEnv) -> Any:
    """A step, or what it raised."""
    try:
        return await env.step(STILL)
    except (ActorDied, EnvError) as error:
        return error


async def test_episodes_are_the_same_however_many_share_a_process(
    runtime: Runtime, episode: Episode
) -> None:
    results = []
    async with asyncio.timeout(60):
        for per_process in (1, 3, 4):
            config = SimulatorConfig(num_envs=4, envs_per_process=per_process)
            async with SimulatorPool(runtime, config) as pool:
                assert len(pool.pids) == {1: 4, 3: 2, 4: 1}[per_process]
                results.append(
                    await asyncio.gather(
                        *(run_episode(pool, episode(number)) for number in range(12))
                    )
                )
    assert len(set(results[0])) == 12
    assert results[0] == results[1] == results[2]


async def test_a_fault_reaches_only_the_episode_that_met_it(
    runtime: Runtime, episode: Episode
) -> None:
    config = SimulatorConfig(num_envs=4, envs_per_process=4)
    broken = episode(1, "vla_rl/faulty-v0", fault="raise")
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        async with leases(pool, [episode(0), broken, episode(2), episode(3)]) as envs:
            outcomes = await asyncio.gather(*(outcome_of(env) for env in envs))
            assert [isinstance(outcome, EnvError) for outcome in outcomes] == [
                False,
                True,
                False,
                False,
            ]
            again = await asyncio.gather(*(outcome_of(env) for env in envs))
            assert "no environment is open" in str(again[1])
            assert [isinstance(outcome, EnvError) for outcome in again] == [
                False,
                True,
                False,
                False,
            ]
        pids = pool.pids
        async with leases(pool, [broken]) as (env,):  # built anew
            assert isinstance(await outcome_of(env), EnvError)
        assert pool.pids == pids


@pytest.mark.parametrize(
    ("sent", "error"), [(signal.SIGKILL, ActorDied), (signal.SIGSTOP, ActorFrozen)]
)
async def test_the_end_of_a_process_is_told_to_everybody_in_it_and_counted_once(
    runtime: Runtime, episode: Episode, sent: signal.Signals, error: type[Exception]
) -> None:
    async def strike(scale: float) -> None:
        config = SimulatorConfig(num_envs=6, envs_per_process=4, step_timeout_s=0.5 * scale)
        async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
            async with leases(pool, [episode(number) for number in range(6)]) as envs:
                struck = next(env.process for env in envs if len(env.process.envs) == 4)
                os.kill(struck.pid, sent)
                outcomes = await asyncio.gather(*(outcome_of(env) for env in envs))
                mates = [env.process is struck for env in envs]
                assert sum(mates) == 4
                assert [type(outcome) is error for outcome in outcomes] == mates
            assert (
                len(
                    set(
                        await asyncio.gather(
                            *(run_episode(pool, episode(number)) for number in range(6))
                        )
                    )
                )
                == 6
            )
            assert struck.pid not in pool.pids
            counts = pool.metrics()
            cause = "frozen" if error is ActorFrozen else "died"
            assert counts[f"simulation/replaced/{cause}"] == 1
            assert sum(count for key, count in counts.items() if "/replaced/" in key) == 1

    # a death needs no deadline
    await (at_some_pace(strike) if error is ActorFrozen else strike(120.0))


async def test_a_death_that_one_met_is_not_handed_to_the_next(
    runtime: Runtime, episode: Episode
) -> None:
    config = SimulatorConfig(num_envs=4, envs_per_process=4)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        async with leases(pool, [episode(0), episode(1)]) as (leased, _):
            os.kill(leased.process.pid, signal.SIGKILL)
            assert isinstance(await outcome_of(leased), ActorDied)
            await run_episode(pool, episode(2))  # two seats were idle, over the dead process
            with pytest.raises(ActorDied):
                await leased.step(STILL)
        assert pool.metrics()["simulation/replaced/died"] == 1
        await asyncio.gather(*(run_episode(pool, episode(number)) for number in range(4)))
        assert pool.metrics()["simulation/idle"] == 4


async def test_a_worn_out_process_hands_over_slot_by_slot(
    runtime: Runtime, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_rl.env_workers.pool.available_mb", lambda: math.inf)
    config = SimulatorConfig(num_envs=3, envs_per_process=3, recycle_after_episodes=2)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        async with leases(pool, [episode(0)]) as (long,):
            old = long.process
            await run_episode(pool, episode(1))
            await run_episode(pool, episode(2))
            while (serving := await process_of_lease(pool, episode(3))) is old:
                pass
            assert (await long.step(STILL))[1] == 0.0  # the long episode goes on where it began
            async with leases(pool, [episode(4), episode(5)]) as envs:
                assert [env.process for env in envs] == [serving, serving]
            assert old.is_alive()
            await run_episode(pool, episode(6))
            assert len(pool.pids) == 1  # worn out too, but two processes to a bench are enough
        await until_gone(old.pid)
        assert pool.metrics()["simulation/replaced/died"] == 0
        async with leases(pool, [episode(number) for number in range(3)]) as envs:
            assert all(env.process is not old for env in envs)


async def test_without_room_for_two_a_worn_out_process_goes_with_its_last_episode(
    runtime: Runtime, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_rl.env_workers.pool.available_mb", lambda: 0.0)
    config = SimulatorConfig(num_envs=3, envs_per_process=3, recycle_after_episodes=1)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        async with leases(pool, [episode(0)]) as (long,):
            old = long.process
            await run_episode(pool, episode(1))
            waiting = asyncio.create_task(run_episode(pool, episode(2)))
            while pool.metrics()["simulation/waiting"] == 0:  # noqa: ASYNC110  # a turn of the loop at a time
                await asyncio.sleep(0)
            assert (await long.step(STILL))[1] == 0.0
            assert not waiting.done()
        await waiting
        assert old.pid not in pool.pids
        await until_gone(old.pid)


async def test_closing_one_environment_leaves_the_others_alone(
    runtime: Runtime, episode: Episode
) -> None:
    config = SimulatorConfig(num_envs=2, envs_per_process=2)
    async with asyncio.timeout(60), SimulatorPool(runtime, config) as pool:
        async with leases(pool, [episode(0), episode(1)]) as (one, other):
            await one.close()
            with pytest.raises(RuntimeError, match="was closed here"):
                await one.step(STILL)
            await other.step(STILL)
        await asyncio.gather(run_episode(pool, episode(0)), run_episode(pool, episode(1)))
        assert pool.metrics()["simulation/replaced/died"] == 0


SLOW_TO_RESET = """
import threading
import gymnasium
from vla_rl.envs.toy import ToyReachEnv

class SlowToReset(ToyReachEnv):
    def __init__(self, takes_s):
        super().__init__()
        self.takes_s = takes_s

    def reset(self, *, seed=None, options=None):
        threading.Event().wait(self.takes_s)
        return super().reset(seed=seed, options=options)

gymnasium.register(id="test/slow_to_reset-v0", entry_point="slow_to_reset:SlowToReset")
"""


async def test_the_clock_of_a_reset_does_not_run_while_another_one_is_at_work(
    runtime: Runtime, episode: Episode, import_folder: Path
) -> None:
    (import_folder / "slow_to_reset.py").write_text(SLOW_TO_RESET)

    async def reset_four(scale: float) -> None:
        config = SimulatorConfig(num_envs=4, envs_per_process=4, reset_timeout_s=1.2 * scale)
        kwargs = {"takes_s": 0.35 * scale}  # four of them take longer than the limit
        slow = [
            episode(number, "slow_to_reset:test/slow_to_reset-v0", **kwargs) for number in range(4)
        ]
        async with (
            asyncio.timeout(60),
            SimulatorPool(runtime, config) as pool,
            leases(pool, slow) as envs,
        ):
            assert [(await env.step(STILL))[2] for env in envs] == [False] * 4

    await at_some_pace(reset_four)


async def test_all_environments_of_a_process_are_closed_with_it(
    import_folder: Path, tmp_path: Path
) -> None:
    (import_folder / "tells_its_end.py").write_text(
        "from pathlib import Path\n"
        "import gymnasium\n"
        "from vla_rl.envs.toy import ToyReachEnv\n"
        "class TellsItsEnd(ToyReachEnv):\n"
        "    def __init__(self, file):\n"
        "        super().__init__()\n"
        "        self.file = file\n"
        "    def close(self):\n"
        "        Path(self.file).touch()\n"
        "        raise RuntimeError('closing went wrong')\n"
        "gymnasium.register(id='test/tells_its_end-v0', entry_point='tells_its_end:TellsItsEnd')\n"
    )
    files = [tmp_path / f"closed-{number}" for number in range(2)]
    async with asyncio.timeout(60), Runtime(name="test", stop_grace_s=30.0) as runtime:
        process = await SimulatorProcess.start_process(
            runtime, "two", SimulatorConfig(), num_envs=2
        )
        for simulator, file in zip(process.envs, files, strict=True):
            await simulator.build_env(
                EnvSpec(id="tells_its_end:test/tells_its_end-v0", kwargs={"file": str(file)})
            )
        await process.stop()
    assert [file.exists() for file in files] == [True, True]


async def process_of_lease(pool: SimulatorPool, spec: EpisodeSpec) -> SimulatorProcess:
    async with pool.lease(spec) as env:
        await env.reset()
        return env.process


UPDATES, GROUPS, GROUP_SIZE = 5, 2, 4
KILL_EVERY = 23
"""Decisions of the policy between two faults."""


class Striker:
    """A policy of the observation and the decision's seed alone, which strikes a process now and
    then.
    """

    weight_version = 0

    def __init__(self) -> None:
        self.pool: SimulatorPool | None = None
        self.num_decisions = self.num_strikes = 0
        self._dice = random.Random(5)

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        """Four rows of small moves."""
        self.num_decisions += 1
        if (
            self.pool is not None
            and self.num_decisions % KILL_EVERY == 0
            and (pids := self.pool.pids)
        ):
            # dead from a strike before, which no lease has met yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    self._dice.choice(pids), self._dice.choice((signal.SIGKILL, signal.SIGSTOP))
                )
                self.num_strikes += 1
        seen = int(observation["image"].sum()) % 97
        rows = (
            np.random.default_rng([sampling.seed % 2**32, seen])
            .uniform(-0.2, 0.2, (4, 7))
            .astype(np.float32)
        )
        numbers = np.zeros(4)
        return ActionChunk(
            actions=rows,
            tokens=numbers.astype(np.int64),
            log_probs=numbers.astype(np.float32),
            weight_version=0,
        )


async def train(runtime: Runtime, per_process: int, *, strikes: bool) -> tuple[list[bytes], int]:
    """What every update was made of, and how many processes were struck.

    The ledger is checked with every update.
    """
    simulators = SimulatorConfig(
        num_envs=6,
        envs_per_process=per_process,
        step_timeout_s=0.5 if strikes else 60.0,
        reset_timeout_s=2.0 if strikes else 60.0,
        max_restarts=1000,
    )
    spec = EnvSpec(id="vla_rl/toy_reach-v0", kwargs={"step_limit": 24})
    starts = [
        TaskStart(env=spec, task=f"start {i}", seed=i, options={"init_state_id": i})
        for i in range(5)
    ]
    config = SchedulerConfig(
        groups_per_update=GROUPS, max_staleness=0, deterministic=True, max_attempts=50
    )
    policy, digests = Striker(), []
    async with SimulatorPool(runtime, simulators, specs=[spec]) as pool:
        policy.pool = pool if strikes else None
        source = GroupSource(starts, GROUP_SIZE, 1)
        runner = LocalEpisodeRunner(pool, policy, embodied_agent)
        async with EpisodeScheduler(runner, source, config) as scheduler:
            for update in range(UPDATES):
                groups = [group async for group in scheduler.groups_for_update(update)]
                policy.weight_version = update + 1
                # raises ConservationError where an episode is lost or held twice
                scheduler.mark_trained(groups, update + 1)
                digests += [digest(group) for group in groups]
        num_replaced = sum(value for key, value in pool.metrics().items() if "/replaced/" in key)
        assert num_replaced > 0 if strikes else num_replaced == 0
    return digests, policy.num_strikes


def digest(group: Group) -> bytes:
    """Everything that was seen, done and earned, in order."""
    parts = [
        part
        for trajectory in group.trajectories
        for step in trajectory.steps
        for part in (step.observation["image"], step.chunk.actions, step.rewards)
    ]
    return b"".join(part.tobytes() for part in parts)


async def test_no_episode_is_lost_or_changed_where_processes_of_several_environments_are_killed(
    runtime: Runtime,
) -> None:
    async with asyncio.timeout(100):
        undisturbed, _ = await train(runtime, 1, strikes=False)
        assert len(undisturbed) == UPDATES * GROUPS
        packed, num_strikes = await train(runtime, 3, strikes=True)
    assert num_strikes >= 4
    assert packed == undisturbed
