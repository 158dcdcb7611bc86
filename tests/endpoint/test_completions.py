"""`/v1/completions` through OpenAI's client: text and tokens that are continued as they are, with their log-probs."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
from byte_policy import BytePolicy
from clients import client_of

from vla_rl.endpoint import Endpoint
from vla_rl.endpoint.answers import get_reported_tokens, write_chat_log_probs, write_log_probs
from vla_rl.types import Completion, Message, RegexFormat, ReplyOptions
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
