"""LangChain and LangGraph, unchanged: structured output in every way, tools, agents."""

import os
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from page import answer_of
from pydantic import BaseModel


class Pick(BaseModel):
    """A choice."""

    colour: Literal["red", "blue"]
    is_dark: bool


class Sum(BaseModel):
    """The sum of two numbers."""

    sum: int


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def model(key: str, **kwargs: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="gpt-5", base_url=os.environ["VLA_RL_BASE_URL"], api_key=os.environ[key], **kwargs
    )


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_a_model_is_invoked_and_streamed(use_responses_api: bool) -> None:
    adds = model("VLA_RL_CALCULATOR", use_responses_api=use_responses_api)
    assert adds.invoke("What is 2 plus 3?").text == "It is 5."
    assert "".join(chunk.text for chunk in adds.stream("What is 2 plus 3?")) == "It is 5."


@pytest.mark.parametrize("use_responses_api", [False, True])
@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_of_real_weights(
    method: Any, strict: bool | None, use_responses_api: bool
) -> None:
    picks = model("VLA_RL_REAL", use_responses_api=use_responses_api)
    picked = picks.with_structured_output(Pick, method=method, strict=strict).invoke("Pick.")
    assert isinstance(picked, Pick)


def test_json_mode() -> None:
    adds = model("VLA_RL_CALCULATOR").with_structured_output(Sum, method="json_mode")
    assert adds.invoke("What is 2 plus 3? Answer in JSON.") == Sum(sum=5)


def test_tools_are_bound_and_forced() -> None:
    adds = model("VLA_RL_CALCULATOR").bind_tools(
        [add], tool_choice="add", parallel_tool_calls=False, strict=True
    )
    (call,) = adds.invoke("What is 2 plus 3?").tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 2, "b": 3})


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_an_agent_calls_its_tool_and_answers(use_responses_api: bool) -> None:
    agent = create_agent(
        model("VLA_RL_CALCULATOR", use_responses_api=use_responses_api), tools=[add]
    )
    messages = agent.invoke({"messages": [("user", "What is 2 plus 3?")]})["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[-1].text == "It is 5."


def test_an_agent_ends_in_a_structured_response() -> None:
    agent = create_agent(model("VLA_RL_CALCULATOR"), tools=[add], response_format=Sum)
    assert agent.invoke({"messages": [("user", "What is 20 plus 3?")]})[
        "structured_response"
    ] == Sum(sum=23)


def test_log_probs_and_several_choices() -> None:
    real = model("VLA_RL_REAL", logprobs=True, top_logprobs=2, max_tokens=5, n=3)
    (choices,) = real.generate([[HumanMessage("hello")]]).generations
    assert len(choices) == 3
    for choice in choices:
        assert choice.message.response_metadata["logprobs"]["content"]


def test_text_completion() -> None:
    completes = OpenAI(
        model="gpt-5",
        base_url=os.environ["VLA_RL_BASE_URL"],
        api_key=os.environ["VLA_RL_CALCULATOR"],
    )
    assert completes.invoke("1, 2,") == " and so on"


def test_the_page_shows_what_runs() -> None:
    assert answer_of("with_langchain.py", "What is 2 plus 3?") == "It is 5."
