"""Conversations to learn from: what the assistant said in them teaches, what others said does not."""

from collections.abc import Sequence

import numpy as np

from vla_rl.learning.imitation import Demonstration
from vla_rl.models.language.policy import CausalLanguageModel
from vla_rl.types import Message, ToolSpec


def chat_demonstration(
    policy: CausalLanguageModel, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
) -> Demonstration:
    """A whole conversation as one row, by the policy's own chat template; every assistant's message teaches.

    Raises: ValueError for a conversation without an assistant's message, or a template that writes the past of one in
        another way once it goes on.
    """
    spoken = [number for number, message in enumerate(messages) if message.role == "assistant"]
    if not spoken:
        raise ValueError("a conversation has no message of an assistant, expected at least one to learn from.")
    whole = policy.render_whole(messages[: spoken[-1] + 1], tools)
    teaches = np.zeros(len(whole), np.bool_)
    for number in spoken:
        before = policy.render(messages[:number], tools)
        start = len(before)
        if (whole[:start] != before).any():
            raise ValueError(f"the chat template writes the first {number} messages in another way once more follow.")
        ends = np.flatnonzero(np.isin(whole[start:], list(policy.stop_tokens)))
        teaches[start : start + int(ends[0]) + 1 if len(ends) else len(whole)] = True
    first, last = int(teaches.argmax()), int(np.flatnonzero(teaches)[-1]) + 1
    return Demonstration(
        observation={"prompt_tokens": whole[:first]},
        actions=whole[None, first:last],
        num_valid=1,
        teaches=teaches[first:last],
    )
