"""Real clients of OpenAI's API talk to the endpoint; every answer is recorded as it was sampled."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from byte_policy import BytePolicy, as_tokens
from openai import AsyncOpenAI

from vla_rl.endpoint import Endpoint, EndpointConfig, Session
from vla_rl.errors import ConfigError
from vla_rl.types import Message, ToolCall

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}},
}
CALLS_ADD = Message(role="assistant", tool_calls=(ToolCall(id="0", name="add", arguments='{"a": 1}'),))
ASK: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with asyncio.timeout(60), Endpoint() as endpoint:
        yield endpoint


def client_of(session: Session, **kwargs: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0, **kwargs)


async def post(endpoint: Endpoint, key: str, body: bytes) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{endpoint.base_url}/chat/completions", data=body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def test_an_answer_comes_back_and_is_recorded_token_by_token(endpoint: Endpoint) -> None:
    policy = BytePolicy("hi")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            answer = await client.chat.completions.create(model="gpt-anything", messages=ASK)
    assert answer.choices[0].message.content == "hi"
    assert (answer.choices[0].finish_reason, answer.model) == ("stop", "gpt-anything")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len("<user>hello\n<assistant>"), 3)
    (call,) = session.calls
    assert np.array_equal(call.completion.prompt_tokens, as_tokens("<user>hello\n<assistant>"))
    assert np.array_equal(call.completion.tokens, as_tokens("hi\n"))
    assert call.completion.log_probs.tolist() == [-0.5, -0.5, -0.5]
    assert call.completion.weight_versions.tolist() == [7, 8, 9]


async def test_a_conversation_with_tools_goes_there_and_back(endpoint: Endpoint) -> None:
    policy = BytePolicy(CALLS_ADD, "3")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            tools: Any = [TOOL]
            first = (await client.chat.completions.create(model="m", messages=ASK, tools=tools)).choices[0]
            assert first.finish_reason == "tool_calls"
            assert first.message.tool_calls is not None
            (call,) = first.message.tool_calls
            assert call.type == "function"
            assert (call.function.name, call.function.arguments) == ("add", '{"a": 1}')
            history: Any = [
                {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
                *ASK,
                first.message,
                {"role": "tool", "tool_call_id": call.id, "content": "3"},
            ]
            second = await client.chat.completions.create(model="m", messages=history, max_tokens=1)
    assert second.choices[0].finish_reason == "length"
    assert policy.heard[0][1][0].name == "add"
    heard, tools, max_tokens = policy.heard[1]
    assert [message.role for message in heard] == ["system", "user", "assistant", "tool"]
    assert heard[0].content == "be brief"
    assert heard[2].tool_calls[0].name == "add"
    assert heard[3].tool_call_id == heard[2].tool_calls[0].id
    assert (tools, max_tokens) == ((), 1)


async def test_a_stream_gives_the_same_in_pieces(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy("hi", CALLS_ADD)) as session:
        async with client_of(session) as client:
            stream = await client.chat.completions.create(
                model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hi"
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 3
            called = await client.chat.completions.create(model="m", messages=ASK, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in called]
            calls = [call for delta in deltas for call in delta.tool_calls or ()]
            assert calls[0].function is not None
            assert (calls[0].index, calls[0].function.name, calls[0].function.arguments) == (0, "add", '{"a": 1}')
    assert len(session.calls) == 2


async def test_models_are_listed(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy()) as session:
        async with client_of(session) as client:
            assert [model.id async for model in await client.models.list()] == ["policy"]
    with endpoint.session({"solver": BytePolicy(), "checker": BytePolicy()}) as session:
        async with client_of(session) as client:
            assert [model.id async for model in await client.models.list()] == ["solver", "checker"]


async def test_the_model_chooses_the_agent_where_there_are_several(endpoint: Endpoint) -> None:
    with endpoint.session({"solver": BytePolicy("5"), "checker": BytePolicy("no")}) as session:
        async with client_of(session) as client:
            answer = await client.chat.completions.create(model="checker", messages=ASK)
            assert answer.choices[0].message.content == "no"
            with pytest.raises(
                openai.NotFoundError, match=r"no model 'judge', expected one of \['solver', 'checker'\]"
            ):
                await client.chat.completions.create(model="judge", messages=ASK)
    assert [call.agent for call in session.calls] == ["checker"]


async def test_a_wrong_key_is_refused_at_once_and_reaches_no_policy(endpoint: Endpoint) -> None:
    policy = BytePolicy("hi")
    with endpoint.session(policy) as session:
        async with AsyncOpenAI(base_url=session.base_url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="the API key is unknown here"):
                await client.chat.completions.create(model="m", messages=ASK)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        status, _ = await post(endpoint, f"{session.api_key}x", b"{}")
        assert status == 401
    assert policy.heard == []
    assert endpoint.counts["401"] == 3


async def test_a_key_opens_nothing_after_its_session_and_nothing_of_another_one(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy("one")) as first, endpoint.session(BytePolicy("two")) as second:
        assert first.api_key != second.api_key
        async with client_of(second) as client:
            await client.chat.completions.create(model="m", messages=ASK)
        assert (len(first.calls), len(second.calls)) == (0, 1)
    status, body = await post(endpoint, second.api_key, json.dumps({"messages": ASK}).encode())
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"not json", "the request is no chat completion"),
        (b"[]", "the request is no chat completion"),
        (b'{"messages": []}', "messages is empty"),
        (b"{}", "missing required field `messages`"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "Invalid enum value 'robot'"),
        (b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "Invalid value 'image_url'"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', "max_tokens is 0"),
        (b'{"messages": [{"role": "user", "content": "x"}], "n": 2}', "n=2 is not supported here"),
        (b'{"messages": [{"role": "user", "content": "x"}], "stop": ["a"]}', "stop=['a'] is not supported"),
        (b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"}', "tool_choice='required'"),
        (b'{"messages": [{"role": "user", "content": "\xff"}]}', "the request is no chat completion"),
    ],
)
async def test_a_request_that_cannot_be_answered_says_why(endpoint: Endpoint, body: bytes, told: str) -> None:
    with endpoint.session(BytePolicy("hi")) as session:
        status, answer = await post(endpoint, session.api_key, body)
    assert status == 400
    assert told in answer["error"]["message"]
    assert session.calls == []


async def test_a_request_that_is_too_large_is_refused() -> None:
    async with Endpoint(EndpointConfig(max_request_kb=1)) as endpoint:
        with endpoint.session(BytePolicy("hi")) as session:
            status, answer = await post(endpoint, session.api_key, b"x" * 4096)
    assert (status, answer["error"]["message"]) == (413, "the request is larger than max_request_kb=1 KiB.")


async def test_sampling_is_the_runs_own_and_the_answer_says_so(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy("hi")) as session:
        async with client_of(session) as client:
            raw = await client.chat.completions.with_raw_response.create(
                model="m", messages=ASK, temperature=0.0, top_p=0.5, tool_choice="none"
            )
    assert raw.headers["x-vla-rl-ignored"] == "temperature, top_p"


async def test_a_null_is_as_good_as_nothing_and_what_is_not_read_is_named(endpoint: Endpoint) -> None:
    nulls = (
        "stream", "stream_options", "model", "tools", "tool_choice", "max_tokens", "n", "stop", "response_format",
        "temperature", "functions", "function_call", "modalities", "audio",
    )  # fmt: skip
    body = {"messages": ASK, **dict.fromkeys(nulls), "prediction": {"type": "content"}, "zeit\nraum": 1, "user": "me"}
    with endpoint.session(BytePolicy("hi")) as session:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers) as response,
        ):
            assert response.status == 200, await response.text()
            assert response.headers["x-vla-rl-ignored"] == r"prediction, zeit\nraum, user"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "add", "parameters": {}}]),
        ("function_call", {"name": "add"}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy", "format": "wav"}),
    ],
)
async def test_what_would_change_what_an_answer_means_is_refused(name: str, value: Any, endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy("hi")) as session:
        status, answer = await post(endpoint, session.api_key, json.dumps({"messages": ASK, name: value}).encode())
    assert status == 400
    assert answer["error"]["message"].startswith(f"{name}=")
    assert "is not supported here" in answer["error"]["message"]


async def test_a_prompt_that_leaves_no_room_is_told_as_openai_tells_it(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy("hi", context_size=10)) as session:
        async with client_of(session) as client:
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(model="m", messages=ASK)
    assert error.value.code == "context_length_exceeded"
    assert session.overflow is not None


async def test_a_policy_that_fails_is_remembered_and_the_client_is_told_little(endpoint: Endpoint) -> None:
    policy = BytePolicy("hi")
    policy.fails_with = RuntimeError("the engine's secret")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            with pytest.raises(openai.InternalServerError) as error:
                await client.chat.completions.create(model="m", messages=ASK)
    assert "secret" not in str(error.value)
    assert session.failure is policy.fails_with


async def test_what_is_still_being_answered_is_given_up_with_the_session_or_the_client(endpoint: Endpoint) -> None:
    policy = BytePolicy("hi")
    policy.is_stuck = True
    with endpoint.session(policy) as session:
        client = client_of(session)
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
        await policy.asked.wait()
    async with client:
        await policy.given_up.wait()
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            await asking
    policy.asked.clear()
    policy.given_up.clear()
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
            await policy.asked.wait()
            asking.cancel()
            await policy.given_up.wait()


def test_it_is_local_only_unless_asked() -> None:
    with pytest.raises(ConfigError, match="an address of this machine alone, unless allow_remote is set"):
        EndpointConfig(host="0.0.0.0")
    assert EndpointConfig(host="0.0.0.0", allow_remote=True).host == "0.0.0.0"
    assert EndpointConfig(host="::1").host == "::1"
