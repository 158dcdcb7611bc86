"""Training conversations: the loss covers the assistant's messages only."""

from collections.abc import Sequence

import numpy as np

from vla_rl.engines.chat_interface import process_images
from vla_rl.learner.imitation import Demonstration
from vla_rl.models.language.policy import CausalLanguageModel
from vla_rl.types import Message, ToolSpec, make_conversation_observation


def chat_demonstration(
    policy: CausalLanguageModel, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
) -> Demonstration:
    """Encode a whole conversation as one row, by the policy's own chat template; the loss covers
    every assistant message.

    Raises: ValueError if the conversation has no assistant message, or images that the policy does
    not read, or if the template renders a message differently when more messages follow.
    """
    assistant_turns = [
        number for number, message in enumerate(messages) if message.role == "assistant"
    ]
    if not assistant_turns:
        raise ValueError(
            "the conversation has no assistant message, expected at least one to train on."
        )
    tokens = policy.render_whole(messages[: assistant_turns[-1] + 1], tools)
    trained_tokens = np.zeros(len(tokens), np.bool_)
    for number in assistant_turns:
        before = policy.render(messages[:number], tools)
        start = len(before)
        # Templates that drop earlier thoughts render a turn differently later; a loss mask by
        # position would then cover the wrong tokens.
        if (tokens[:start] != before).any():
            raise ValueError(
                f"the chat template renders the first {number} messages differently when more "
                "follow, so no loss mask can be built."
            )
        # The token that ends the turn is trained too, or the policy would never stop.
        ends = np.flatnonzero(np.isin(tokens[start:], list(policy.stop_tokens)))
        trained_tokens[start : start + int(ends[0]) + 1 if len(ends) else len(tokens)] = True
    images, prompt = process_images(policy, tokens, messages[: assistant_turns[-1] + 1])
    starts = () if prompt is None else prompt.image_starts
    first, last = int(trained_tokens.argmax()), int(np.flatnonzero(trained_tokens)[-1]) + 1
    return Demonstration(
        observation=make_conversation_observation(tokens[:first], images, starts),
        actions=tokens[None, first:last],
        num_valid=1,
        trained_tokens=trained_tokens[first:last],
    )
