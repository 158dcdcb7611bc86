"""Completions through OpenAI's client: texts or tokens that are continued, structured outputs, log-probs that a
learner finds."""

import asyncio
import json
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

import numpy as np
import openai
import pytest
from byte_policy import EPISODE, BytePolicy
from clients import ASK, client_of
from pydantic import BaseModel, Field

from vla_rl.endpoint import Endpoint, Session
from vla_rl.endpoint.answers import get_reported_tokens, write_chat_log_probs, write_log_probs
from vla_rl.engines import DeviceLane, EngineConfig, TorchChatEngine
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.language import CausalLanguageModel, TinyConfig, tiny
from vla_rl.rollout.policies import EpisodePolicy
from vla_rl.types import Completion, Message, RegexFormat, ReplyOptions, StopReason
from vla_rl.types.language import TokenReport


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with asyncio.timeout(60), Endpoint() as endpoint:
        yield endpoint


async def asked_by(endpoint: Endpoint, **fields: Any) -> tuple[Any, BytePolicy, Any]:
    """Session, policy, and the answer."""
    policy = BytePolicy("one", "two", "three", "four")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            return (
                session,
                policy,
                await client.completions.create(**{"model": "m", "prompt": "1+", **fields}),
            )


async def test_a_text_is_continued_as_it_is(endpoint: Endpoint) -> None:
    session, policy, answer = await asked_by(
        endpoint, stop="\n", extra_body={"structured_outputs": {"regex": "a"}}
    )
    assert [(choice.text, choice.finish_reason) for choice in answer.choices] == [("one", "stop")]
    assert bytes(session.calls[0].completion.prompt_tokens.tolist()) == b"1+"
    assert policy.requests[0][2] == 16  # the limit that this API has if none is given
    assert policy.options == [ReplyOptions(stop=("\n",), format=RegexFormat(pattern="a"))]


@pytest.mark.parametrize(
    ("prompt", "read"),
    [([49, 43], [b"1+"]), (["a", "b"], [b"a", b"b"]), ([[49], [50, 51]], [b"1", b"23"])],
)
async def test_prompts_may_be_several_and_tokens(
    endpoint: Endpoint, prompt: Any, read: list[bytes]
) -> None:
    session, _, answer = await asked_by(endpoint, prompt=prompt, n=2)
    expected = [each for each in read for _ in range(2)]
    assert [bytes(call.completion.prompt_tokens.tolist()) for call in session.calls] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert answer.usage.prompt_tokens == sum(map(len, read))


async def test_log_probs_are_the_recorded_ones(endpoint: Endpoint) -> None:
    _, _, answer = await asked_by(endpoint, logprobs=2)
    found = answer.choices[0].logprobs
    assert (found.tokens, found.token_logprobs, found.text_offset) == (
        ["o", "n", "e"],
        [-0.5] * 3,
        [0, 1, 2],
    )
    assert found.top_logprobs[0] == {"?": -2.0}


async def test_a_stream_gives_a_choice_each(endpoint: Endpoint) -> None:
    _, _, stream = await asked_by(
        endpoint, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [choice.text for chunk in chunks for choice in chunk.choices] == ["one", "two"]
    assert chunks[-1].usage.completion_tokens == len("one\ntwo\n")


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        (
            {"prompt": []},
            "prompt",
            "prompt is [], expected a text, tokens, or a list of them that is not empty",
        ),
        ({"prompt": ["a", 1]}, "prompt", "prompt is ['a', 1], expected texts or lists of tokens"),
        (
            {"prompt": [-1]},
            "prompt",
            "prompt is [-1], expected token ids of the policy's vocabulary",
        ),
        ({"best_of": 3}, "best_of", "best_of is 3, expected at most n=1"),
        ({"echo": True}, "echo", "echo is True, expected false"),
        ({"suffix": "x"}, "suffix", "suffix is 'x', expected none"),
        ({"logprobs": 6}, "logprobs", "logprobs is 6, expected 0 to 5"),
    ],
)
async def test_a_refusal_names_exactly_the_rule_that_was_broken(
    endpoint: Endpoint, fields: Any, param: str, told: str
) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        await asked_by(endpoint, **fields)
    assert error.value.param == param
    assert error.value.body["message"].startswith(told)  # type: ignore[index]


def reply(finish: str = "stop", **others) -> Completion:
    fields = {
        "message": Message(role="assistant", content="hé"),
        "prompt_tokens": np.arange(2),
        "tokens": np.arange(3),
        "log_probs": np.array([-0.5, -1.0, -0.25]),
        "weight_versions": np.zeros(3, np.int64),
        "finish_reason": finish,
        "report": (
            TokenReport(text=b"h", alternatives=((b"h", -0.5), (b"x", -2.0))),
            TokenReport(text="é".encode()),
            TokenReport(text=b"<end>"),
        ),
    } | others
    return Completion(**fields)


def test_the_token_that_ends_a_reply_is_not_listed() -> None:
    assert [token.text for token, _ in get_reported_tokens(reply())] == [b"h", "é".encode()]


@pytest.mark.parametrize("others", [{"finish": "length"}, {"stopped_by": "END"}])
def test_a_reply_that_ended_without_such_a_token_is_listed_whole(others: dict[str, str]) -> None:
    assert len(get_reported_tokens(reply(**others))) == 3


def test_each_entry_has_its_bytes_and_the_likeliest_others() -> None:
    first, second = write_log_probs(reply())
    assert first == {
        "token": "h",
        "logprob": -0.5,
        "bytes": [104],
        "top_logprobs": [
            {"token": "h", "logprob": -0.5, "bytes": [104]},
            {"token": "x", "logprob": -2.0, "bytes": [120]},
        ],
    }
    assert (second["token"], second["bytes"]) == ("é", [0xC3, 0xA9])


def test_a_token_that_ends_inside_a_character_keeps_its_bytes() -> None:
    report = (TokenReport(text=b"\xc3"),)
    half = reply("length", report=report, log_probs=np.array([-1.0]))
    (entry,) = write_log_probs(half)
    assert (entry["token"], entry["bytes"]) == ("\ufffd", [0xC3])


def test_a_policy_that_reports_nothing_has_an_empty_list() -> None:
    assert write_chat_log_probs(reply(report=None)) == {"content": [], "refusal": None}


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
