"""`/v1/messages` in Anthropic's format; its own client is tested by `make test-clients`."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from byte_policy import BytePolicy
from clients import request

from vla_rl.endpoint import Endpoint
from vla_rl.types import JsonFormat, Message, ReplyOptions, ToolCall, ToolRule

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA, "strict": True}]
CALLS_ADD = Message(
    role="assistant",
    content="Let me see.",
    tool_calls=(ToolCall(id="0", name="add", arguments='{"a": 1}'),),
)


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with asyncio.timeout(60), Endpoint() as endpoint:
        yield endpoint


async def asked_by(endpoint: Endpoint, policy: BytePolicy, **fields: Any) -> tuple[int, Any]:
    body = {
        "model": "m",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "hello"}],
        **fields,
    }
    with endpoint.session(policy) as session:
        return await request(
            endpoint, "POST", "/messages", session.api_key, json.dumps(body).encode()
        )


async def test_a_message_is_answered_with_blocks(endpoint: Endpoint) -> None:
    policy = BytePolicy(CALLS_ADD)
    status, body = await asked_by(endpoint, policy, system="be brief", tools=TOOLS)
    assert status == 200
    said, called = body["content"]
    assert (said, called["name"], called["input"]) == (
        {"type": "text", "text": "Let me see."},
        "add",
        {"a": 1},
    )
    assert (body["type"], body["role"], body["stop_reason"], body["stop_sequence"]) == (
        "message", "assistant", "tool_use", None,
    )  # fmt: skip
    messages, tools, max_tokens = policy.requests[0]
    assert [(message.role, message.content) for message in messages] == [
        ("system", "be brief"),
        ("user", "hello"),
    ]
    assert (tools[0].is_strict, tools[0].parameters, max_tokens) == (True, SCHEMA, 64)


async def test_results_of_tools_are_messages_of_their_own(endpoint: Endpoint) -> None:
    policy = BytePolicy("3")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+2?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "So."},
                {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "3"}],
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    _, body = await asked_by(endpoint, policy, messages=messages, max_tokens=1)
    assert body["stop_reason"] == "max_tokens"
    user, assistant, tool, more = policy.requests[0][0]
    assert (user.content, assistant.content, tool.content, more.content) == (
        "1+2?",
        "So.",
        "3",
        "and?",
    )
    assert (assistant.tool_calls[0].arguments, tool.tool_call_id) == ('{"a": 1}', "t1")


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"stop_sequences": ["\n"]}, ReplyOptions(stop=("\n",))),
        (
            {"tools": TOOLS, "tool_choice": {"type": "any"}},
            ReplyOptions(tools=ToolRule(mode="required")),
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ReplyOptions(tools=ToolRule(max_calls=1)),
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "add"}},
            ReplyOptions(tools=ToolRule(mode="required", names=("add",), max_calls=1)),
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "none"}},
            ReplyOptions(tools=ToolRule(mode="none")),
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            ReplyOptions(format=JsonFormat(schema=SCHEMA)),
        ),
    ],
)
async def test_rules_are_asked_of_the_policy(
    endpoint: Endpoint, fields: Any, options: ReplyOptions
) -> None:
    policy = BytePolicy("hi")
    status, _ = await asked_by(endpoint, policy, **fields)
    assert status == 200
    assert policy.options == [options]


async def test_events_build_up_the_same_message(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy(CALLS_ADD)) as session:
        body = {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 64,
            "stream": True,
            "tools": TOOLS,
        }
        async with (
            aiohttp.ClientSession(headers={"x-api-key": session.api_key}) as client,
            client.post(f"{endpoint.base_url}/messages", json=body) as response,
        ):
            lines = (await response.text()).splitlines()
    events = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")
    ]
    assert [line.removeprefix("event: ") for line in lines if line.startswith("event: ")] == [
        event["type"] for event in events
    ]
    blocks = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert [event["type"] for event in events] == [
        "message_start",
        *blocks,
        *blocks,
        "message_delta",
        "message_stop",
    ]
    assert events[2]["delta"] == {"type": "text_delta", "text": "Let me see."}
    assert json.loads(events[5]["delta"]["partial_json"]) == {"a": 1}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"messages": []}, "messages is [], expected at least one message"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type is 'image', expected text, tool_use or tool_result",
        ),
        (
            {"tool_choice": {"type": "any"}},
            "tool_choice.type is 'any', expected 'auto' or 'none' without tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "sub"}},
            "tool_choice.name is 'sub', expected the name of a tool of this request, which are "
            "['add']",
        ),
    ],
)
async def test_a_refusal_names_exactly_the_rule_that_was_broken(
    endpoint: Endpoint, fields: Any, told: str
) -> None:
    status, body = await asked_by(endpoint, BytePolicy("hi"), **fields)
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["message"].startswith(told)
