"""`/v1/responses` through OpenAI's client: items there and back, events, continued answers, and
what is refused.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import openai
import pytest
from byte_policy import BytePolicy
from clients import client_of
from pydantic import BaseModel

from vla_rl.endpoint import Endpoint
from vla_rl.endpoint.http import RequestError
from vla_rl.endpoint.responses import Item, read_messages
from vla_rl.types import JsonFormat, Message, ReplyOptions, ToolCall, ToolRule

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": SCHEMA,
    "strict": True,
}
CALLS_ADD = Message(
    role="assistant",
    content="Let me see.",
    tool_calls=(
        ToolCall(id="0", name="add", arguments='{"a": 1}'),
        ToolCall(id="1", name="add", arguments='{"a": 2}'),
    ),
)


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with asyncio.timeout(60), Endpoint() as endpoint:
        yield endpoint


async def asked_by(endpoint: Endpoint, **fields: Any) -> tuple[BytePolicy, Any]:
    """The policy that was asked, and the answer."""
    policy = BytePolicy("hi")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            return policy, await client.responses.create(
                **{"model": "m", "input": "hello", **fields}
            )


async def test_a_text_is_answered_and_recorded(endpoint: Endpoint) -> None:
    policy = BytePolicy("hi")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            answer = await client.responses.create(
                model="m",
                input="hello",
                instructions="be brief",
                max_output_tokens=9,
                metadata={"a": "b"},
            )
    assert (answer.output_text, answer.status, answer.model) == ("hi", "completed", "m")
    assert [(message.role, message.content) for message in policy.requests[0][0]] == [
        ("system", "be brief"),
        ("user", "hello"),
    ]
    assert policy.requests[0][2] == 9
    assert (answer.instructions, answer.metadata, answer.temperature) == (
        "be brief",
        {"a": "b"},
        0.5,
    )
    assert answer.usage is not None
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (
        3,
        len("<system>be brief\n<user>hello\n<assistant>hi\n"),
    )
    assert len(session.calls) == 1


async def test_a_reply_that_was_cut_is_incomplete(endpoint: Endpoint) -> None:
    _, answer = await asked_by(endpoint, max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_calls_and_their_outputs_are_one_message_of_the_assistant_and_one_of_each_tool(
    endpoint: Endpoint,
) -> None:
    policy = BytePolicy(CALLS_ADD, "3")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            tools: Any = [ADD]
            first = await client.responses.create(model="m", input="1+2?", tools=tools)
            said, *calls = first.output
            assert said.type == "message"
            history: Any = [
                {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
                *first.output,
            ]
            for call in calls:
                assert call.type == "function_call"
                history.append(
                    {
                        "type": "function_call_output",
                        "call_id": call.call_id,
                        "output": call.arguments,
                    }
                )
            second = await client.responses.create(model="m", input=history, tools=tools)
    assert second.output_text == "3"
    user, assistant, *answers = policy.requests[1][0]
    assert (user.content, assistant.content) == ("1+2?", "Let me see.")
    assert [call.arguments for call in assistant.tool_calls] == ['{"a": 1}', '{"a": 2}']
    assert [answer.tool_call_id for answer in answers] == [call.id for call in assistant.tool_calls]
    assert [answer.content for answer in answers] == ['{"a": 1}', '{"a": 2}']
    assert (policy.requests[0][1][0].is_strict, policy.requests[0][1][0].parameters) == (
        True,
        SCHEMA,
    )


async def test_an_answer_is_continued_by_its_id_without_its_instructions(
    endpoint: Endpoint,
) -> None:
    policy = BytePolicy(CALLS_ADD, "hu")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            tools: Any = [ADD]
            first = await client.responses.create(
                model="m", input="one", instructions="be brief", tools=tools
            )
            outputs: Any = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
                for item in first.output
                if item.type == "function_call"
            ]
            second = await client.responses.create(
                model="m", input=outputs, previous_response_id=first.id
            )
            assert second.previous_response_id == first.id
            with pytest.raises(
                openai.BadRequestError, match="'resp_77', expected a response of this session"
            ) as error:
                await client.responses.create(model="m", input="x", previous_response_id="resp_77")
    assert (error.value.code, error.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )
    assert [message.role for message in policy.requests[1][0]] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    _, assistant, *answers = policy.requests[1][0]
    assert [call.id for call in assistant.tool_calls] == [answer.tool_call_id for answer in answers]


async def test_an_answer_that_is_not_stored_cannot_be_continued(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy("hi")) as session:
        async with client_of(session) as client:
            first = await client.responses.create(model="m", input="one", store=False)
            with pytest.raises(openai.BadRequestError, match="that was stored"):
                await client.responses.create(model="m", input="two", previous_response_id=first.id)


async def test_events_build_up_the_same_response(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy(CALLS_ADD)) as session:
        async with client_of(session) as client:
            tools: Any = [ADD]
            async with client.responses.stream(model="m", input="hello", tools=tools) as stream:
                events = [event async for event in stream]
                final = await stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"] * 2,
        "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "Let me see."
    assert [item.arguments for item in final.output if item.type == "function_call"] == [
        '{"a": 1}',
        '{"a": 2}',
    ]


class Sum(BaseModel):
    a: int


async def test_a_parsed_output_asks_for_its_schema(endpoint: Endpoint) -> None:
    policy = BytePolicy('{"a": 3}')
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            answer = await client.responses.parse(model="m", input="hello", text_format=Sum)
    assert answer.output_parsed == Sum(a=3)
    (options,) = policy.options
    assert isinstance(options.format, JsonFormat)
    assert options.format.is_strict
    assert options.format.schema["required"] == ["a"]


async def test_log_probs_are_given_where_they_are_included(endpoint: Endpoint) -> None:
    policy, answer = await asked_by(
        endpoint, include=["message.output_text.logprobs"], top_logprobs=1
    )
    (item,) = answer.output
    found = item.content[0].logprobs
    assert [(token.token, token.logprob) for token in found] == [("h", -0.5), ("i", -0.5)]
    assert [other.logprob for other in found[0].top_logprobs] == [-1.0]
    assert policy.options == [ReplyOptions(top_log_probs=1)]


async def test_a_forced_function_is_named_at_the_top(endpoint: Endpoint) -> None:
    policy, answer = await asked_by(
        endpoint, tools=[ADD], tool_choice={"type": "function", "name": "add"}
    )
    assert policy.options == [
        ReplyOptions(tools=ToolRule(mode="required", names=("add",), max_calls=1))
    ]
    assert answer.tool_choice.name == "add"


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"input": []}, "input", "input is empty, expected a text or at least one item"),
        (
            {"input": [{"role": "robot", "content": "x"}]},
            "input[0].role",
            "input[0].role is 'robot', expected one of user",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
            "input[0].content[0].type is 'input_image', expected text",
        ),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input[0].type",
            "input[0].type is 'item_reference'",
        ),
        (
            {"input": [{"type": "function_call", "name": "add"}]},
            "input[0].call_id",
            "input[0].call_id is missing",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "tools[0]: "),
        ({"background": True}, "background", "background is True, expected false"),
        ({"conversation": "conv_1"}, "conversation", "conversation is 'conv_1', expected none"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "prompt is {'id': 'pmpt_1'}, expected none"),
        ({"truncation": "auto"}, "truncation", "truncation is 'auto', expected 'disabled'"),
        (
            {"max_output_tokens": 0},
            "max_output_tokens",
            "max_output_tokens is 0, expected at least 1",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "text.format.type is 'xml'"),
    ],
)
async def test_a_refusal_names_exactly_the_rule_that_was_broken(
    endpoint: Endpoint, fields: Any, param: str, told: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await asked_by(endpoint, **fields)
    assert error.value.param == param
    assert error.value.body["message"].startswith(told)  # type: ignore[index]


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
