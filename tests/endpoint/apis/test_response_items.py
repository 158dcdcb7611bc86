"""Items of `/v1/responses` become a conversation, and one that does not fit is named."""

from typing import Any

import msgspec
import pytest

from vla_rl.endpoint.http import RequestError
from vla_rl.endpoint.responses import Item, read_messages
from vla_rl.types import Message, ToolCall


def converted(*items: dict[str, Any]) -> list[Message]:
    return read_messages(msgspec.convert(list(items), list[Item]))


CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}


def test_a_text_alone_is_what_the_user_says() -> None:
    assert read_messages("hello") == [Message(role="user", content="hello")]
    assert read_messages("") == []


def test_roles_are_those_of_a_conversation_and_a_developer_is_the_system() -> None:
    found = converted(
        {"role": "developer", "content": "Be short."}, {"role": "user", "content": None}
    )
    assert found == [Message(role="system", content="Be short."), Message(role="user")]


def test_parts_of_a_text_are_put_together() -> None:
    parts = [
        {"type": "output_text", "text": "I "},
        {"type": "refusal", "refusal": "will not"},
        {"type": "text", "text": None},
    ]
    assert converted({"role": "assistant", "content": parts})[0].content == "I will not"


def test_calls_join_the_message_right_before_them() -> None:
    other = {"type": "function_call", "call_id": "c2", "name": "now"}
    found = converted({"role": "assistant", "content": "Let me see."}, CALL, other)
    assert found == [
        Message(
            role="assistant",
            content="Let me see.",
            tool_calls=(
                ToolCall(id="c1", name="add", arguments='{"a": 1}'),
                ToolCall(id="c2", name="now", arguments="{}"),
            ),
        )
    ]


def test_a_call_after_another_message_is_one_of_its_own() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    found = converted(
        {"role": "user", "content": "1 + 2?"}, CALL, output, {**CALL, "call_id": "c2"}
    )
    assert [message.role for message in found] == ["user", "assistant", "tool", "assistant"]
    assert (found[2].tool_call_id, found[2].content) == ("c1", "3")
    assert [call.id for call in found[3].tool_calls] == ["c2"]


def test_reasoning_of_another_model_is_left_out() -> None:
    assert converted({"type": "reasoning"}, {"role": "user", "content": "hi"}) == [
        Message(role="user", content="hi")
    ]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"role": "tool"}, r"input\[1\].role is 'tool', expected one of user, assistant"),
        ({"type": "image"}, r"input\[1\].type is 'image', expected message, function_call"),
        ({**CALL, "call_id": None}, r"input\[1\].call_id is missing"),
        ({**CALL, "name": None}, r"input\[1\].name is missing"),
        ({"type": "function_call_output", "output": "3"}, r"input\[1\].call_id is missing"),
        (
            {"role": "user", "content": [{"type": "input_image"}]},
            r"input\[1\].content\[0\].type is 'input_image', expected text",
        ),
    ],
)
def test_an_item_that_does_not_fit_is_named(item: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        converted({"role": "user", "content": "hi"}, item)
