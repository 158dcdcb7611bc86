"""Messages and completions are plain values with the defaults of a single agent."""

import msgspec
import numpy as np

from vla_rl.types import Completion, Message, TextOutcome, TextStart, ToolCall
from vla_rl.types.language import DEFAULT_AGENT


def test_a_message_with_tool_calls_is_the_same_after_it_was_sent() -> None:
    call = ToolCall(id="call_0", name="add", arguments='{"a": 1')
    message = Message(role="assistant", tool_calls=(call,), call_errors=("no JSON",))
    assert msgspec.json.decode(msgspec.json.encode(message), type=Message) == message


def test_turns_belong_to_the_one_agent_unless_they_name_another() -> None:
    asked = (Message(role="user", content="2 + 2?"),)
    assert TextStart(messages=asked).agent == DEFAULT_AGENT
    outcome = TextOutcome(messages=(), reward=1.0, terminated=True, truncated=False, info={})
    assert outcome.agent == DEFAULT_AGENT
    assert outcome.credits == {}


def test_a_completion_was_sampled_as_the_episode_says_unless_it_says_otherwise() -> None:
    reply = Completion(
        message=Message(role="assistant", content="4"),
        prompt_tokens=np.array([1, 2]),
        tokens=np.array([3]),
        log_probs=np.array([-0.1], np.float32),
        weight_versions=np.array([5]),
        finish_reason="stop",
    )
    assert (reply.temperature, reply.grammar, reply.stopped_by, reply.report) == (None,) * 4
