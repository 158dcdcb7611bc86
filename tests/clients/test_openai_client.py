"""The package openai, unchanged: responses, chat completions, parsed outputs, streams, log-probs,
several choices.
"""

import os
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from page import answer_of
from pydantic import BaseModel

ASK: Any = [{"role": "user", "content": "What is 2 plus 3?"}]
ADD: Any = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class Pick(BaseModel):
    colour: Literal["red", "blue"]
    is_dark: bool


class Add(BaseModel):
    """Add two numbers."""

    a: int
    b: int


@pytest.fixture
def adds() -> Iterator[OpenAI]:
    with OpenAI(
        base_url=os.environ["VLA_RL_BASE_URL"], api_key=os.environ["VLA_RL_CALCULATOR"]
    ) as client:
        yield client


@pytest.fixture
def real() -> Iterator[OpenAI]:
    with OpenAI(
        base_url=os.environ["VLA_RL_BASE_URL"], api_key=os.environ["VLA_RL_REAL"]
    ) as client:
        yield client


def test_a_response_and_its_continuation(adds: OpenAI) -> None:
    first = adds.responses.create(
        model="gpt-5", input="What is 2 plus 3?", instructions="Be brief."
    )
    assert first.output_text == "It is 5."
    again = adds.responses.create(model="gpt-5", input="Thanks.", previous_response_id=first.id)
    assert again.output_text == "It is 5."


def test_a_response_with_a_function(adds: OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "add", "parameters": ADD, "strict": True}]
    first = adds.responses.create(model="gpt-5", input="What is 2 plus 3?", tools=tools)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("add", '{"a": 2, "b": 3}')
    outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "5"}]
    final = adds.responses.create(
        model="gpt-5", input=outputs, previous_response_id=first.id, tools=tools
    )
    assert final.output_text == "It is 5."


def test_a_response_as_a_stream(adds: OpenAI) -> None:
    with adds.responses.stream(model="gpt-5", input="What is 2 plus 3?") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "It is 5."


def test_parsed_outputs(real: OpenAI) -> None:
    for _ in range(3):
        response = real.responses.parse(model="gpt-5", input="Pick.", text_format=Pick)
        assert isinstance(response.output_parsed, Pick)
        chat = real.chat.completions.parse(model="gpt-5", messages=ASK, response_format=Pick)
        assert isinstance(chat.choices[0].message.parsed, Pick)


def test_parsed_functions(adds: OpenAI) -> None:
    tool = openai.pydantic_function_tool(Add, name="add")
    chat = adds.chat.completions.parse(model="gpt-5", messages=ASK, tools=[tool])
    (call,) = chat.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Add(a=2, b=3)


def test_a_chat_as_a_stream_with_parsed_output(real: OpenAI) -> None:
    with real.chat.completions.stream(model="gpt-5", messages=ASK, response_format=Pick) as stream:
        for event in stream:
            assert event.type
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Pick)


def test_json_mode_is_json(real: OpenAI) -> None:
    answer = real.chat.completions.create(
        model="gpt-5", messages=ASK, response_format={"type": "json_object"}, max_tokens=400
    )
    choice = answer.choices[0]
    assert choice.message.content is not None
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or choice.message.content.endswith("}")


def test_a_forced_function_is_called(real: OpenAI) -> None:
    tools: Any = [
        {"type": "function", "function": {"name": "pick", "parameters": Pick.model_json_schema()}}
    ]
    forced: Any = {"type": "function", "function": {"name": "pick"}}
    answer = real.chat.completions.create(
        model="gpt-5", messages=ASK, tools=tools, tool_choice=forced
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    Pick.model_validate_json(call.function.arguments)


def test_several_choices_with_log_probs(real: OpenAI) -> None:
    answer = real.chat.completions.create(
        model="gpt-5", messages=ASK, n=4, logprobs=True, top_logprobs=2, max_completion_tokens=5
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        for token in choice.logprobs.content:
            assert token.logprob <= 0.0
            assert len(token.top_logprobs) == 2


def test_stop_texts(adds: OpenAI) -> None:
    answer = adds.chat.completions.create(model="gpt-5", messages=ASK, stop=[" 5"])
    assert answer.choices[0].message.content == "It is"


def test_text_completions(adds: OpenAI) -> None:
    answer = adds.completions.create(model="gpt-5", prompt="1, 2,", max_tokens=8, logprobs=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" and so ", "length")


def test_models(adds: OpenAI) -> None:
    assert [model.id for model in adds.models.list()] == ["policy"]
    assert adds.models.retrieve("gpt-5").id == "gpt-5"


def test_errors_are_the_clients_own(adds: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        adds.chat.completions.create(model="gpt-5", messages=ASK, n=1000)
    assert (refused.value.param, refused.value.code) == ("n", "unsupported_value")
    with pytest.raises(openai.NotFoundError, match="there is nothing at /v1/files"):
        adds.files.list()
    with pytest.raises(openai.AuthenticationError):
        adds.with_options(api_key="wrong").models.list()


def test_the_page_shows_what_runs() -> None:
    assert answer_of("with_openai.py", "What is 2 plus 3?") == "5"
