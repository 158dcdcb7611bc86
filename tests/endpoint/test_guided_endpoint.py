"""A real policy behind the endpoint: structured outputs through OpenAI's client, and a learner that
agrees with them.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

import numpy as np
import pytest
from byte_policy import EPISODE
from clients import ASK, client_of
from pydantic import BaseModel, Field

from vla_rl.endpoint import Endpoint, Session
from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.rollout.policies import EpisodePolicy
from vla_rl.types import StopReason

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=512,
)


class Colour(Enum):
    red = "red"
    blue = "blue"


class Pick(BaseModel):
    colour: Colour
    number: int = Field(ge=0, le=9)


PAINT: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
            # random weights would choose much white space
            "x-guidance": {"item_separator": ",", "key_separator": ":"},
        },
        "strict": True,
    },
}


@pytest.fixture
def model() -> CausalLanguageModel:
    return tiny(SHAPE, ["a"], seed=0)


@pytest.fixture
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(num_threads=1) as lane:
        yield lane


@pytest.fixture
async def session(model: CausalLanguageModel, lane: DeviceLane) -> AsyncIterator[Session]:
    async with (
        asyncio.timeout(120),
        TorchChatEngine(model, lane, EngineConfig(max_reply=300)) as engine,
        Endpoint() as endpoint,
    ):
        with endpoint.session(EpisodePolicy(engine, EPISODE)) as session:
            yield session


async def test_structured_outputs_satisfy_their_schemas_and_the_learner_finds_the_recorded_log_probs(
    session: Session, model: CausalLanguageModel, lane: DeviceLane
) -> None:
    async with client_of(session) as client:
        parsed = await client.chat.completions.parse(model="m", messages=ASK, response_format=Pick)
        assert isinstance(parsed.choices[0].message.parsed, Pick)
        response = await client.responses.parse(model="m", input="hello", text_format=Pick)
        assert isinstance(response.output_parsed, Pick)
        forced: Any = {"type": "function", "function": {"name": "paint"}}
        called = await client.chat.completions.create(
            model="m", messages=ASK, tools=[PAINT], tool_choice=forced
        )
        (call,) = called.choices[0].message.tool_calls or ()
        assert call.type == "function"
        assert json.loads(call.function.arguments)["colour"] in ("red", "blue")
        several = await client.chat.completions.create(
            model="m",
            messages=ASK,
            n=3,
            logprobs=True,
            extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
        )
        assert {choice.message.content for choice in several.choices} <= {"yes", "no"}
        reported = [choice.logprobs.content for choice in several.choices if choice.logprobs]
        free = await client.chat.completions.create(model="m", messages=ASK, max_tokens=5)
        assert free.choices[0].finish_reason in ("length", "stop")
    recorded = [call.completion for call in session.calls]
    assert [reply.grammar is None for reply in recorded] == [False] * 6 + [True]
    for tokens, reply in zip(reported, recorded[3:6], strict=True):
        assert tokens is not None
        assert [token.logprob for token in tokens] == pytest.approx(reply.log_probs[:-1].tolist())
    seeds = {tuple(reply.tokens.tolist()) for reply in recorded[3:6]}
    assert len(seeds) > 1  # each choice is drawn from noise of its own
    trajectory = session.trajectory(EPISODE, 1.0, StopReason.TERMINATED)
    assert len(trajectory.steps) == 7
    learner = Learner(
        model, lane, LearnerConfig(optimizer=OptimizerConfig(warmup_steps=0), max_mismatch=1e-4)
    )
    report = await learner.update([trajectory], [1.0])
    assert report.metrics["update/log_prob_gap_max"] < 1e-4
    assert np.isfinite(report.metrics["update/loss"])


async def test_a_schema_that_no_grammar_can_express_is_the_requests_fault(session: Session) -> None:
    wanted: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"not": {}}, "strict": True},
    }
    async with client_of(session) as client:
        with pytest.raises(
            Exception, match=r"the grammar cannot be compiled: .* Unimplemented keys: \[.*not"
        ) as error:
            await client.chat.completions.create(model="m", messages=ASK, response_format=wanted)
    assert getattr(error.value, "status_code", None) == 400
    assert session.calls == []
