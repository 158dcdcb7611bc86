"""Agents of one's own, which other hosts import by name."""

import asyncio
from collections.abc import Mapping

import numpy as np

from vla_rl.rollout import copy_arrays, copy_chunk, embodied_agent, stop_reason
from vla_rl.types import Env, Policy, Step, Trajectory


async def hesitant_agent(env: Env, policy: Policy) -> Trajectory:
    """Wait for a second, then act as ever."""
    await asyncio.sleep(1.0)
    return await embodied_agent(env, policy)


async def by_turns(env: Env, policies: Mapping[str, Policy], *, first: str) -> Trajectory:
    """Let `first` and the other policy decide by turns until the episode ends."""
    names = [first, *sorted(policies.keys() - {first})]
    observation, _ = await env.reset()
    steps: list[Step] = []
    while True:
        agent, seen = names[len(steps) % len(names)], copy_arrays(observation)
        chunk = await policies[agent].act(seen)
        outcome = await env.step_chunk(chunk.actions)
        rewards = np.array(outcome.rewards)
        steps.append(Step(observation=seen, chunk=copy_chunk(chunk), rewards=rewards, agent=agent))
        if outcome.terminated or outcome.truncated:
            return Trajectory(
                episode=env.episode,
                steps=tuple(steps),
                final_observation=copy_arrays(outcome.observation),
                stop_reason=stop_reason(outcome.terminated, outcome.info),
                info=copy_arrays(outcome.info),
            )
        observation = outcome.observation
