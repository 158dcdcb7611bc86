"""Experts that an agent may let act, and may ask what they would have done.

    SuggestedExpert    the scripted expert of an environment `vla_rl/<suite>-expert-v0`, one control step at a time
    PolicyExpert       another policy, in this process or behind a policy server, one chunk at a time

A person at a robot is one more: an object with `act` that waits for the person's device. Whether an expert
acts at a decision is another question (`expert_agent.Takeover`), which a person may answer too.
"""

from typing import Any, Final, Protocol

import numpy as np

from vla_rl.errors import ActorDied, AgentError, VlaRlError
from vla_rl.rollout.agents import describe_value
from vla_rl.rollout.engines import ActionEngine
from vla_rl.types import Observation, Sampling
from vla_rl.util.tasks import TookTooLong, limit_time

SUGGESTION_KEY: Final = "expert_action"
"""Observation key of a scripted expert's action, float32 [D]."""


class ExpertFailed(ActorDied):
    """An expert that raised an error, or did not answer in time.

    The episode counts as lost, and is run again; if it is lost as often as the scheduler allows, the run
    ends with this error, after it has saved what it learnt.
    """

    def __init__(self, name: str, cause: str) -> None:
        super().__init__(name, 0, cause)
        self.args = (f"expert {name}: {cause}",)


class Expert(Protocol):
    """Something that knows what to do in any state of the environment."""

    async def act(self, observation: Observation) -> np.ndarray:
        """Return the next control steps from this observation on.

        Args:
            observation: that of the environment, suggestions included.

        Returns: [K, D], K >= 1, in the environment's units; the rows after the first are run, and taken as
            labels, without another question.
        """
        ...


class SuggestedExpert:
    """Follows the scripted expert that an environment has."""

    async def act(self, observation: Observation) -> np.ndarray:
        """Return the suggested control steps, float32 [K, D]. Raises: AgentError without any."""
        suggestion = observation.get(SUGGESTION_KEY)
        if not isinstance(suggestion, np.ndarray):
            raise AgentError(
                f"the observation has {sorted(observation)}, expected {SUGGESTION_KEY!r}; use an environment "
                "with suggestions, such as vla_rl/libero_object-expert-v0"
            )
        return np.atleast_2d(suggestion)


class PolicyExpert:
    """Asks another policy for its greedy chunk, which it need not act out to label a state.

    Args:
        engine: the policy: a `TorchActionEngine`, a `RemotePolicyServer`, or an engine of your own.
    """

    def __init__(self, engine: ActionEngine) -> None:
        self._engine = engine

    async def act(self, observation: Observation) -> np.ndarray:
        """Return the policy's chunk, float32 [H, D]."""
        # greedy: a label is the best that it knows, and the same whenever it is asked again
        seen = remove_suggestion(observation)
        chunk = await self._engine.act(seen, Sampling(greedy=True))
        return chunk.actions


def remove_suggestion(observation: Observation) -> Observation:
    """Return an observation as a policy may see it, without what an expert suggests."""
    return {name: value for name, value in observation.items() if name != SUGGESTION_KEY}


async def ask_expert(
    expert: Expert, observation: Observation, action_size: int, timeout_s: float | None
) -> np.ndarray:
    """Return what an expert would do, float32 [K, D].

    Args:
        expert: the expert.
        observation: that of the environment.
        action_size: numbers of a control step, D.
        timeout_s: most seconds for the answer; None: no limit.

    Raises: ExpertFailed if it raises an error or is late, so that the episode is run again; AgentError for an
        answer of another width or with NaN, which another try would not change; errors of vla_rl as they are.
    """
    name = type(expert).__name__
    try:
        answer: Any = await limit_time(timeout_s, expert.act(observation))
    except TookTooLong as error:
        raise ExpertFailed(name, f"no answer within {timeout_s:g} s") from error
    except VlaRlError:
        raise
    except Exception as error:
        raise ExpertFailed(name, f"it raised {type(error).__name__}: {error}") from error
    if not (
        isinstance(answer, np.ndarray)
        and answer.ndim == 2
        and len(answer)
        and answer.shape[1] == action_size
        and answer.dtype.kind in "iuf"
    ):
        found = (
            f"{answer.dtype} {list(answer.shape)}"
            if isinstance(answer, np.ndarray)
            else describe_value(answer)
        )
        raise AgentError(
            f"expert {name} answered {found}, expected numbers [K, {action_size}] with K >= 1: control steps of "
            "this environment"
        )
    if not np.isfinite(answer).all():
        raise AgentError(f"expert {name} answered NaN or infinity, expected finite numbers")
    return answer.astype(np.float32)
