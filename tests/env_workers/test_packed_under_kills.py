"""The scheduler over processes with several environments each, while these are killed and frozen:
nothing is lost.
"""

import asyncio
import contextlib
import os
import random
import signal

import numpy as np

from vla_rl.actors import Runtime
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.rollout import (
    EpisodeScheduler,
    GroupSource,
    LocalEpisodeRunner,
    SchedulerConfig,
    TaskStart,
    embodied_agent,
)
from vla_rl.types import ActionChunk, EnvSpec, Group, Observation, Sampling

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
