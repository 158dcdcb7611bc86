"""Small real environments, pools and engines for the scheduler; what they do takes time on the
loop's clock.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import numpy as np

from vla_rl.errors import ActorDied, ActorFrozen
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
    Agent,
    ChunkOutcome,
    EnvSpec,
    EpisodeSpec,
    Group,
    Info,
    Observation,
    Sampling,
    Step,
    StopReason,
    Trajectory,
    derive_seed,
)

TOKENS = np.zeros(2, dtype=np.int64)
LOG_PROBS = np.zeros(2, dtype=np.float32)
REWARDS = np.zeros(2, dtype=np.float32)


class CountingEngine:
    """Answers with an action computed from the observation, the decision's seed and the weight
    version alone.
    """

    def __init__(
        self,
        *,
        max_batch: int = 16,
        call_s: float = 0.02,
        row_s: float = 0.0005,
        deterministic: bool = False,
    ):
        self.weight_version = 0
        self.call_s, self.row_s = call_s, row_s
        self.failure: Exception | None = None
        self.batcher: DynamicBatcher[tuple[Observation, Sampling], ActionChunk] = DynamicBatcher(
            self._run_batch, max_batch=max_batch, deterministic=deterministic
        )

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        return await self.batcher.submit((observation, sampling))

    async def _run_batch(self, requests: list[tuple[Observation, Sampling]]) -> list[ActionChunk]:
        await asyncio.sleep(self.call_s + self.row_s * len(requests))
        if self.failure is not None:
            raise self.failure
        return [self._chunk(observation, sampling) for observation, sampling in requests]

    def _chunk(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        number = (
            sampling.seed // 7 + int(observation["state"][0]) * 31 + self.weight_version
        ) % 1009
        actions = np.full((2, 1), number, dtype=np.float32)
        return ActionChunk(
            actions=actions, tokens=TOKENS, log_probs=LOG_PROBS, weight_version=self.weight_version
        )


class Faults(NamedTuple):
    """Chances per lease."""

    death: float = 0.0
    freeze: float = 0.0
    slow: float = 0.0


class CountdownEnv:
    """An episode whose length and success follow from its seed and its actions.

    Every step takes its time.
    """

    def __init__(
        self, episode: EpisodeSpec, pool: "LatencyPool", fault: str, fault_step: int
    ) -> None:
        self.episode = episode
        self._pool, self._fault, self._fault_step = pool, fault, fault_step
        self._state = episode.seed % 1009
        self._num_steps = 0
        self._slowdown = 30.0 if fault == "slow" else 1.0

    async def reset(self) -> tuple[Observation, Info]:
        await asyncio.sleep(self._pool.step_s() * self._slowdown)
        return {"state": np.array([self._state], dtype=np.float32)}, {}

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
        if self._num_steps == self._fault_step:
            if self._fault == "death":
                raise ActorDied("env-0", 4711, "SIGKILL", ["a last word"])
            if self._fault == "freeze":
                await asyncio.sleep(self._pool.deadline_s)
                raise ActorFrozen("env-0", 4711, f"no answer for {self._pool.deadline_s} s")
        await asyncio.sleep(self._pool.step_s() * self._slowdown)
        self._num_steps += 1
        self._state = (self._state * 17 + int(actions[0, 0])) % 1009
        solved = self._state % self._pool.solve_every == 0
        truncated = self._num_steps >= self._pool.max_chunks
        return ChunkOutcome(
            observation={"state": np.array([self._state], dtype=np.float32)},
            rewards=REWARDS,
            terminated=solved,
            truncated=truncated and not solved,
            info={"is_success": solved},
        )


class LatencyPool:
    """Environments with random latencies.

    Faults strike leases at random, and the slot is fresh afterwards.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        seed: int = 0,
        mean_s: float = 0.01,
        max_chunks: int = 8,
        solve_every: int = 3,
        faults: Faults | None = None,
        deadline_s: float = 5.0,
    ) -> None:
        self.num_envs, self.max_chunks, self.solve_every, self.deadline_s = (
            num_envs,
            max_chunks,
            solve_every,
            deadline_s,
        )
        self.max_leased = self.num_leased = self.num_leases = 0
        self._random = random.Random(derive_seed(seed, "pool"))
        self._latencies = [self._random.lognormvariate(-0.125, 0.5) * mean_s for _ in range(10_007)]
        self._index = 0
        self.slowness = 1.0
        self._faults = faults if faults is not None else Faults()

    def step_s(self) -> float:
        self._index = (self._index + 1) % len(self._latencies)
        return self.slowness * self._latencies[self._index]

    @asynccontextmanager
    async def lease(self, episode: EpisodeSpec) -> AsyncIterator[CountdownEnv]:
        self.num_leased += 1
        self.num_leases += 1
        self.max_leased = max(self.max_leased, self.num_leased)
        assert self.num_leased <= self.num_envs
        fault = self._draw_fault()
        try:
            yield CountdownEnv(episode, self, fault, self._random.randrange(3) if fault else -1)
        finally:
            self.num_leased -= 1

    def _draw_fault(self) -> str:
        chance = self._random.random()
        for name, share in self._faults._asdict().items():
            if chance < share:
                return name
            chance -= share
        return ""


def starts(count: int) -> list[TaskStart]:
    """Starts that differ in their seed; start i is `task-i`."""
    return [
        TaskStart(env=EnvSpec(id="fake-v0"), task=f"task-{i}", seed=i, options={"i": i})
        for i in range(count)
    ]


def source(count: int = 10, group_size: int = 4, seed: int = 0) -> GroupSource:
    return GroupSource(starts(count), group_size, seed)


def finished(episode: EpisodeSpec) -> Trajectory:
    """A trajectory of one decision, for what looks at neither."""
    chunk = ActionChunk(
        actions=np.zeros((1, 1), np.float32),
        tokens=np.zeros(1, np.int64),
        log_probs=np.zeros(1, np.float32),
        weight_version=0,
    )
    step = Step(observation={}, chunk=chunk, rewards=np.zeros(1, np.float32))
    return Trajectory(
        episode=episode, steps=(step,), final_observation={}, stop_reason=StopReason.SUCCESS
    )


def group_of(group_id: int) -> Group:
    """A complete group without members, for what looks at ids alone."""
    return Group(group_id=group_id, trajectories=(), dispatch_version=0)


class Setup:
    """A scheduler of 2 groups of 4 per update on 4 environments, and what it is made of."""

    def __init__(
        self,
        *,
        pool: LatencyPool | None = None,
        agent: Agent = embodied_agent,
        keep: object = None,
        on_episode: object = None,
        num_updates: int | None = None,
        **settings: object,
    ) -> None:
        self.pool = pool if pool is not None else LatencyPool(4)
        self.engine = CountingEngine()
        config = SchedulerConfig(**{"groups_per_update": 2, "max_staleness": 1, **settings})
        self.scheduler = EpisodeScheduler(
            LocalEpisodeRunner(self.pool, self.engine, agent),
            source(),
            config,
            keep=keep,
            on_episode=on_episode,
            num_updates=num_updates,
        )

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[EpisodeScheduler]:
        async with asyncio.timeout(3600), self.engine.batcher, self.scheduler:
            yield self.scheduler

    async def collect(self, update: int) -> list[Group]:
        return [group async for group in self.scheduler.groups_for_update(update)]

    async def update(self) -> list[Group]:
        version = self.scheduler.version
        groups = await self.collect(version)
        self.engine.weight_version = version + 1
        self.scheduler.mark_trained(groups, version + 1)
        return groups


def fingerprint(groups: list[Group]) -> str:
    """A digest of everything a learner reads, in the order in which it reads it."""
    digest = hashlib.sha256()
    for group in groups:
        for trajectory in group.trajectories:
            spec = trajectory.episode
            digest.update(
                repr(
                    (spec.episode_id, spec.seed, spec.policy_seed, trajectory.stop_reason)
                ).encode()
            )
            for step in trajectory.steps:
                arrays = (
                    step.observation["state"],
                    step.chunk.actions,
                    step.chunk.tokens,
                    step.chunk.log_probs,
                )
                digest.update(
                    b"".join(
                        np.ascontiguousarray(array).tobytes() for array in (*arrays, step.rewards)
                    )
                )
                digest.update(str(step.chunk.weight_version).encode())
    return digest.hexdigest()
