"""The OpenAI Agents SDK, unchanged and as it is out of the box: its default is the responses API,
with strict tools.
"""

import asyncio
import os
from typing import Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    set_default_openai_client,
)
from openai import AsyncOpenAI
from page import answer_of
from pydantic import BaseModel

os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"


class Pick(BaseModel):
    colour: Literal["red", "blue"]
    is_dark: bool


class Sum(BaseModel):
    sum: int


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(autouse=True)
def as_adding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables in which the SDK looks for its model."""
    monkeypatch.setenv("OPENAI_BASE_URL", os.environ["VLA_RL_BASE_URL"])
    monkeypatch.setenv("OPENAI_API_KEY", os.environ["VLA_RL_CALCULATOR"])
    # one a test, as each has a loop of its own
    set_default_openai_client(AsyncOpenAI(), use_for_tracing=False)


def client(key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=os.environ["VLA_RL_BASE_URL"], api_key=os.environ[key])


def test_an_agent_calls_its_tool_and_answers() -> None:
    agent = Agent(name="adder", instructions="Add.", tools=[add])
    assert Runner.run_sync(agent, "What is 2 plus 3?").final_output == "It is 5."


def test_an_agent_with_tools_ends_in_its_output_type() -> None:
    agent = Agent(name="adder", tools=[add], output_type=Sum)
    assert Runner.run_sync(agent, "What is 20 plus 3?").final_output == Sum(sum=23)


def test_an_agent_must_call_a_tool_once() -> None:
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    agent = Agent(
        name="adder", tools=[add], model_settings=settings, tool_use_behavior="stop_on_first_tool"
    )
    assert Runner.run_sync(agent, "What is 4 plus 4?").final_output == "8"


def test_a_streamed_run_gives_the_same() -> None:
    async def stream() -> tuple[str, set[str]]:
        run = Runner.run_streamed(Agent(name="adder", tools=[add]), "What is 2 plus 3?")
        kinds = {event.type async for event in run.stream_events()}
        return run.final_output, kinds

    said, kinds = asyncio.run(stream())
    assert said == "It is 5."
    assert kinds >= {"raw_response_event", "run_item_stream_event"}


def test_a_session_remembers_what_was_said() -> None:
    agent, session = Agent(name="adder", tools=[add]), SQLiteSession("one")

    async def converse() -> list[str]:
        return [
            (await Runner.run(agent, text, session=session)).final_output
            for text in ("What is 2 plus 3?", "Thanks.")
        ]

    assert asyncio.run(converse())[0] == "It is 5."
    assert len(asyncio.run(session.get_items())) >= 6


def test_real_weights_give_the_output_type_through_both_apis() -> None:
    async def run() -> None:
        async with client("VLA_RL_REAL") as real:
            for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
                agent = Agent(
                    name="picker", output_type=Pick, model=kind("gpt-5", openai_client=real)
                )
                assert isinstance((await Runner.run(agent, "Pick.")).final_output, Pick)

    asyncio.run(run())


def test_the_chat_completions_model_calls_tools_too() -> None:
    async def run() -> str:
        async with client("VLA_RL_CALCULATOR") as adds:
            agent = Agent(
                name="adder",
                tools=[add],
                model=OpenAIChatCompletionsModel("gpt-5", openai_client=adds),
            )
            return (await Runner.run(agent, "What is 2 plus 3?")).final_output

    assert asyncio.run(run()) == "It is 5."


def test_the_page_shows_what_runs() -> None:
    assert answer_of("with_agents_sdk.py", "What is 2 plus 3?") == "It is 5."
