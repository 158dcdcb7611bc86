"""Episodes on sleeping simulators: our scheduler compared with a vector of simulators in lockstep.

    python -m benchmarks.episode_scheduling

Simulators and policy sleep, so only scheduling is measured: a chunk takes a lognormal time of 10 ms
on average, an episode 20 chunks on average and 64 at most, the policy 20 ms and 0.5 ms per row. The
peer is a lockstep rollout: all simulators step together and every episode runs to the cap.

Keys of the last line: `vs_fixed_lockstep` and `vs_fixed_lockstep_32` (episodes/s of 16 and of 32
simulators over the peer's 16), `policy_busy` (share of the time), `needed_rows` (executed rows over
computed rows), and `deterministic_cost` (synchronous training over the same in deterministic mode,
whose batches have one row).
"""

import argparse
import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import uvloop

from benchmarks.interleaved import measure_in_turn, print_json_line, print_table
from vla_rl.rollout import (
    DynamicBatcher,
    EpisodeScheduler,
    GroupSource,
    LocalEpisodeRunner,
    SchedulerConfig,
    TaskStart,
    embodied_agent,
)
from vla_rl.types import (
    ActionChunk,
    ChunkOutcome,
    EnvSpec,
    EpisodeSpec,
    Info,
    Observation,
    Sampling,
)

Result = TypeVar("Result")

CALL_S, ROW_S = 0.020, 0.0005
CHUNK_MEAN_S, CHUNK_SIGMA = 0.010, 0.25
MAX_CHUNKS = 64
ROUNDS, SECONDS = 3, 8.0


def chunk_time_s(source: random.Random) -> float:
    """Draw the seconds that one simulator takes for one chunk."""
    return CHUNK_MEAN_S * source.lognormvariate(-(CHUNK_SIGMA**2) / 2, CHUNK_SIGMA)


def num_chunks(seed: int) -> int:
    """Draw the length of an episode: geometric, with the cap.

    A rate of 20.4 gives a mean of 20 under the cap of 64.
    """
    return min(MAX_CHUNKS, 1 + int(-math.log(1 - random.Random(seed).random()) * 20.4))


class SleepingEngine:
    """A policy whose batches take time and compute nothing."""

    weight_version = 0
    num_computed = 0

    def __init__(self, *, deterministic: bool) -> None:
        self.batcher: DynamicBatcher[Observation, ActionChunk] = DynamicBatcher(
            self._run_batch, max_batch=64, deterministic=deterministic
        )

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        return await self.batcher.submit(observation)

    async def _run_batch(self, requests: list[Observation]) -> list[ActionChunk]:
        await asyncio.sleep(CALL_S + ROW_S * len(requests))
        self.num_computed += len(requests)
        nothing = np.zeros(1, np.float32)
        chunk = ActionChunk(
            actions=np.zeros((1, 1), np.float32),
            tokens=np.zeros(1, np.int64),
            log_probs=nothing,
            weight_version=self.weight_version,
        )
        return [chunk] * len(requests)


class SleepingEnv:
    """A simulator that sleeps; the length of the episode follows from its policy seed."""

    def __init__(self, episode: EpisodeSpec, pool: "SleepingPool") -> None:
        self.episode, self._pool = episode, pool
        self._chunks_left = num_chunks(episode.policy_seed)

    async def reset(self) -> tuple[Observation, Info]:
        return {"state": np.zeros(1, np.float32)}, {}

    async def step(self, action: np.ndarray) -> tuple[Observation, float, bool, bool, Info]:
        outcome = await self.step_chunk(action[None])
        return (
            outcome.observation,
            float(outcome.rewards.sum()),
            outcome.terminated,
            outcome.truncated,
            outcome.info,
        )

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        self._pool.num_executed += 1
        await asyncio.sleep(chunk_time_s(self._pool.random))
        self._chunks_left -= 1
        return ChunkOutcome(
            observation={"state": np.zeros(1, np.float32)},
            rewards=np.zeros(1, np.float32),
            terminated=self._chunks_left == 0,
            truncated=False,
            info={},
        )


class SleepingPool:
    """A pool of any number of simulators."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs, self.num_executed, self.random = num_envs, 0, random.Random(0)

    @asynccontextmanager
    async def lease(self, episode: EpisodeSpec) -> AsyncIterator[SleepingEnv]:
        yield SleepingEnv(episode, self)


class Figures(NamedTuple):
    """The figures of one run of our scheduler."""

    episodes_per_s: float
    policy_busy: float
    needed_rows: float


async def fixed_lockstep(num_envs: int) -> float:
    """Measure episodes per second if all simulators step together and every episode runs to the
    cap.
    """
    source, clock = random.Random(0), asyncio.get_running_loop().time
    began = clock()
    for _ in range(MAX_CHUNKS):
        await asyncio.sleep(CALL_S + ROW_S * num_envs)
        await asyncio.gather(*(asyncio.sleep(chunk_time_s(source)) for _ in range(num_envs)))
    return num_envs / (clock() - began)


async def scheduled(num_envs: int) -> Figures:
    """Measure our scheduler after the first update, at most four updates ahead, with a learner that
    takes no time.
    """
    config = SchedulerConfig(groups_per_update=4, max_staleness=4)
    pool, engine, source = (
        SleepingPool(num_envs),
        SleepingEngine(deterministic=False),
        group_source(),
    )
    async with (
        engine.batcher,
        EpisodeScheduler(
            LocalEpisodeRunner(pool, engine, embodied_agent), source, config
        ) as scheduler,
    ):
        await one_update(scheduler, engine)
        scheduler.metrics()
        ends_at = asyncio.get_running_loop().time() + SECONDS
        while asyncio.get_running_loop().time() < ends_at:
            await one_update(scheduler, engine)
        rate = scheduler.metrics()["rollout/episodes_per_s"]
        for _ in range(3):
            await asyncio.sleep(0)  # let answers that were just given reach their simulators
        return Figures(
            rate, engine.batcher.batch_stats().busy_share, pool.num_executed / engine.num_computed
        )


async def synchronous(*, deterministic: bool) -> float:
    """Measure episodes per second of one synchronous update of 32 episodes."""
    config = SchedulerConfig(groups_per_update=8, max_staleness=0, deterministic=deterministic)
    pool, engine, clock = (
        SleepingPool(16),
        SleepingEngine(deterministic=deterministic),
        asyncio.get_running_loop().time,
    )
    async with (
        engine.batcher,
        EpisodeScheduler(
            LocalEpisodeRunner(pool, engine, embodied_agent), group_source(), config
        ) as scheduler,
    ):
        began = clock()
        num_episodes = await one_update(scheduler, engine)
        return num_episodes / (clock() - began)


async def one_update(scheduler: EpisodeScheduler, engine: SleepingEngine) -> int:
    """Collect the groups of an update and train on them in no time.

    Return the number of episodes.
    """
    groups = [group async for group in scheduler.groups_for_update(scheduler.version)]
    engine.weight_version = scheduler.version + 1
    scheduler.mark_trained(groups, engine.weight_version)
    return sum(len(group.trajectories) for group in groups)


def group_source() -> GroupSource:
    """Make a source of groups of four."""
    return GroupSource([TaskStart(env=EnvSpec(id="sleeping"), task="sleep")], 4, seed=0)


def main() -> None:
    """Measure all ways in turn and print their ratios."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    runs: dict[int, list[Figures]] = {16: [], 32: []}

    def ours(num_envs: int) -> Callable[[], float]:
        def run() -> float:
            runs[num_envs].append(on_uvloop(scheduled(num_envs)))
            return runs[num_envs][-1].episodes_per_s

        return run

    rates = measure_in_turn(
        {
            "fixed lockstep, 16 simulators": lambda: on_uvloop(fixed_lockstep(16)),
            "scheduler, 16 simulators": ours(16),
            "scheduler, 32 simulators": ours(32),
        },
        ROUNDS,
    )
    plain, deterministic = (
        on_uvloop(synchronous(deterministic=False)),
        on_uvloop(synchronous(deterministic=True)),
    )
    lockstep, with_16, with_32 = rates.values()
    figures = {
        "vs_fixed_lockstep": with_16 / lockstep,
        "vs_fixed_lockstep_32": with_32 / lockstep,
        "policy_busy": min(run.policy_busy for run in runs[16]),
        "needed_rows": min(run.needed_rows for run in runs[16] + runs[32]),
        "deterministic_cost": plain / deterministic,
    }
    rates |= {"synchronous, 16 simulators": plain, "synchronous and deterministic": deterministic}
    print_table("episodes per second, and ratios", {**rates, **figures})
    print_json_line(figures)


def on_uvloop(way: Coroutine[Any, Any, Result]) -> Result:
    """Run one way on a loop of its own."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(way)


if __name__ == "__main__":
    main()
