"""Requests with fields of any kind: an answer, or an error in JSON, and never a failed policy."""

import json
import random
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest

from vla_rl.endpoint import Endpoint
from vla_rl.endpoint.completions import ChatFields, CompletionFields
from vla_rl.endpoint.messages import MessagesFields
from vla_rl.endpoint.responses import ResponseFields
from vla_rl.engines.chat_interface import Sampled, make_completion, make_question
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.types import ANY_REPLY, Completion, Prompt, ReplyOptions, ToolSpec

SHAPE = TinyConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16, vocab_size=300)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"name": "look", "description": "Look.", "parameters": SCHEMA}
SAID: Any = [{"role": "user", "content": "x"}]
APIS: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    "/chat/completions": (
        ChatFields,
        {"messages": SAID, "tools": [{"type": "function", "function": TOOL}]},
    ),
    "/completions": (CompletionFields, {"prompt": "x"}),
    "/messages": (
        MessagesFields,
        {"messages": SAID, "max_tokens": 5, "tools": [{"name": "look", "input_schema": SCHEMA}]},
    ),
    "/responses": (ResponseFields, {"input": "x", "tools": [{"type": "function", **TOOL}]}),
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
