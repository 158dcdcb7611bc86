"""`/v1/chat/completions` through OpenAI's client: what is asked of the policy, what is answered,
and what is refused.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from byte_policy import BytePolicy
from clients import ASK, client_of, request

from vla_rl.endpoint import Endpoint, EndpointConfig
from vla_rl.types import (
    ANY_REPLY,
    ChoiceFormat,
    GrammarFormat,
    JsonFormat,
    Message,
    RegexFormat,
    ReplyFormat,
    ReplyOptions,
    ToolCall,
    ToolRule,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA},
}
STRICT = {"type": "function", "function": {"name": "mul", "parameters": SCHEMA, "strict": True}}
CALLS_ADD = Message(
    role="assistant", tool_calls=(ToolCall(id="0", name="add", arguments='{"a": 1}'),)
)


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with asyncio.timeout(60), Endpoint() as endpoint:
        yield endpoint


async def asked_by(endpoint: Endpoint, **fields: Any) -> tuple[BytePolicy, Any]:
    """The policy that was asked, and the answer."""
    policy = BytePolicy("hi", "ho", "hu")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            return policy, await client.chat.completions.create(
                **{"model": "m", "messages": ASK, **fields}
            )


async def test_a_conversation_with_tools_goes_there_and_back(endpoint: Endpoint) -> None:
    policy = BytePolicy(CALLS_ADD, "3")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            tools: Any = [TOOL, STRICT]
            first = (
                await client.chat.completions.create(model="m", messages=ASK, tools=tools)
            ).choices[0]
            assert first.finish_reason == "tool_calls"
            assert first.message.tool_calls is not None
            (call,) = first.message.tool_calls
            assert call.type == "function"
            assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
            history: Any = [
                {
                    "role": "developer",
                    "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}],
                },
                *ASK,
                first.message,
                {"role": "tool", "tool_call_id": call.id, "content": "3"},
            ]
            second = await client.chat.completions.create(model="m", messages=history, max_tokens=1)
    assert second.choices[0].finish_reason == "length"
    assert [(tool.name, tool.is_strict) for tool in policy.requests[0][1]] == [
        ("add", False),
        ("mul", True),
    ]
    messages, tools, max_tokens = policy.requests[1]
    assert [message.role for message in messages] == ["system", "user", "assistant", "tool"]
    assert messages[0].content == "be brief"
    assert messages[2].tool_calls[0].name == "add"
    assert messages[3].tool_call_id == messages[2].tool_calls[0].id
    assert (tools, max_tokens) == ((), 1)


async def test_a_stream_gives_the_same_in_pieces(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy("hi", CALLS_ADD)) as session:
        async with client_of(session) as client:
            stream = await client.chat.completions.create(
                model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert (
                "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                == "hi"
            )
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 3
            called = await client.chat.completions.create(model="m", messages=ASK, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in called]
            calls = [call for delta in deltas for call in delta.tool_calls or ()]
            assert calls[0].function is not None
            assert (calls[0].index, calls[0].function.name, calls[0].function.arguments) == (
                0,
                "add",
                '{"a": 1}',
            )
    assert len(session.calls) == 2


async def test_several_choices_are_replies_of_their_own_and_each_is_recorded(
    endpoint: Endpoint,
) -> None:
    policy = BytePolicy("hi", CALLS_ADD, "hu")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            answer = await client.chat.completions.create(model="m", messages=ASK, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["hi", None, "hu"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "tool_calls", "stop"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len("<user>hello\n<assistant>")  # counted once
    assert answer.usage.completion_tokens == len("hi\n") + len("add\n") + len("hu\n")
    assert [call.completion.message.content for call in session.calls] == ["hi", "", "hu"]


async def test_log_probs_are_the_recorded_ones_without_the_end_of_the_reply(
    endpoint: Endpoint,
) -> None:
    _, answer = await asked_by(endpoint, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs.content
    assert [(token.token, token.logprob, token.bytes) for token in found] == [
        ("h", -0.5, [104]),
        ("i", -0.5, [105]),
    ]
    assert [(other.token, other.logprob) for other in found[0].top_logprobs] == [
        ("?", -1.0),
        ("?", -2.0),
    ]
    _, cut = await asked_by(endpoint, logprobs=True, max_completion_tokens=2)
    assert [token.token for token in cut.choices[0].logprobs.content] == ["h", "i"]
    assert cut.choices[0].logprobs.content[0].top_logprobs == []
    _, plain = await asked_by(endpoint)
    assert plain.choices[0].logprobs is None
    _, stream = await asked_by(endpoint, logprobs=True, stream=True)
    streamed = [chunk.choices[0].logprobs async for chunk in stream]
    assert [token.token for log_probs in streamed if log_probs for token in log_probs.content] == [
        "h",
        "i",
    ]


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, ToolRule()),
        ({"tool_choice": "auto"}, ToolRule()),
        ({"tool_choice": "none"}, ToolRule(mode="none")),
        ({"tool_choice": "required"}, ToolRule(mode="required")),
        ({"parallel_tool_calls": False}, ToolRule(max_calls=1)),
        ({"parallel_tool_calls": True, "tool_choice": "required"}, ToolRule(mode="required")),
        (
            {"tool_choice": {"type": "function", "function": {"name": "mul"}}},
            ToolRule(mode="required", names=("mul",), max_calls=1),
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "auto",
                        "tools": [{"type": "function", "function": {"name": "add"}}],
                    },
                }
            },
            ToolRule(names=("add",)),
        ),
    ],
)
async def test_a_choice_of_tools_becomes_a_rule(
    endpoint: Endpoint, fields: Any, rule: ToolRule
) -> None:
    policy, _ = await asked_by(endpoint, tools=[TOOL, STRICT], **fields)
    assert policy.options == [ReplyOptions(tools=rule)]
    assert len(policy.requests[0][1]) == (0 if rule.mode == "none" else 2)


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonFormat()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            JsonFormat(schema=SCHEMA),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA},
                }
            },
            JsonFormat(schema=SCHEMA, is_strict=False),
        ),
        ({"extra_body": {"structured_outputs": {"regex": "a+"}}}, RegexFormat(pattern="a+")),
        (
            {"extra_body": {"structured_outputs": {"choice": ["a", "b"]}}},
            ChoiceFormat(choices=("a", "b")),
        ),
        (
            {"extra_body": {"structured_outputs": {"grammar": "start: /a/"}}},
            GrammarFormat(lark="start: /a/"),
        ),
        ({"extra_body": {"structured_outputs": {"json": SCHEMA}}}, JsonFormat(schema=SCHEMA)),
    ],
)
async def test_a_format_is_asked_of_the_policy(
    endpoint: Endpoint, fields: Any, form: ReplyFormat | None
) -> None:
    policy, _ = await asked_by(endpoint, **fields)
    assert policy.options == [ReplyOptions(format=form)]


@pytest.mark.parametrize(("stop", "texts"), [("a", ("a",)), (["a", "\n"], ("a", "\n")), ([], ())])
async def test_stop_texts_are_asked_of_the_policy(
    endpoint: Endpoint, stop: Any, texts: tuple[str, ...]
) -> None:
    policy, _ = await asked_by(endpoint, stop=stop)
    assert policy.options == [ReplyOptions(stop=texts)]


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"messages": []}, "messages", "messages is [], expected at least one message"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0].role",
            "messages[0].role is 'robot', expected one of system, developer, user, assistant, tool",
        ),
        (
            {"messages": [*ASK, {"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[1].content[0].type",
            "messages[1].content[0].type is 'image_url', expected text",
        ),
        (
            {"extra_body": {"structured_outputs": {"choice": []}}},
            "structured_outputs.choice",
            "structured_outputs.choice is [], expected at least one text",
        ),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0, expected at least 1"),
        ({"n": 200}, "n", "n is 200, expected 1 to 128"),
        ({"n": 0}, "n", "n is 0, expected 1 to 128"),
        ({"stop": [""]}, "stop", "stop is '', expected texts of at least one character"),
        ({"stop": ["a"] * 17}, "stop", "stop is 17, expected at most 16 texts"),
        (
            {"top_logprobs": 3},
            "top_logprobs",
            "top_logprobs is 3, expected none unless logprobs is true",
        ),
        (
            {"logprobs": True, "top_logprobs": 21},
            "top_logprobs",
            "top_logprobs is 21, expected 0 to 20",
        ),
        (
            {"tool_choice": "required"},
            "tool_choice",
            "tool_choice is 'required', expected 'auto' or 'none' without tools",
        ),
        (
            {"tool_choice": "always"},
            "tool_choice",
            "tool_choice is 'always', expected 'auto', 'none', 'required', a function",
        ),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice",
            "tool_choice is 'sub', expected the name of a tool of this request, which are ['add']",
        ),
        (
            {"tools": [{"type": "web_search"}]},
            "tools[0]",
            "tools[0]: Invalid enum value 'web_search'",
        ),
        (
            {"response_format": {"type": "xml"}},
            "response_format.type",
            "response_format.type is 'xml', expected 'text', 'json_object' or 'json_schema'",
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "response_format.json_schema is missing",
        ),
        (
            {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}},
            "structured_outputs",
            "structured_outputs has 2 of json, regex, choice and grammar, expected one",
        ),
        (
            {"functions": [{"name": "add", "parameters": {}}]},
            "functions",
            "functions is [{'name': 'add'",
        ),
        (
            {"function_call": {"name": "add"}},
            "function_call",
            "function_call is {'name': 'add'}, expected tool_choice",
        ),
        (
            {"modalities": ["text", "audio"]},
            "modalities",
            "modalities is ['text', 'audio'], expected ['text']",
        ),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio", "audio is {'voice': 'alloy'"),
    ],
)
async def test_a_refusal_names_exactly_the_rule_that_was_broken(
    endpoint: Endpoint, fields: Any, param: str, told: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await asked_by(endpoint, **fields)
    assert error.value.param == param
    assert error.value.body["message"].startswith(told)  # type: ignore[index]


async def test_options_that_the_model_cannot_meet_are_the_requests_fault(
    endpoint: Endpoint,
) -> None:
    policy = BytePolicy("hi")
    policy.fails_with = ValueError("the grammar cannot be compiled: Unimplemented keys")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            with pytest.raises(openai.BadRequestError, match="the grammar cannot be compiled"):
                await client.chat.completions.create(model="m", messages=ASK)
    assert session.failure is None


async def test_a_request_that_is_too_large_is_refused() -> None:
    async with Endpoint(EndpointConfig(max_request_kb=1)) as endpoint:
        with endpoint.session(BytePolicy("hi")) as session:
            status, answer = await request(
                endpoint, "POST", "/chat/completions", session.api_key, b"x" * 4096
            )
    assert (status, answer["error"]["message"]) == (
        413,
        "the request is larger than max_request_kb=1 KiB.",
    )


async def test_sampling_is_the_runs_own_and_the_answer_says_so(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy("hi")) as session:
        async with client_of(session) as client:
            raw = await client.chat.completions.with_raw_response.create(
                model="m", messages=ASK, temperature=0.0, top_p=0.5, tool_choice="none"
            )
    assert raw.headers["x-vla-rl-ignored"] == "temperature, top_p"


async def test_a_null_is_as_good_as_nothing_and_what_is_not_read_is_named(
    endpoint: Endpoint,
) -> None:
    nulls = (
        "stream", "stream_options", "model", "tools", "tool_choice", "max_tokens", "n", "stop", "response_format",
        "temperature", "functions", "function_call", "modalities", "audio", "logprobs", "parallel_tool_calls",
    )  # fmt: skip
    body = {
        "messages": ASK,
        **dict.fromkeys(nulls),
        "prediction": {"type": "content"},
        "zeit\nraum": 1,
        "user": "me",
    }
    policy = BytePolicy("hi")
    with endpoint.session(policy) as session:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(
                f"{endpoint.base_url}/chat/completions", data=json.dumps(body), headers=headers
            ) as response,
        ):
            assert response.status == 200, await response.text()
            assert response.headers["x-vla-rl-ignored"] == r"prediction, zeit\nraum, user"
    assert policy.options == [ANY_REPLY]
