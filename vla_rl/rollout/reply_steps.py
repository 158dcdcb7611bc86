"""A reply as a step of a trajectory."""

import numpy as np

from vla_rl.types import ActionChunk, Completion, Step, observed_conversation


def step_of(reply: Completion, agent: str, reward: float) -> Step:
    """Return one decision: the prompt as its observation, the whole reply as its action.

    `observation["grammar"]` is the grammar that sampling was restricted to, if there was one: a
    learner computes the log-probs of the same restricted distribution.
    """
    observation = observed_conversation(reply.prompt_tokens, reply.images, reply.image_starts)
    if reply.grammar is not None:
        observation |= {"grammar": reply.grammar}
    chunk = ActionChunk(
        actions=reply.tokens[None],
        tokens=reply.tokens,
        log_probs=reply.log_probs,
        weight_version=int(reply.weight_versions.min()),
        weight_versions=reply.weight_versions,
        temperature=reply.temperature,
    )
    return Step(
        observation=observation, chunk=chunk, rewards=np.array([reward], np.float32), agent=agent
    )
