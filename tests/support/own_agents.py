"""Agents of one's own, which other hosts import by name."""

import asyncio
from collections.abc import Mapping

import numpy as np

from vla_rl.rollout import embodied_agent, owned_chunk, owned_copy, stop_reason
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
        agent, seen = names[len(steps) % len(names)], owned_copy(observation)
        chunk = await policies[agent].act(seen)
        outcome = await env.step_chunk(chunk.actions)
        rewards = np.array(outcome.rewards)
        steps.append(Step(observation=seen, chunk=owned_chunk(chunk), rewards=rewards, agent=agent))
        if outcome.terminated or outcome.truncated:
            return Trajectory(
                episode=env.episode,
                steps=tuple(steps),
                final_observation=owned_copy(outcome.observation),
                stop_reason=stop_reason(outcome.terminated, outcome.info),
                info=owned_copy(outcome.info),
            )
        observation = outcome.observation
