"""Whatever a client sends, an error is JSON in the format of an API, no answer is recorded, no policy fails."""

import asyncio
import gzip
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from byte_policy import BytePolicy
from clients import request

from vla_rl.endpoint import Endpoint, Session
from vla_rl.endpoint.api import encode_body
from vla_rl.endpoint.completions import ChatFields, CompletionFields
from vla_rl.endpoint.http import RequestError, anthropic_error, openai_error
from vla_rl.endpoint.messages import MessagesFields
from vla_rl.endpoint.responses import ResponseFields
from vla_rl.engines.chat_interface import Sampled, make_completion, make_question
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.types import ANY_REPLY, Completion, Message, Prompt, ReplyOptions, ToolCall, ToolSpec

SAID: Any = [{"role": "user", "content": "x"}]

ASKED: dict[str, dict[str, Any]] = {
    "/chat/completions": {"messages": SAID},
    "/responses": {"input": "x"},
    "/completions": {"prompt": "x"},
    "/messages": {"messages": SAID, "max_tokens": 5},
}
"""A request for each path."""


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with asyncio.timeout(60), Endpoint() as endpoint:
        yield endpoint


async def sent(endpoint: Endpoint, data: bytes) -> tuple[int, bytes, bytes]:
    """Status, headers and body of the answer to some bytes."""
    port = int(endpoint.base_url.split(":")[2].partition("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    body = await reader.readexactly(int(length))
    writer.close()
    return int(head.split()[1]), head, body


def post(session: Session, *headers: str, body: bytes = b"{}", length: bool = True) -> bytes:
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        f"Authorization: Bearer {session.api_key}",
        *headers,
        *([f"Content-Length: {len(body)}"] if length else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"GET /v1/models HTTP/9.9\r\n\r\n",
        b"BREW /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nX\x00Y: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nXY\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET http:///x HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"X%d: a\r\n" % n for n in range(5000)) + b"\r\n",
        b"CONNECT a:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=lambda data: data[:24].decode("latin-1"),
)
async def test_what_is_no_request_is_answered_in_json(endpoint: Endpoint, data: bytes) -> None:
    status, head, body = await sent(endpoint, data)
    assert status in (400, 404, 405)
    assert b"content-type: application/json" in head.lower()
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert len(body) < 1000


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (["Content-Encoding: gzip"], b"hello", 400),
        (["Content-Encoding: gzip"], gzip.compress(b"{}", mtime=0)[:-4], 400),
        (["Content-Encoding: deflate"], b"hello", 400),
        (["Content-Encoding: br"], b"hello", 400),
        (["Expect: pony"], b"{}", 417),
        (["Transfer-Encoding: chunked"], b"zz\r\nhello\r\n0\r\n\r\n", 400),
        (["Transfer-Encoding: pony"], b"{}", 400),
        (["Content-Length: abc"], b"{}", 400),
        (["Content-Length: -5"], b"{}", 400),
    ],
)
async def test_a_body_that_is_not_what_its_headers_say_is_told_in_json(
    endpoint: Endpoint, headers: list[str], body: bytes, status: int
) -> None:
    with endpoint.session(BytePolicy()) as session:
        length = not any("Length" in each or "Transfer" in each for each in headers)
        found, head, answer = await sent(
            endpoint, post(session, *headers, body=body, length=length)
        )
    assert found == status
    assert b"content-type: application/json" in head.lower()
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"


async def test_a_compressed_body_is_read(endpoint: Endpoint) -> None:
    body = gzip.compress(json.dumps({"messages": SAID}).encode())
    with endpoint.session(BytePolicy("hi")) as session:
        status, _, answer = await sent(endpoint, post(session, "Content-Encoding: gzip", body=body))
    assert status == 200
    assert json.loads(answer)["choices"][0]["message"]["content"] == "hi"


TOOL = {"name": "look", "parameters": {"type": "object"}}


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
@pytest.mark.parametrize(
    "choice",
    [
        {"type": "allowed_tools", "tools": 7},
        {"type": "allowed_tools", "tools": {"name": "look"}},
        {"type": "allowed_tools", "allowed_tools": 5},
        {"type": "allowed_tools", "tools": ["look"]},
        {"type": "allowed_tools", "tools": [{"function": None}]},
        {"type": "allowed_tools", "tools": [], "mode": {"a": 1}},
        {"type": "function", "function": 3},
        {"type": "function", "name": 3},
        {"type": "function", "function": {"name": None}},
        {"type": ["function"]},
        {"type": "pony"},
        7,
        ["auto"],
        "look",
        True,
    ],
    ids=str,
)
async def test_a_choice_of_tools_that_is_none_is_told_with_the_field(
    endpoint: Endpoint, path: str, choice: Any
) -> None:
    tools = [{"type": "function", "function": TOOL}] if "chat" in path else [TOOL]
    asked = {**ASKED[path], "tools": tools, "tool_choice": choice}
    with endpoint.session(BytePolicy("hi")) as session:
        status, answer = await request(
            endpoint, "POST", path, session.api_key, json.dumps(asked).encode()
        )
    assert (status, session.calls, session.failure) == (400, [], None)
    assert answer["error"]["param"].startswith("tool_choice")
    assert "expected" in answer["error"]["message"]


@pytest.mark.parametrize("path", ASKED)
async def test_a_bad_value_of_any_size_is_repeated_in_short(endpoint: Endpoint, path: str) -> None:
    long = "a" * 70_000
    for fields in (
        {"model": long},
        {"model": {"a": long}},
        {"tool_choice": {"type": long}},
        {
            "messages": [{"role": long, "content": "x"}],
            "prompt": {long: 1},
            "input": [{"type": long}],
        },
        {"prompt": [], "messages": [], "input": [], "tools": [long], "n": long},
    ):
        with endpoint.session({"a": BytePolicy("hi"), "b": BytePolicy("hi")}) as session:
            asked = json.dumps({**ASKED[path], "model": "a", **fields}).encode()
            status, answer = await request(endpoint, "POST", path, session.api_key, asked)
        if status != 200:
            assert status in (400, 404)
            assert len(json.dumps(answer)) < 1500


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("depth", [600, 900, 5000])
async def test_a_body_nested_deeply_is_no_failure_of_the_policy(
    endpoint: Endpoint, path: str, depth: int
) -> None:
    nested = "[" * depth + "]" * depth
    needed = json.dumps(ASKED[path])[:-1]
    for field in (
        "prompt",
        "tools",
        "conversation",
        "tool_choice",
        "metadata",
        "functions",
        "audio",
    ):
        body = f'{needed}, "{field}": {nested}, "response_format": {nested}}}'
        with endpoint.session(BytePolicy("hi")) as session:
            status, answer = await request(endpoint, "POST", path, session.api_key, body.encode())
        assert (status, session.failure) in ((400, None), (200, None))
        assert status == 200 or answer["error"]["message"]
    block = f'{{"type": "tool_use", "id": "a", "name": "b", "input": {{"a": {nested}}}}}'
    body = f'{{"max_tokens": 5, "messages": [{{"role": "assistant", "content": [{block}]}}]}}'
    with endpoint.session(BytePolicy("hi")) as session:
        status, _ = await request(endpoint, "POST", "/messages", session.api_key, body.encode())
    assert (status, session.failure) in ((400, None), (200, None))


DEEP = '{"a":' * 3000 + "1" + "}" * 3000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(
    ("said", "input_of_tool"),
    [
        (Message(role="assistant", tool_calls=(ToolCall(id="c", name="b", arguments=DEEP),)), DEEP),
        (
            Message(
                role="assistant",
                tool_calls=(ToolCall(id="c", name="b", arguments='{"a": "\\ud835"}'),),
            ),
            '{"a": "\\ud835"}',
        ),
        (Message(role="assistant", tool_calls=(ToolCall(id="c", name="b", arguments="[1"),)), "[1"),
        (
            Message(
                role="assistant",
                tool_calls=(ToolCall(id="c", name="b", arguments="9" * 5000),),
            ),
            None,
        ),
    ],
    ids=["deep", "half a pair", "no JSON", "a long number"],
)
async def test_whatever_a_policy_writes_is_answered_and_recorded(
    endpoint: Endpoint, path: str, said: Message, input_of_tool: str | None, stream: bool
) -> None:
    with endpoint.session(BytePolicy(said)) as session:
        if stream:
            head = post(session).split(b"\r\n\r\n")[0].splitlines()[1:3]
            body = json.dumps({**ASKED[path], "stream": True}).encode()
            lines = [f"POST /v1{path} HTTP/1.1".encode(), *head, b"Content-Length: %d" % len(body)]
            port = int(endpoint.base_url.split(":")[2].partition("/")[0])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"\r\n".join([*lines, b"Connection: close", b"", b""]) + body)
            answered = await reader.read()
            writer.close()
            assert b" 200 OK\r\n" in answered
            assert answered.endswith(b"0\r\n\r\n")
        else:
            body = json.dumps(ASKED[path]).encode()
            status, answer = await request(endpoint, "POST", path, session.api_key, body)
            assert status == 200
            if path == "/messages" and input_of_tool is not None:
                assert answer["content"][0]["input"] == {"value": input_of_tool}
    assert (len(session.calls), session.failure) == (1, None)


async def test_half_a_surrogate_pair_of_a_page_is_replaced(endpoint: Endpoint) -> None:
    body = b'{"messages": [{"role": "user", "content": "half: \\ud835, whole: \\ud835\\udc00"}]}'
    policy = BytePolicy("hi")
    with endpoint.session(policy) as session:
        status, _ = await request(endpoint, "POST", "/chat/completions", session.api_key, body)
    assert status == 200
    assert policy.requests[0][0][0].content == "half: \ufffd, whole: \U0001d400"


def test_half_a_surrogate_pair_of_a_policy_is_replaced() -> None:
    assert json.loads(encode_body({"text": "caf\udce9"})) == {"text": "caf\ufffd"}
    assert encode_body({"text": "a"}) == b'{"text":"a"}'


async def test_an_answer_that_cannot_be_written_is_not_trained_on(endpoint: Endpoint) -> None:
    wrong = Message(role="assistant", content=object())  # type: ignore[arg-type]
    policy = BytePolicy("hi")

    async def generate(prompt: Any, **options: Any) -> Any:
        import msgspec

        reply = await BytePolicy("hi").generate(prompt, **options)
        return msgspec.structs.replace(reply, message=wrong)

    policy.generate = generate  # type: ignore[method-assign]
    with endpoint.session(policy) as session:
        body = json.dumps({"messages": SAID}).encode()
        status, answer = await request(endpoint, "POST", "/chat/completions", session.api_key, body)
    assert (status, session.calls) == (500, [])
    assert answer["error"]["message"].startswith("the answer cannot be written: ")
    assert isinstance(session.failure, TypeError)


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (404, "not_found_error", "not_found_error"),
        (413, "invalid_request_error", "invalid_request_error"),
        (429, "rate_limit_error", "rate_limit_error"),
        (500, "server_error", "api_error"),
        (503, "server_error", "api_error"),
    ],
)
def test_the_type_follows_from_the_status(status: int, openai: str, anthropic: str) -> None:
    error = RequestError("no", status=status)
    assert openai_error(error)["error"]["type"] == openai
    assert anthropic_error(error)["error"]["type"] == anthropic


def test_openai_gets_the_field_and_the_code_and_anthropic_does_not() -> None:
    error = RequestError("n is 2, expected 1", code="unsupported", param="n")
    assert openai_error(error) == {
        "error": {
            "message": "n is 2, expected 1",
            "type": "invalid_request_error",
            "param": "n",
            "code": "unsupported",
        }
    }
    assert anthropic_error(error) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "n is 2, expected 1"},
    }


SHAPE = TinyConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, vocab_size=300)

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}

LOOK = {"name": "look", "description": "Look.", "parameters": SCHEMA}

APIS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/chat/completions": (
        ChatFields,
        {"messages": SAID, "tools": [{"type": "function", "function": LOOK}]},
    ),
    "/completions": (CompletionFields, {"prompt": "x"}),
    "/messages": (
        MessagesFields,
        {"messages": SAID, "max_tokens": 5, "tools": [{"name": "look", "input_schema": SCHEMA}]},
    ),
    "/responses": (ResponseFields, {"input": "x", "tools": [{"type": "function", **LOOK}]}),
}
"""Each API, and a request that it answers."""

KEYS = (
    *("type", "text", "role", "content", "name", "function", "tools", "mode", "allowed_tools"),
    *("json_schema", "schema", "strict", "id", "arguments", "input", "call_id", "output"),
    *("tool_use_id", "format", "json", "regex", "choice", "grammar", "properties", "enum"),
    *("items", "$ref", "required", "anyOf", "pattern"),
)

TEXTS = (
    *("auto", "none", "required", "function", "allowed_tools", "user", "assistant", "system"),
    *("tool", "text", "json_schema", "json_object", "object", "string", "tool_use", "tool_result"),
    *("input_text", "function_call", "function_call_output", "message", "look", "[a-z]+", "("),
    *('start: "a"', "start: x", "\ud835", "", "a" * 300),
)

PLAIN = (None, True, False, 0, 1, -1, 3, 10**20, 1.5, 1e300, [], {})


class Short:
    """A policy that says two letters; all but the sampling is a real engine's."""

    def __init__(self, model: CausalLanguageModel) -> None:
        self._model = model

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Any = (),
        sampling: Any = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        given: tuple[ToolSpec, ...] = tuple(tools)
        asked = make_question(self._model, prompt, given, options)
        tokens = np.array([60, 61, min(self._model.stop_tokens)])
        sampled = Sampled(
            tokens=tokens,
            log_probs=np.full(3, -0.5, np.float32),
            versions=np.zeros(3, np.int64),
            finish_reason="stop",
        )
        return make_completion(self._model, asked, sampled)


def draw_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.45:
        return rng.choice((rng.choice(PLAIN), rng.choice(TEXTS)))
    if kind < 0.65:
        return [draw_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(KEYS): draw_value(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def find_items(value: Any) -> list[tuple[Any, Any]]:
    """Return every place in JSON that a value can be put at."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    inner = [value[key] for key in keys if isinstance(value[key], dict | list)]
    return [
        *((value, key) for key in keys),
        *(item for each in inner for item in find_items(each)),
    ]


def draw_request(rng: random.Random) -> tuple[str, bytes]:
    path = rng.choice(list(APIS))
    kind, asked = APIS[path]
    body = json.loads(json.dumps(asked))
    for _ in range(rng.randint(0, 2)):
        if items := find_items(body):
            container, key = rng.choice(items)
            container[key] = draw_value(rng)
    fields = [field.encode_name for field in msgspec.structs.fields(kind)]
    for _ in range(rng.randint(0, 3)):
        body[rng.choice(fields)] = draw_value(rng)
    return path, json.dumps(body).encode()


@pytest.mark.parametrize(
    "num_requests",
    [300, pytest.param(10_000, marks=[pytest.mark.proof, pytest.mark.timeout(1800)])],
)
async def test_a_request_is_answered_or_refused_in_json_whatever_its_fields_are(
    num_requests: int,
) -> None:
    policy, rng = Short(tiny(SHAPE, ["a"], seed=0)), random.Random(7)
    statuses: dict[int, int] = {}
    async with Endpoint() as endpoint, aiohttp.ClientSession() as client:
        for _ in range(num_requests):
            path, body = draw_request(rng)
            with endpoint.session(policy) as session:
                headers = {"Authorization": f"Bearer {session.api_key}"}
                async with client.post(
                    endpoint.base_url + path, data=body, headers=headers
                ) as response:
                    answer = await response.read()
            statuses[response.status] = statuses.get(response.status, 0) + 1
            assert session.failure is None, (path, body)
            if response.status != 200:
                assert response.status == 400, (path, body)
                assert response.content_type == "application/json"
                assert json.loads(answer)["error"]["message"]
                assert len(answer) < 2000
                assert session.calls == []
    assert min(statuses[200], statuses[400]) > num_requests // 10
