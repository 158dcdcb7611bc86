"""Agents: how one episode is played. `async def agent(env, policy) -> Trajectory` is the whole custom-agent API.

An agent is handed one environment, leased for one episode, and a policy bound to that episode. It may call several
policies, think between steps, or drive the environment row by row; what it returns is the record to train on.
"""

from typing import Any

import msgspec
import numpy as np

from vla_rl.types import ActionChunk, Env, Info, Observation, Policy, Step, StopReason, Trajectory


async def embodied_agent(env: Env, policy: Policy, *, frames_every: int | None = None) -> Trajectory:
    """Look, choose an action chunk, run it open loop, and look again, until the episode ends.

    `functools.partial(embodied_agent, frames_every=8)` is an agent that also keeps a picture of every 8th control step in
    `Step.frames`, for rewards and videos that look at more than the policy does.

    Observations may be views into memory that the next step overwrites, so each is copied once, before the policy sees it:
    the trajectory owns all its arrays, and nothing of the environment's is held while it moves.
    """
    observation, _ = await env.reset()
    steps: list[Step] = []
    while True:
        seen: Observation = owned_copy(observation)
        chunk = await policy.act(seen)
        outcome = await env.step_chunk(chunk.actions, frames_every=frames_every)
        steps.append(
            Step(
                observation=seen,
                chunk=owned_chunk(chunk),
                rewards=np.array(outcome.rewards),
                frames=owned_copy(outcome.frames),
                frames_key=outcome.frames_key,
            )
        )
        if outcome.terminated or outcome.truncated:
            return Trajectory(
                episode=env.episode,
                steps=tuple(steps),
                final_observation=owned_copy(outcome.observation),
                stop_reason=stop_reason(outcome.terminated, outcome.info),
                info=owned_copy(outcome.info),
            )
        observation = outcome.observation


def stop_reason(terminated: bool, info: Info) -> StopReason:
    """Why an episode that has ended did so.

    Args:
        terminated: whether the task itself ended it, at a time limit's very step too; otherwise the limit did.
        info: of the last step. Without the key `is_success` the task is not taken for solved.

    Returns: `SUCCESS` or `TERMINATED` where the task ended it; `SUCCESS_AT_LIMIT` or `TIME_LIMIT`, which are cut off, where
        the limit did.
    """
    if info.get("is_success", False):
        return StopReason.SUCCESS if terminated else StopReason.SUCCESS_AT_LIMIT
    return StopReason.TERMINATED if terminated else StopReason.TIME_LIMIT


def owned_copy(value: Any) -> Any:
    """`value` with every array in it copied; dicts, lists and tuples are rebuilt around them, the rest is shared."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: owned_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [owned_copy(item) for item in value]
    if isinstance(value, tuple):
        return tuple(owned_copy(item) for item in value)
    return value


def owned_chunk(chunk: ActionChunk) -> ActionChunk:
    """`chunk` with arrays of its own, so that keeping one row does not keep the whole batch it was computed in."""
    return msgspec.structs.replace(
        chunk,
        actions=np.array(chunk.actions),
        tokens=np.array(chunk.tokens),
        log_probs=np.array(chunk.log_probs),
        weight_versions=None if chunk.weight_versions is None else np.array(chunk.weight_versions),
    )
