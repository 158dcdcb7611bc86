"""Agents: how one episode is run, what has to come out of it.

`async def agent(env, policy) -> Trajectory` is the whole custom-agent API. An agent gets one environment,
leased for one episode, and a policy bound to that episode. It may call several policies, think between
steps, or step the environment row by row. It returns the record to train on, which is checked at once:
the learner would fail at a wrong one minutes later, without its name, or train on it. Numbers of a whole
episode are checked together, a microsecond or two a decision; only a trajectory with a fault is searched
for it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from vla_rl.errors import AgentError
from vla_rl.types import (
    MAX_LOG_PROB,
    ActionChunk,
    Env,
    Info,
    Observation,
    Policy,
    Step,
    StopReason,
    Trajectory,
)
from vla_rl.util.values import excerpt


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
        # The copy before the policy gets it: a policy may keep what it saw, and the simulator's
        # memory is written again while it decides.
        observed: Observation = copy_arrays(observation)
        chunk = await policy.act(observed)
        outcome = await env.step_chunk(chunk.actions, frames_every=frames_every)
        steps.append(
            Step(
                observation=observed,
                chunk=copy_chunk(chunk),
                rewards=np.array(outcome.rewards),
                frames=copy_arrays(outcome.frames),
                frames_key=outcome.frames_key,
            )
        )
        if outcome.terminated or outcome.truncated:
            return Trajectory(
                episode=env.episode,
                steps=tuple(steps),
                final_observation=copy_arrays(outcome.observation),
                stop_reason=stop_reason(outcome.terminated, outcome.info),
                info=copy_arrays(outcome.info),
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


def copy_arrays(value: Any) -> Any:
    """Copy every array in `value`.

    Dicts, lists and tuples are rebuilt around the copies, all else is shared.
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: copy_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [copy_arrays(item) for item in value]
    if isinstance(value, tuple):
        return tuple(copy_arrays(item) for item in value)
    return value


def copy_chunk(chunk: ActionChunk) -> ActionChunk:
    """Copy the arrays of `chunk`, so that one row does not keep its whole batch alive."""
    return msgspec.structs.replace(
        chunk,
        actions=np.array(chunk.actions),
        tokens=np.array(chunk.tokens),
        log_probs=np.array(chunk.log_probs),
        weight_versions=None if chunk.weight_versions is None else np.array(chunk.weight_versions),
        drawn=copy_arrays(chunk.drawn),
    )


def describe_value(value: Any) -> str:
    """Return a value with its type, short enough for an error."""
    return "None" if value is None else f"a {type(value).__name__} {excerpt(value)}"


KnownTokens = Callable[[str], "range | None"]
"""Returns the ids of the tokens that the policy of an agent chooses from; None if they are not known.

Raises: KeyError for an agent without a policy."""


def check_trajectory(trajectory: Trajectory, described: str) -> None:
    """Raise AgentError unless a trajectory has a reason of its end, an info and Steps.

    Args:
        trajectory: what an agent returned.
        described: its episode in words.
    """
    if not isinstance(trajectory.stop_reason, StopReason):
        raise AgentError(
            f"the agent returned a Trajectory with stop_reason={trajectory.stop_reason!r} for "
            f"{described}, expected a StopReason, such as `stop_reason(outcome.terminated, "
            "outcome.info)` gives"
        )
    if not isinstance(trajectory.info, dict):
        raise AgentError(
            f"the agent returned a Trajectory with info={describe_value(trajectory.info)} for {described}, "
            "expected a dict"
        )
    wrong = next((step for step in trajectory.steps if not isinstance(step, Step)), None)
    if wrong is not None:
        raise AgentError(
            f"the agent returned {describe_value(wrong)} among the steps of {described}, expected Steps"
        )


def check_decisions(trajectory: Trajectory, described: str, known_tokens: KnownTokens) -> None:
    """Raise AgentError, naming episode, decision and field, unless a trajectory can be trained on.

    Args: as above; `known_tokens`, the token ids of the policies.
    """
    # Almost every trajectory has none: checked together, that costs a microsecond or two a
    # decision.
    if _has_no_fault(trajectory, known_tokens):
        return
    for number, step in enumerate(trajectory.steps):
        for problem in _find_faults(step, known_tokens):
            raise AgentError(
                f"the agent returned a Trajectory whose decision {number} has {problem}, in "
                f"{described}"
            )


def _has_no_fault(trajectory: Trajectory, known_tokens: KnownTokens) -> bool:
    """Return whether no decision has a fault; False also where one must be looked at alone."""
    rewards, log_probs, tokens = [], [], []
    agents = set()
    steps: tuple[Any, ...] = trajectory.steps  # an agent may have put anything into their fields
    try:
        for step in steps:
            chunk = step.chunk
            num_rows, num_rewards, num_tokens = (
                len(chunk.actions),
                len(step.rewards),
                len(chunk.tokens),
            )
            if not (
                isinstance(step.rewards, np.ndarray)
                and isinstance(chunk.tokens, np.ndarray)
                and isinstance(chunk.log_probs, np.ndarray)
            ):
                return False
            if (
                not 1 <= num_rewards <= num_rows
                or num_tokens < num_rows
                or num_tokens % num_rows
                or len(chunk.log_probs) != num_tokens
                or type(chunk.weight_version) is not int
                or chunk.weight_version < 0
                or (chunk.weight_versions is not None and len(chunk.weight_versions) != num_tokens)
                or (chunk.temperature is not None and not 0.0 < chunk.temperature < np.inf)
                or (chunk.drawn is not None and not _are_arrays(chunk.drawn))
                or next(_find_expert_faults(step), None) is not None
            ):
                return False
            agents.add(step.agent)
            rewards.append(step.rewards)
            log_probs.append(chunk.log_probs)
            tokens.append(chunk.tokens)
        earned, chosen, logs = (
            np.concatenate(rewards),
            np.concatenate(tokens),
            np.concatenate(log_probs),
        )
        if {earned.ndim, chosen.ndim, logs.ndim} != {1} or logs.dtype.kind != "f":
            return False
        # Concatenated, whole numbers beside floats would become floats, and their range would not
        # be checked.
        if len({each.dtype.kind for each in tokens}) > 1:
            return False
        if not (np.isfinite(earned).all() and np.isfinite(logs).all()):
            return False
        if chosen.dtype.kind == "f":
            return bool(np.isfinite(chosen).all())
        if chosen.dtype.kind not in "iu" or logs.max() > MAX_LOG_PROB:
            return False
        known = [ids for agent in agents if (ids := known_tokens(agent)) is not None]
        return not known or bool(
            chosen.min() >= max(ids.start for ids in known)
            and chosen.max() < min(ids.stop for ids in known)
        )
    except (TypeError, ValueError, AttributeError, KeyError):
        return False  # a field is no array, or of another shape, or an agent has no policy


def _find_faults(step: Step, known_tokens: KnownTokens) -> Iterator[str]:
    """Yield what is wrong with a decision, and what was expected."""
    chunk: Any = step.chunk
    if not isinstance(chunk, ActionChunk):
        yield f"chunk={describe_value(chunk)}, expected the ActionChunk that the policy gave"
        return
    if (
        not isinstance(chunk.actions, np.ndarray)
        or not chunk.actions.ndim
        or not len(chunk.actions)
    ):
        yield f"chunk.actions of {_describe_shape(chunk.actions)}, expected an array [H, D]"
        return
    horizon = len(chunk.actions)
    yield from _find_array_faults("rewards", step.rewards, "biuf")
    if not 1 <= len(step.rewards) <= horizon:
        yield (
            f"{len(step.rewards)} rewards for {horizon} control steps, expected one for each that "
            f"ran, 1 to {horizon}"
        )
    try:
        known = known_tokens(step.agent)
    except KeyError:
        yield f"agent={step.agent!r}, expected the name of an agent that has a policy"
        return
    yield from _find_token_faults(chunk, horizon, known)
    # Only tokens of control steps that ran are trained on; the rest of a chunk may have log-probs
    # of anything.
    executed = len(step.rewards) * (len(chunk.tokens) // horizon)
    yield from _find_log_prob_faults(chunk, executed)
    version: Any = chunk.weight_version
    if isinstance(version, bool) or not isinstance(version, int | np.integer) or version < 0:
        yield f"chunk.weight_version={describe_value(version)}, expected the number of updates, at least 0"
    if chunk.weight_versions is not None:
        yield from _find_array_faults("chunk.weight_versions", chunk.weight_versions, "iu")
        if len(chunk.weight_versions) != len(chunk.tokens):
            yield (
                f"{len(chunk.weight_versions)} chunk.weight_versions for {len(chunk.tokens)} "
                "tokens, expected one for each"
            )
    if chunk.temperature is not None and not 0.0 < chunk.temperature < np.inf:
        yield f"chunk.temperature={chunk.temperature!r}, expected a finite number above 0"
    if chunk.drawn is not None and not _are_arrays(chunk.drawn):
        yield f"chunk.drawn={describe_value(chunk.drawn)}, expected a dict of arrays of finite numbers, or None"
    yield from _find_expert_faults(step)


def _find_expert_faults(step: Step) -> Iterator[str]:
    intervened: Any = step.intervened
    if intervened is not None and not (
        isinstance(intervened, np.ndarray)
        and intervened.dtype == np.bool_
        and intervened.shape == step.rewards.shape
    ):
        yield (
            f"intervened of {_describe_shape(intervened)}, expected bool [{len(step.rewards)}], one "
            "for each control step that ran, or None"
        )
    labels: Any = step.expert_actions
    if labels is None:
        return
    if not (
        isinstance(labels, np.ndarray)
        and labels.dtype == np.float32
        and labels.shape == step.chunk.actions.shape
    ):
        yield (
            f"expert_actions of {_describe_shape(labels)}, expected float32 "
            f"{list(step.chunk.actions.shape)} like chunk.actions, or None"
        )
    elif not np.isfinite(labels).all():
        row = int(np.argwhere(~np.isfinite(labels))[0][0])
        yield f"expert_actions[{row}]={labels[row].tolist()}, expected finite numbers"


def _are_arrays(drawn: Any) -> bool:
    return isinstance(drawn, dict) and all(
        isinstance(name, str)
        and isinstance(values, np.ndarray)
        and values.dtype.kind in "biuf"
        and bool(np.isfinite(values).all())
        for name, values in drawn.items()
    )


def _find_token_faults(chunk: Any, horizon: int, known: "range | None") -> Iterator[str]:
    yield from _find_array_faults("chunk.tokens", chunk.tokens, "iuf")
    if not len(chunk.tokens) or len(chunk.tokens) % horizon:
        yield (
            f"{len(chunk.tokens)} tokens for {horizon} control steps, expected the same number for "
            "each"
        )
    if chunk.tokens.dtype.kind == "f":
        return
    if known is None:
        return
    wrong = (chunk.tokens < known.start) | (chunk.tokens >= known.stop)
    if wrong.any():
        index = int(np.argmax(wrong))
        yield (
            f"chunk.tokens[{index}]={int(chunk.tokens[index])}, expected an id that its policy "
            f"chooses, {known.start} to {known.stop - 1}"
        )


def _find_log_prob_faults(chunk: Any, executed: int) -> Iterator[str]:
    yield from _find_array_faults("chunk.log_probs", chunk.log_probs, "f", of_executed=executed)
    if len(chunk.log_probs) != len(chunk.tokens):
        yield (
            f"{len(chunk.log_probs)} chunk.log_probs for {len(chunk.tokens)} tokens, expected one "
            "for each"
        )
    if chunk.tokens.dtype.kind != "f":
        wrong = chunk.log_probs[:executed] > MAX_LOG_PROB
        if wrong.any():
            index = int(np.argmax(wrong))
            yield (
                f"chunk.log_probs[{index}]={float(chunk.log_probs[index])!r}, expected natural "
                "logs of probabilities, at most 0"
            )


def _find_array_faults(
    field: str, value: Any, kinds: str, *, of_executed: int | None = None
) -> Iterator[str]:
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kinds:
        words = {"b": "bools", "i": "integers", "u": "integers", "f": "floats"}
        expected = " or ".join(dict.fromkeys(words[kind] for kind in kinds))
        yield f"{field} of {_describe_shape(value)}, expected an array of {expected} with one axis"
        return
    finite = np.isfinite(value[:of_executed])
    if not finite.all():
        index = int(np.argmin(finite))
        yield f"{field}[{index}]={float(value[index])!r}, expected a finite number"


def _describe_shape(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {list(value.shape)}"
    return describe_value(value)
