"""Agents for tests that have to strike while an episode runs; other hosts import them by name."""

import asyncio

from vla_rl.rollout import embodied_agent
from vla_rl.types import Env, Policy, Trajectory


async def hesitant_agent(env: Env, policy: Policy) -> Trajectory:
    """Wait for a second, then act as ever."""
    await asyncio.sleep(1.0)
    return await embodied_agent(env, policy)
