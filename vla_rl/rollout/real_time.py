"""An agent whose world goes on while the policy decides, as a robot's does.

    old chunk   ... │ o0 o1 │ o2 o3 o4 o5          delay 2, 4 rows executed of each chunk
    asked here      ^ decides ^ switches
    new chunk         n0 n1 │ n2 n3 │ n4 n5 ...    runs o0 o1 n2 n3; then n4 n5 and the next chunk's n2 n3

The policy gets what was seen when it was asked, and the rest of the old chunk, which a flow policy
continues (`vla_rl.models.flow.real_time`). Without it, switching is naive: the robot jumps to a chunk that
was drawn anew.
"""

import msgspec
import numpy as np

from vla_rl.errors import AgentError
from vla_rl.rollout.agents import copy_arrays, stop_reason
from vla_rl.types import (
    ActionChunk,
    Agent,
    Config,
    Env,
    NonNegativeInt,
    Observation,
    Policy,
    PositiveInt,
    Step,
    Trajectory,
    with_plan,
)


class RealTimeConfig(Config, frozen=True, kw_only=True):
    """How the world goes on while the policy decides.

    Example:
        RealTimeConfig(delay=4, executed_rows=8)  # chunks of at least 12 rows
    """

    delay: NonNegativeInt = 0
    """Control steps that pass while the policy decides; the rest of the chunk before runs meanwhile. 0: the
    world waits."""

    executed_rows: PositiveInt | None = None
    """Control steps from one decision to the next, at least delay. none: half of the chunk, or as many as
    delay."""

    continues_plan: bool = True
    """Whether the policy is given the rest of the chunk before, to continue it (flow policies). False
    switches to a chunk that was drawn anew."""

    def __post_init__(self) -> None:
        fits = self.executed_rows is None or self.executed_rows >= self.delay
        self.require(fits, "executed_rows", f"at least delay, {self.delay}, or none")

    @property
    def in_words(self) -> str:
        """A condition for the reader of a table; empty without a delay."""
        if not self.delay:
            return ""
        switching = "continues the plan" if self.continues_plan else "is drawn anew"
        return f"; each chunk is decided {self.delay} control steps late and {switching}"

    def count_executed(self, num_rows: int) -> int:
        """Return how many rows of chunks of `num_rows` run between two decisions.

        Raises: AgentError if the rest does not last while the policy decides.
        """
        executed = self.executed_rows or max(num_rows // 2, self.delay, 1)
        if executed + self.delay > num_rows:
            raise AgentError(
                f"chunks have {num_rows} rows, expected at least {executed} that are executed and "
                f"{self.delay} that run while the policy decides (delay); take longer chunks (--chunk-size), "
                "execute fewer rows, or a shorter delay"
            )
        return executed


def make_real_time_agent(config: RealTimeConfig) -> Agent:
    """Return an agent for embodied environments under a delay.

    Its trajectories hold what was executed and are for evaluation: their log-probs are 0.
    """

    async def run_agent(env: Env, policy: Policy) -> Trajectory:
        observation, _ = await env.reset()
        steps: list[Step] = []
        plan: np.ndarray | None = None
        while True:
            observed: Observation = copy_arrays(observation)
            asked = observed
            if plan is not None and config.continues_plan:
                asked = with_plan(observed, plan, config.delay)
            chunk = await policy.act(asked)
            executed = config.count_executed(len(chunk.actions))
            actions = np.array(chunk.actions[:executed])
            # the robot waits for its first chunk: there is nothing to run before it
            if plan is not None:
                actions[: config.delay] = plan[: config.delay]
            plan = np.array(chunk.actions[executed:])
            outcome = await env.step_chunk(actions)
            steps.append(
                Step(
                    observation=observed,
                    chunk=_record_executed(chunk, actions),
                    rewards=np.array(outcome.rewards),
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

    return run_agent


def _record_executed(chunk: ActionChunk, actions: np.ndarray) -> ActionChunk:
    """Return the record of a decision whose rows come from two chunks, which has no likelihood."""
    numbers = actions.reshape(-1).astype(np.float32)
    return msgspec.structs.replace(
        chunk,
        actions=actions,
        tokens=numbers,
        log_probs=np.zeros_like(numbers),
        weight_versions=None,
        drawn=None,
    )
