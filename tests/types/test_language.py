"""Messages, replies, their options keep their values on the way."""

import msgspec
import numpy as np
import pytest

from vla_rl.types import Completion, Message, TextOutcome, TextStart, ToolCall
from vla_rl.types.language import (
    ANY_REPLY,
    DEFAULT_AGENT,
    ChoiceFormat,
    GrammarFormat,
    JsonFormat,
    RegexFormat,
    ReplyFormat,
    ReplyOptions,
    ToolRule,
)


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


@pytest.mark.parametrize(
    "format",
    [
        JsonFormat(schema={"type": "array"}, is_strict=False),
        RegexFormat(pattern="[0-9]+"),
        ChoiceFormat(choices=("yes", "no")),
        GrammarFormat(lark='start: "a"'),
    ],
)
def test_a_format_is_read_as_the_one_that_was_sent(format: ReplyFormat) -> None:
    options = ReplyOptions(format=format, stop=("\n",), tools=ToolRule(mode="none"))
    assert msgspec.json.decode(msgspec.json.encode(options), type=ReplyOptions) == options


def test_json_without_a_schema_is_any_object_and_two_formats_share_no_schema() -> None:
    first, second = JsonFormat(), JsonFormat()
    assert first.schema == {"type": "object"}
    assert first.schema is not second.schema


def test_without_rules_the_model_decides() -> None:
    assert (
        ReplyOptions(format=None, stop=(), tools=ToolRule(mode="auto", names=(), max_calls=None))
        == ANY_REPLY
    )
