"""`/v1/completions` through OpenAI's client: text and tokens that are continued as they are."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from byte_policy import BytePolicy
from clients import client_of

from vla_rl.endpoint import Endpoint
from vla_rl.types import RegexFormat, ReplyOptions


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
