"""Run the episodes of a list, each exactly once, as many at a time as there are simulators."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

import msgspec
import numpy as np

from vla_rl.rollout import (
    AnyEngine,
    Attempts,
    DecisionCounter,
    EpisodeLost,
    EpisodeRunner,
    embodied_agent,
    run_episode,
)
from vla_rl.types import (
    ActionChunk,
    Agent,
    Env,
    EnvPool,
    EpisodeSpec,
    Observation,
    Policy,
    Sampling,
    Trajectory,
)
from vla_rl.util.tasks import leave_group


async def run_each(
    pool: EnvPool,
    engine: AnyEngine,
    agent: Agent,
    episodes: Iterable[EpisodeSpec],
    done: Callable[[Trajectory], Awaitable[None]],
    *,
    max_attempts: int = 3,
) -> None:
    """Run every episode to its end and pass each trajectory to `done`, in the order in which they
    end.

    An episode whose simulator died or froze is run again from the same start with the same seeds. A
    trajectory is dropped when `done` returns, and no new episode starts on a simulator before that.

    Raises: EpisodeLost if one was lost `max_attempts` times; what the agent, the environment or
    `done` raises.
    """

    counter = DecisionCounter()  # one for all episodes, so that a warning comes once

    async def run_once(episode: EpisodeSpec) -> Trajectory:
        return await run_episode(pool, engine, agent, episode, counter=counter)

    await _run_all(run_once, pool.num_envs, episodes, done, Attempts(max_attempts))


async def run_each_on_hosts(
    runner: EpisodeRunner,
    episodes: Iterable[EpisodeSpec],
    done: Callable[[Trajectory], Awaitable[None]],
    *,
    max_attempts: int = 3,
) -> None:
    """Run every episode on other hosts, as `run_each` does here; trajectories come whole."""

    async def run_once(episode: EpisodeSpec) -> Trajectory:
        return await runner.materialise(await runner.run_episode(episode))

    await _run_all(run_once, runner.num_slots, episodes, done, Attempts(max_attempts))


async def _run_all(
    run_once: Callable[[EpisodeSpec], Awaitable[Trajectory]],
    num_slots: int,
    episodes: Iterable[EpisodeSpec],
    done: Callable[[Trajectory], Awaitable[None]],
    attempts: Attempts,
) -> None:
    waiting = iter(episodes)
    tasks = asyncio.TaskGroup()
    await tasks.__aenter__()
    for number in range(num_slots):
        tasks.create_task(_run_on(run_once, waiting, done, attempts), name=f"runner {number}")
    first: Exception | None = None
    try:
        await leave_group(tasks, None, None, None)
    except ExceptionGroup as errors:
        # one error is raised, because a caller that handles EpisodeLost would not see it in a group
        first, *others = errors.exceptions
        for other in others:
            first.add_note(f"another episode failed too: {type(other).__name__}: {other}")
    if first is not None:
        raise first  # raised here, so that it keeps its own cause


async def _run_on(
    run_once: Callable[[EpisodeSpec], Awaitable[Trajectory]],
    waiting: Iterator[EpisodeSpec],
    done: Callable[[Trajectory], Awaitable[None]],
    attempts: Attempts,
) -> None:
    for episode in waiting:
        await done(await _run_episode(run_once, episode, attempts))
        # a million episodes would otherwise leave a million counters behind
        attempts.forget_episode(episode.episode_id)


async def _run_episode(
    run_once: Callable[[EpisodeSpec], Awaitable[Trajectory]],
    episode: EpisodeSpec,
    attempts: Attempts,
) -> Trajectory:
    while True:
        try:
            return await run_once(episode)
        except EpisodeLost as loss:
            if not attempts.allow(loss):
                raise
            # the seeds stay: a lost episode is run again from the same start and ends alike
            episode = msgspec.structs.replace(episode, attempt=episode.attempt + 1)


def within_range(agent: Agent) -> Agent:
    """Return the agent with its policy's actions clipped to -1 and 1, as LIBERO's controller does,
    because a continuous head may go beyond. Tokens and log-probs do not change."""

    async def run_agent(env: Env, policy: Policy) -> Trajectory:
        return await agent(env, _ClippedPolicy(policy))

    return run_agent


async def embodied_agent_within_range(env: Env, policy: Policy) -> Trajectory:
    """Run `embodied_agent` within that range: an agent that another host imports by its name."""
    return await within_range(embodied_agent)(env, policy)


class _ClippedPolicy:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        chunk = await self._policy.act(observation, sampling)
        return msgspec.structs.replace(chunk, actions=np.clip(chunk.actions, -1.0, 1.0))
