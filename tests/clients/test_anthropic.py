"""The package anthropic, unchanged: messages, streams and tools."""

import os
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from page import answer_of

TOOLS: Any = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]
ASK: Any = [{"role": "user", "content": "What is 2 plus 3?"}]


@pytest.fixture
def adds() -> Iterator[Anthropic]:
    url = os.environ["VLA_RL_BASE_URL"].removesuffix("/v1")  # this client adds it
    with Anthropic(base_url=url, api_key=os.environ["VLA_RL_CALCULATOR"]) as client:
        yield client


def test_a_message_with_a_tool_goes_there_and_back(adds: Anthropic) -> None:
    first = adds.messages.create(
        model="claude", max_tokens=64, messages=ASK, tools=TOOLS, system="Be brief."
    )
    (use,) = first.content
    assert use.type == "tool_use"
    assert (first.stop_reason, use.name, use.input) == ("tool_use", "add", {"a": 2, "b": 3})
    history: Any = [
        *ASK,
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "5"}],
        },
    ]
    final = adds.messages.create(model="claude", max_tokens=64, messages=history, tools=TOOLS)
    assert final.content[0].text == "It is 5."  # type: ignore[union-attr]


def test_a_stream_gives_the_same(adds: Anthropic) -> None:
    with adds.messages.stream(model="claude", max_tokens=64, messages=ASK) as stream:
        assert "".join(stream.text_stream) == "It is 5."
        assert stream.get_final_message().stop_reason == "end_turn"


def test_stop_sequences(adds: Anthropic) -> None:
    message = adds.messages.create(
        model="claude", max_tokens=64, messages=ASK, stop_sequences=[" 5"]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " 5")


def test_errors_are_the_clients_own(adds: Anthropic) -> None:
    with pytest.raises(
        anthropic.BadRequestError, match="messages is \\[\\], expected at least one message"
    ):
        adds.messages.create(model="claude", max_tokens=64, messages=[])
    with pytest.raises(anthropic.AuthenticationError):
        adds.with_options(api_key="wrong").messages.create(
            model="claude", max_tokens=64, messages=ASK
        )


def test_the_page_shows_what_runs() -> None:
    assert answer_of("with_anthropic.py", "What is 2 plus 3?") == "It is 5."
