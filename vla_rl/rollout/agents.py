"""Agents: how one episode is run.

`async def agent(env, policy) -> Trajectory` is the whole custom-agent API.

An agent gets one environment, leased for one episode, and a policy bound to that episode. It may
call several policies, think between steps, or step the environment row by row. It returns the
record to train on.
"""

from typing import Any

import msgspec
import numpy as np

from vla_rl.types import ActionChunk, Env, Info, Observation, Policy, Step, StopReason, Trajectory


async def embodied_agent(
    env: Env, policy: Policy, *, frames_every: int | None = None
) -> Trajectory:
    """Observe, choose an action chunk, run it open loop, and repeat until the episode ends.

    `functools.partial(embodied_agent, frames_every=8)` also stores a frame of every 8th control
    step in `Step.frames`, for rewards and videos that need more frames than the policy.

    Observations may be views into memory that the next step overwrites, so each is copied once,
    before the policy gets it. The trajectory owns all its arrays and holds no memory of the
    environment.
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
    """Return why an episode ended.

    Args:
        terminated: whether the task ended it, even if at the very step of a time limit; False if
            the limit ended it.
        info: the info of the last step. Without the key `is_success` the task counts as not solved.

    Returns: `SUCCESS` or `TERMINATED` if the task ended it; `SUCCESS_AT_LIMIT` or `TIME_LIMIT`,
        which count as cut off, if the limit did.
    """
    if info.get("is_success", False):
        return StopReason.SUCCESS if terminated else StopReason.SUCCESS_AT_LIMIT
    return StopReason.TERMINATED if terminated else StopReason.TIME_LIMIT


def owned_copy(value: Any) -> Any:
    """Copy every array in `value`.

    Dicts, lists and tuples are rebuilt around the copies, all else is shared.
    """
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
    """Copy the arrays of `chunk`, so that one row does not keep its whole batch alive."""
    return msgspec.structs.replace(
        chunk,
        actions=np.array(chunk.actions),
        tokens=np.array(chunk.tokens),
        log_probs=np.array(chunk.log_probs),
        weight_versions=None if chunk.weight_versions is None else np.array(chunk.weight_versions),
    )
