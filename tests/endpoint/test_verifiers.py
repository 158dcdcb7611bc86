"""An unchanged environment of the verifiers library plays behind the protocol of text environments.

Needs verifiers 0.1.9 to 0.2, in this interpreter or in the one that VLA_RL_VERIFIERS_PYTHON names.
"""

import asyncio
import importlib.util
import os
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import pytest
from byte_policy import BytePolicy

import vla_rl
from vla_rl.actors import Runtime
from vla_rl.endpoint.verifiers import Played, VerifiersConfig, VerifiersEpisode, VerifiersPool
from vla_rl.endpoint.verifiers.episode import Relay
from vla_rl.errors import ActorDied, ConfigError, DataError, EnvError
from vla_rl.rollout import chat_agent
from vla_rl.types import EnvPool, EnvSpec, EpisodeSpec, Message, ToolCall

PYTHON = os.environ.get("VLA_RL_VERIFIERS_PYTHON")
SUPPORT = str(Path(__file__).parent / "support")
ROOT = str(Path(vla_rl.__file__).parents[1])


def is_installed_here() -> bool:
    try:
        return version("verifiers") < "0.3" and importlib.util.find_spec("verifiers") is not None
    except PackageNotFoundError:
        return False


needs_verifiers = pytest.mark.skipif(
    not (PYTHON or is_installed_here()),
    reason="verifiers<0.3 is not installed; name its interpreter in VLA_RL_VERIFIERS_PYTHON",
)


def episode(row: int) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=row,
        group_id=row,
        member=0,
        env=EnvSpec(id="vf_sums"),
        task="verifiers/vf_sums",
        seed=row,
        policy_seed=0,
        options={"row": row},
    )


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VerifiersPool]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((ROOT, SUPPORT)))
    config = VerifiersConfig(env="vf_sums", arguments={"num_rows": 5}, python=PYTHON, num_envs=2)
    async with Runtime() as runtime, VerifiersPool(runtime, config) as pool:
        yield pool


@needs_verifiers
@pytest.mark.slow  # importing verifiers takes seconds of its own
@pytest.mark.timeout(900)
async def test_an_unchanged_environment_is_played_with_its_tool_and_judged_by_its_rubric(pool: VerifiersPool) -> None:
    as_protocol: EnvPool = pool
    assert as_protocol.num_envs == 2
    assert [start.options["row"] for start in pool.starts()] == [0, 1, 2, 3, 4]
    calls_add = Message(role="assistant", tool_calls=(ToolCall(id="c0", name="add", arguments='{"left":3,"right":3}'),))
    policy = BytePolicy(calls_add, "6")
    async with pool.lease(episode(2)) as env:
        trajectory = await chat_agent(env, policy)
    assert trajectory.is_success
    assert [step.rewards.tolist() for step in trajectory.steps] == [[0.0], [1.0]]
    first, second = policy.heard
    assert first[0][-1].content == "3+3=?"
    assert [tool.name for tool in first[1]] == ["add"]
    assert [message.role for message in second[0][-3:]] == ["user", "assistant", "tool"]
    assert (second[0][-1].content, second[0][-1].tool_call_id) == ("6", "c0")
    spoken = np.concatenate([trajectory.steps[0].observation["prompt_tokens"], trajectory.steps[0].chunk.tokens])
    assert np.array_equal(trajectory.steps[1].observation["prompt_tokens"][: len(spoken)], spoken)
    async with pool.lease(episode(0)) as env:
        wrong = await chat_agent(env, BytePolicy("3"))
    assert (wrong.is_success, wrong.undiscounted_return) == (False, 0.0)
    with pytest.raises(DataError, match="row 5 of vf_sums, expected a number from 0 to 4"):
        async with pool.lease(episode(5)):
            pass


async def test_without_verifiers_it_says_what_to_install() -> None:
    if is_installed_here():
        pytest.skip("verifiers is installed here")
    async with asyncio.timeout(60), Runtime() as runtime:
        with pytest.raises(ConfigError, match=r"needs verifiers; run `pip install 'verifiers>=0.1.9,<0.3'`"):
            await VerifiersPool(runtime, VerifiersConfig(env="vf_sums")).__aenter__()


class Rollout:
    """A rollout that calls the model with these conversations, one after the other."""

    def __init__(self, relay: Relay, *conversations: list[Message]) -> None:
        self._relay, self._conversations = relay, conversations
        self.heard: list[str] = []

    async def __call__(self) -> Played:
        for conversation in self._conversations:
            completion = await self._relay.generate(conversation)
            self.heard.append(completion.message.content)
        return Played(reward=0.5, is_truncated=False, stop_condition="done", metrics={"turns": 2.0})


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


async def test_a_call_that_continues_no_conversation_begins_another_one() -> None:
    relay = Relay()
    rollout = Rollout(
        relay, [user("a")], [user("summarise")], [user("a"), said(" b "), user("c")], [user("rewritten"), user("c")]
    )
    env = VerifiersEpisode(episode(0), relay, rollout, success_at=0.5)
    start = await env.reset()
    assert (start.agent, [message.content for message in start.messages]) == ("policy", ["a"])
    second = await env.step(said("b"))
    assert (second.agent, [message.content for message in second.messages]) == ("policy-2", ["summarise"])
    third = await env.step(said("short"))
    assert (third.agent, [message.content for message in third.messages]) == ("policy", ["c"])
    fourth = await env.step(said("d"))
    assert (fourth.agent, [message.content for message in fourth.messages]) == ("policy-3", ["rewritten", "c"])
    last = await env.step(said("e"))
    assert (last.reward, last.terminated, last.info["is_success"], last.info["stop"]) == (0.5, True, True, "done")
    assert rollout.heard == ["b", "short", "d", "e"]
    await env.end()


async def test_a_worker_that_dies_while_the_policy_speaks_is_what_the_episode_is_told() -> None:
    relay, speaks = Relay(), asyncio.Event()

    async def dies() -> Played:
        call = asyncio.ensure_future(relay.generate([user("a")]))
        await speaks.wait()
        call.cancel()  # as the server does where the connection is gone
        await asyncio.wait([call])
        raise ActorDied("verifiers", 7, "SIGKILL")

    env = VerifiersEpisode(episode(0), relay, dies, success_at=1.0)
    await env.reset()
    speaks.set()
    for _ in range(5):
        await asyncio.sleep(0)
    with pytest.raises(ActorDied, match="SIGKILL"):
        await env.step(said("too late"))
    await env.end()


async def test_a_rollout_that_fails_or_calls_nobody_is_told_and_one_that_is_left_ends() -> None:
    relay = Relay()
    silent = VerifiersEpisode(episode(0), relay, Rollout(relay), success_at=1.0)
    with pytest.raises(EnvError, match="ended without calling the model once"):
        await silent.reset()

    async def fails() -> Played:
        raise EnvError("the rubric failed")

    with pytest.raises(EnvError, match="the rubric failed"):
        await VerifiersEpisode(episode(0), relay, fails, success_at=1.0).reset()
    ended = asyncio.Event()

    async def waits() -> Played:
        try:
            return await Rollout(relay, [user("a")])()
        finally:
            ended.set()

    env = VerifiersEpisode(episode(0), relay, waits, success_at=1.0)
    await env.reset()
    await env.end()
    assert ended.is_set()
