"""Keys, models, errors and disconnects: what every API of the endpoint has in common."""

import asyncio
import importlib
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
from byte_policy import BytePolicy, as_tokens
from clients import ASK, client_of, request
from openai import AsyncOpenAI

from vla_rl.endpoint import Endpoint, EndpointConfig
from vla_rl.errors import ConfigError
from vla_rl.types import EnvSpec, EpisodeSpec, StopReason

PATHS = ["/chat/completions", "/responses", "/completions", "/messages"]


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with asyncio.timeout(60), Endpoint() as endpoint:
        yield endpoint


async def test_an_answer_comes_back_and_is_recorded_token_by_token(endpoint: Endpoint) -> None:
    policy = BytePolicy("hi")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            answer = await client.chat.completions.create(model="gpt-anything", messages=ASK)
    assert answer.choices[0].message.content == "hi"
    assert (answer.choices[0].finish_reason, answer.model) == ("stop", "gpt-anything")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        len("<user>hello\n<assistant>"),
        3,
    )
    (call,) = session.calls
    assert np.array_equal(call.completion.prompt_tokens, as_tokens("<user>hello\n<assistant>"))
    assert np.array_equal(call.completion.tokens, as_tokens("hi\n"))
    assert call.completion.log_probs.tolist() == [-0.5, -0.5, -0.5]
    assert call.completion.weight_versions.tolist() == [7, 8, 9]


async def test_models_are_listed_and_found_by_name(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy()) as session:
        async with client_of(session) as client:
            assert [model.id async for model in await client.models.list()] == ["policy"]
            assert (await client.models.retrieve("gpt-5/mini")).id == "gpt-5/mini"  # any name does
    with endpoint.session({"solver": BytePolicy(), "checker": BytePolicy()}) as session:
        async with client_of(session) as client:
            assert [model.id async for model in await client.models.list()] == ["solver", "checker"]
            assert (await client.models.retrieve("solver")).id == "solver"
            with pytest.raises(
                openai.NotFoundError,
                match=r"no model 'judge', expected one of \['solver', 'checker'\]",
            ):
                await client.models.retrieve("judge")


async def test_the_model_chooses_the_agent_where_there_are_several(endpoint: Endpoint) -> None:
    with endpoint.session({"solver": BytePolicy("5"), "checker": BytePolicy("no")}) as session:
        async with client_of(session) as client:
            answer = await client.chat.completions.create(model="checker", messages=ASK)
            assert answer.choices[0].message.content == "no"
            with pytest.raises(openai.NotFoundError, match="no model 'judge'") as error:
                await client.chat.completions.create(model="judge", messages=ASK)
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    assert [call.agent for call in session.calls] == ["checker"]


async def test_a_wrong_key_is_refused_at_once_and_reaches_no_policy(endpoint: Endpoint) -> None:
    policy = BytePolicy("hi")
    with endpoint.session(policy) as session:
        async with AsyncOpenAI(base_url=session.base_url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="the API key is unknown here"):
                await client.chat.completions.create(model="m", messages=ASK)
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
        status, _ = await request(
            endpoint, "POST", "/chat/completions", f"{session.api_key}x", b"{}"
        )
        assert status == 401
    assert policy.requests == []
    assert endpoint.counts["401"] == 3


async def test_a_key_opens_nothing_after_its_session_and_nothing_of_another_one(
    endpoint: Endpoint,
) -> None:
    with (
        endpoint.session(BytePolicy("one")) as first,
        endpoint.session(BytePolicy("two")) as second,
    ):
        assert first.api_key != second.api_key
        async with client_of(second) as client:
            await client.chat.completions.create(model="m", messages=ASK)
        assert (len(first.calls), len(second.calls)) == (0, 1)
    body = json.dumps({"messages": ASK}).encode()
    status, answer = await request(endpoint, "POST", "/chat/completions", second.api_key, body)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


async def test_a_key_can_be_used_again_once_its_session_is_over(endpoint: Endpoint) -> None:
    with (
        endpoint.session(BytePolicy("one")) as first,
        pytest.raises(ValueError, match="that of a session that is not over"),
        endpoint.session(BytePolicy("two"), api_key=first.api_key),
    ):
        pass
    async with client_of(first) as client:
        with endpoint.session(BytePolicy("two"), api_key=first.api_key) as second:
            answer = await client.chat.completions.create(model="m", messages=ASK)
    assert answer.choices[0].message.content == "two"
    assert (len(first.calls), len(second.calls)) == (0, 1)


@pytest.mark.parametrize(
    ("method", "path", "status", "told"),
    [
        (
            "GET",
            "/files",
            404,
            "there is nothing at /v1/files, expected one of /v1/chat/completions, /v1/responses",
        ),
        (
            "POST",
            "/responses/resp_1/cancel",
            404,
            "there is nothing at /v1/responses/resp_1/cancel",
        ),
        ("GET", "/chat/completions", 405, "GET /v1/chat/completions is not allowed, expected POST"),
        ("DELETE", "/models", 405, "DELETE /v1/models is not allowed, expected GET, HEAD"),
    ],
)
async def test_a_wrong_path_or_method_is_told_in_openais_format(
    endpoint: Endpoint, method: str, path: str, status: int, told: str
) -> None:
    with endpoint.session(BytePolicy()) as session:
        found, body = await request(endpoint, method, path, session.api_key)
    assert found == status
    assert body["error"]["message"].startswith(told)
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"not json", "the body is not a JSON object: "),
        (b"[]", "the body is not a JSON object: "),
        (b'{"model": "\xff", %s}', "model: "),
        (b'{"model": 3, %s}', "model: Expected `str`, got `int`"),
        (b"{}", ""),
    ],
)
async def test_a_body_that_cannot_be_read_is_told_on_every_path(
    endpoint: Endpoint, path: str, body: bytes, told: str
) -> None:
    needed = (
        b'"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x", '
        b'"max_tokens": 5'
    )
    with endpoint.session(BytePolicy()) as session:
        status, answer = await request(
            endpoint, "POST", path, session.api_key, body.replace(b"%s", needed)
        )
    assert status == 400
    assert answer["error"]["message"].startswith(told)
    assert answer["error"]["type"] == "invalid_request_error"
    assert session.calls == []


async def test_a_prompt_that_leaves_no_room_is_told_as_openai_tells_it(endpoint: Endpoint) -> None:
    with endpoint.session(BytePolicy("hi", context_size=10)) as session:
        async with client_of(session) as client:
            with pytest.raises(openai.BadRequestError) as error:
                await client.chat.completions.create(model="m", messages=ASK)
    assert error.value.code == "context_length_exceeded"
    assert session.overflow is not None


async def test_a_policy_that_fails_is_no_fault_of_the_client_and_is_kept_for_the_episode(
    endpoint: Endpoint,
) -> None:
    policy = BytePolicy("hi")
    policy.fails_with = ZeroDivisionError("by zero")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            with pytest.raises(
                openai.InternalServerError, match="the policy failed: ZeroDivisionError"
            ):
                await client.chat.completions.create(model="m", messages=ASK)
    assert session.failure is policy.fails_with


async def test_a_generation_is_given_up_when_its_client_or_its_session_is_gone(
    endpoint: Endpoint,
) -> None:
    policy = BytePolicy("hi")
    policy.is_stuck = True
    with endpoint.session(policy) as session:
        client = client_of(session)
        asking = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
        await policy.asked.wait()
    async with client:
        await policy.given_up.wait()
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            await asking
    policy.asked.clear()
    policy.given_up.clear()
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
            await policy.asked.wait()
            asking.cancel()
            await policy.given_up.wait()


async def test_one_of_several_replies_that_fails_ends_the_others_and_nothing_is_recorded(
    endpoint: Endpoint,
) -> None:
    class Failing(BytePolicy):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            self.is_stuck = not self.requests  # the first waits for ever
            if len(self.requests) == 1:
                self.fails_with = LookupError("second")
            return await super().generate(*args, **kwargs)

    policy = Failing("a", "b")
    with endpoint.session(policy) as session:
        async with client_of(session) as client:
            with pytest.raises(openai.InternalServerError, match="LookupError"):
                await client.chat.completions.create(model="m", messages=ASK, n=2)
    assert policy.given_up.is_set()
    assert session.calls == []


async def test_an_expected_body_is_asked_for_and_a_key_may_stand_in_anthropics_header(
    endpoint: Endpoint,
) -> None:
    with endpoint.session(BytePolicy("hi", "hi")) as session:
        body = {"model": "m", "messages": ASK}
        async with aiohttp.ClientSession() as client:
            url, headers = (
                f"{session.base_url}/chat/completions",
                {"Authorization": f"Bearer {session.api_key}"},
            )
            async with client.post(url, json=body, headers=headers, expect100=True) as response:
                assert response.status == 200
            async with client.post(
                url, json=body, headers={"x-api-key": session.api_key}
            ) as response:
                assert response.status == 200


def test_it_is_local_only_unless_asked() -> None:
    with pytest.raises(
        ConfigError, match="an address of this machine alone, unless allow_remote is set"
    ):
        EndpointConfig(host="0.0.0.0")
    assert EndpointConfig(host="0.0.0.0", allow_remote=True).host == "0.0.0.0"
    assert EndpointConfig(host="::1").host == "::1"


async def test_it_can_be_opened_again_and_on_localhost() -> None:
    endpoint = Endpoint(EndpointConfig(host="localhost"))
    for _ in range(2):
        async with asyncio.timeout(60), endpoint:
            with endpoint.session(BytePolicy("hi")) as session:
                async with client_of(session) as client:
                    assert (await client.models.retrieve("policy")).id == "policy"


PAGE = Path(__file__).parents[2] / "docs" / "endpoint.md"
BLOCKS = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL))


@pytest.fixture
def pages(import_folder: Path) -> Path:
    for name, text in BLOCKS.items():
        (import_folder / name).write_text(text)
    return import_folder


async def test_an_agent_of_the_real_client_is_run_with_two_changed_lines(pages: Path) -> None:
    assert BLOCKS["my_agent.py"].count("# changed") == 2
    spec = EnvSpec(id="text/arithmetic", kwargs={"num_operators": 1, "min_tool_calls": 0})
    episode = EpisodeSpec(
        episode_id=0, group_id=0, member=0, env=spec, task="sums", seed=9, policy_seed=0
    )
    from vla_rl.envs.text.arithmetic import draw_problem

    problem = draw_problem(9, num_operators=1, num_digits=2, operators="+-")
    policy = BytePolicy("hmm", str(problem.value))
    trajectory = await importlib.import_module("play").play(episode, policy)
    assert trajectory.stop_reason is StopReason.SUCCESS
    assert policy.requests[0][0][0].content == f"Think first. {problem.text}=?"
    assert (len(trajectory.steps), trajectory.info["num_threads"]) == (2, 1)
    assert trajectory.undiscounted_return == 1.0


def test_the_verifiers_page_imports(pages: Path) -> None:
    assert callable(importlib.import_module("verifiers_pool").play_row)
