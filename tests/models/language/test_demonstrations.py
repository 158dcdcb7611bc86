"""Conversations to learn from: what the assistant said trained_tokens, to the token that ends its turn,
and nothing else does.
"""

import numpy as np
import pytest

from vla_rl.engines import DeviceLane
from vla_rl.learner import ImitationConfig, Imitator, OptimizerConfig
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.models.language.demonstrations import chat_demonstration
from vla_rl.types import Message

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=256,
)
CHAT = (
    Message(role="user", content="one?"),
    Message(role="assistant", content="two"),
    Message(role="user", content="and?"),
    Message(role="assistant", content="three"),
)


@pytest.fixture
def policy() -> CausalLanguageModel:
    return tiny(SHAPE, ["one two three"], seed=0)


def test_only_the_assistants_own_tokens_teach(policy: CausalLanguageModel) -> None:
    lesson = chat_demonstration(policy, CHAT)
    assert lesson.trained_tokens is not None
    tokens = lesson.actions[0]
    ends = [
        place
        for place in range(1, len(tokens) + 1)
        if place == len(tokens) or not lesson.trained_tokens[place]
    ]
    first = policy.parse(policy.decode(tokens[: ends[0]]))
    assert first.content == "two"
    starts = np.flatnonzero(np.diff(lesson.trained_tokens.astype(int)) == 1)
    assert policy.parse(policy.decode(tokens[int(starts[-1]) + 1 :])).content == "three"
    assert int(tokens[-1]) in policy.stop_tokens
    assert lesson.observation["prompt_tokens"].tolist() == policy.render(CHAT[:1]).tolist()


def test_a_conversation_in_which_nobody_answers_is_refused(policy: CausalLanguageModel) -> None:
    with pytest.raises(ValueError, match="no assistant message, expected at least one"):
        chat_demonstration(policy, CHAT[:1])


async def test_conversations_of_different_lengths_are_learnt_together(
    policy: CausalLanguageModel,
) -> None:
    lessons = [chat_demonstration(policy, CHAT), chat_demonstration(policy, CHAT[:2])]
    config = ImitationConfig(
        optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), micro_batch_tokens=40
    )
    async with DeviceLane(1) as lane:
        imitator = Imitator(policy, lane, config)
        losses = [(await imitator.update(lessons)).metrics["imitation/loss"] for _ in range(25)]
        assert losses[-1] < 0.2 * losses[0]
        with pytest.raises(TypeError, match="evaluate it by running episodes"):
            await imitator.evaluate(lessons)
