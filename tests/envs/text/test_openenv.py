"""Environments of OpenEnv as text environments: how an action is written, and what ends an episode."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from openenv_server import SCHEMAS, serve
from sample_tasks import ask_tool, say

from vla_rl import EnvSpec, EpisodeSpec
from vla_rl.envs.text import TextEnvPool, openenv_session
from vla_rl.envs.text.openenv import observation_text, read_form
from vla_rl.errors import ActorDied, ConfigError, EnvError
from vla_rl.types import JsonFormat


@asynccontextmanager
async def lease(url: str, seed: int = 3, **kwargs: Any) -> AsyncIterator[Any]:
    spec = EnvSpec(id="text/openenv", kwargs={"url": url, **kwargs})
    episode = EpisodeSpec(
        episode_id=0, group_id=0, member=0, env=spec, task="openenv", seed=seed, policy_seed=0
    )
    async with asyncio.timeout(30), TextEnvPool(specs=[spec]) as pool, pool.lease(episode) as env:
        yield env


async def test_an_action_of_one_text_is_the_reply_itself() -> None:
    async with serve("question") as server, lease(server.url, reset={"size": 1}) as env:
        start = await env.reset()
        assert [message.content for message in start.messages] == ["Of seed 3: 2 + 2?"]
        assert (start.tools, start.options.format) == ((), None)
        done = await env.step(say(" 4"))
        assert (done.terminated, done.reward, done.info["is_success"]) == (True, 1.0, True)
        reset, step = server.received
        assert reset["data"] == {"seed": 3, "size": 1}
        assert step == {"type": "step", "data": {"answer": " 4"}}


async def test_other_actions_are_json_objects_to_which_replies_are_restricted() -> None:
    async with serve("grid") as server, lease(server.url, success_at=2.0) as env:
        start = await env.reset()
        schema = {"enum": ["UP", "DOWN"], "type": "string", "description": "Where to go."}
        assert "Reply with a JSON object of these fields" in start.messages[0].content
        assert start.options.format == JsonFormat(
            schema={
                "type": "object",
                "properties": {"action": schema},
                "required": ["action"],
                "additionalProperties": False,
            },
            is_strict=False,
        )
        moved = await env.step(say('I go {"action": "DOWN"}'))
        assert (moved.reward, moved.messages[0].content) == (1.0, '{"x":1,"message":"on"}')
        assert moved.options == start.options
        done = await env.step(say('{"action": "UP"}'))
        assert (done.terminated, done.reward, done.info["is_success"]) == (True, 1.0, True)


async def test_replies_that_are_no_action_are_answered_and_the_episode_goes_on() -> None:
    async with serve("grid") as server, lease(server.url, is_guided=False) as env:
        assert (await env.reset()).options.format is None
        for reply, words in (
            ("up", "is no action, expected a JSON object of action"),
            ("[" * 5000, "is no action"),
            ('{"action": "SIDE"}', "action: Input should be 'UP' or 'DOWN'"),
        ):
            answer = await env.step(say(reply))
            assert words in answer.messages[0].content
            assert (answer.terminated, answer.truncated) == (False, False)


async def test_tools_of_a_server_are_called_and_one_that_ends_the_episode_ends_it() -> None:
    async with serve("tools") as server, lease(server.url, instruction="Submit 2 + 2.") as env:
        start = await env.reset()
        assert start.messages[0].content.startswith("Submit 2 + 2.")
        (tool,) = start.tools
        assert (tool.name, tool.parameters["required"]) == ("submit", ["answer"])
        wrong = await env.step(ask_tool(("submit", '{"answer": "5"}')))
        assert wrong.messages[0].content == "error: ValueError: wrong"
        unreadable = await env.step(ask_tool(("submit", "[1]")))
        assert "wrong arguments for 'submit'" in unreadable.messages[0].content
        right = await env.step(ask_tool(("submit", '{"answer": "4"}')))
        assert [message.content for message in right.messages] == ["right"]
        assert (right.terminated, right.reward, right.info["is_success"]) == (True, 1.0, True)


async def test_a_reply_without_a_call_ends_an_episode_of_tools() -> None:
    async with serve("tools") as server, lease(server.url) as env:
        await env.reset()
        done = await env.step(say("I give up"))
        assert (done.terminated, done.info["is_success"]) == (True, False)


@pytest.mark.parametrize("kind", ["question", "tools"])
async def test_a_server_that_goes_away_costs_a_replay_of_the_episode(kind: str) -> None:
    async with serve(kind) as server, lease(server.url) as env:
        await env.reset()
        reply = ask_tool(("submit", '{"answer": "broken"}')) if kind == "tools" else say("broken")
        with pytest.raises(ActorDied, match="closed the connection"):
            await env.step(reply)


async def test_a_reply_may_take_longer_than_a_server_waits_for_a_sign_of_life() -> None:
    async with serve("question") as server, lease(server.url) as env:
        await env.reset()
        await asyncio.sleep(1.5)
        assert (await env.step(say("4"))).reward == 1.0


async def test_an_answer_that_is_no_observation_is_an_error_of_the_environment() -> None:
    async with serve("question") as server, lease(server.url) as env:
        await env.reset()
        with pytest.raises(EnvError, match="expected an observation: Expected"):
            await env.step(say("garbled"))


async def test_a_refused_reset_is_an_error_with_the_words_of_the_server() -> None:
    async with serve("question") as server, lease(server.url, reset={"refused": 1}) as env:
        with pytest.raises(EnvError, match=r"refused to reset .* seed and size must be provided"):
            await env.reset()


async def test_a_session_that_becomes_free_is_waited_for_and_one_that_does_not_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serve("question", num_sessions=1) as server, lease(server.url) as first:
        await first.reset()
        monkeypatch.setattr(openenv_session, "FREE_SESSION_S", 0.2)
        async with lease(server.url) as second:
            with pytest.raises(ConfigError, match=r"all 1 sessions .* are taken; .*text\.num_envs"):
                await second.reset()
        monkeypatch.setattr(openenv_session, "FREE_SESSION_S", 20.0)
        async with lease(server.url) as third:
            waiting = asyncio.create_task(third.reset())
            await asyncio.sleep(0.3)
            await first.end_lease()
            assert (await waiting).messages


async def test_a_lease_that_ends_leaves_the_session_of_the_server() -> None:
    async with serve("question") as server:
        async with lease(server.url) as env:
            await env.reset()
            assert server.num_open == 1
        await asyncio.wait_for(server.is_empty.wait(), 10)
        assert server.num_open == 0


async def test_without_a_server_one_error_says_how_to_start_one() -> None:
    async with lease("http://127.0.0.1:9") as env:
        with pytest.raises(
            ConfigError, match=r"no OpenEnv server answers at http://127\.0\.0\.1:9"
        ):
            await env.reset()
    with pytest.raises(ConfigError, match="url='localhost', expected the address of a server"):
        async with lease("localhost"):
            pass


def test_the_form_of_a_reply_follows_from_the_schema_of_actions() -> None:
    forms = {kind: read_form(schema)[0] for kind, schema in SCHEMAS.items()}
    assert forms == {"question": "text", "grid": "json", "tools": "tools"}
    column = {"properties": {"column": {"type": "integer", "title": "Column"}}}
    assert read_form(column) == ("json", {"column": {"type": "integer"}})


def test_an_observation_of_one_text_is_read_as_it_is_and_others_as_json() -> None:
    assert observation_text({"prompt": "Guess.", "info": {}, "score": None}) == "Guess."
    assert observation_text({"x": 0, "legal": [1], "done": True}) == '{"x":0,"legal":[1]}'
    assert observation_text({}) == ""
