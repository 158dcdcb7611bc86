"""A rollout that calls a model, driven turn by turn.

`make test-clients` plays real environments of verifiers 0.2 to 0.4.
"""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from vla_rl.actors import Runtime
from vla_rl.endpoint.verifiers import (
    RolloutResult,
    VerifiersConfig,
    VerifiersEpisode,
    VerifiersPool,
)
from vla_rl.endpoint.verifiers.episode import Relay
from vla_rl.endpoint.verifiers.rollouts import find_environment
from vla_rl.errors import ActorDied, ConfigError, EnvError
from vla_rl.types import EnvSpec, EpisodeSpec, JsonFormat, Message, ReplyOptions


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


async def test_without_verifiers_it_says_what_to_install() -> None:
    if importlib.util.find_spec("verifiers") is not None:
        pytest.skip("verifiers is installed here")
    async with asyncio.timeout(60), Runtime() as runtime:
        with pytest.raises(
            ConfigError, match=r"needs verifiers; run `pip install 'verifiers>=0.1.9,<0.5'`"
        ):
            await VerifiersPool(runtime, VerifiersConfig(env="vf_sums")).__aenter__()


LOADERS = """
class Taskset: pass
class ModelContext: pass
def import_taskset(name):
    import importlib
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"taskset {name!r} not found") from error
"""
CLASSIC = """
__version__ = "0.2.9"
def __getattr__(name):
    try:
        import no_such_library
    except ModuleNotFoundError as error:
        raise AttributeError("install as verifiers[all]") from error
"""


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ("needs_much", "ModuleNotFoundError: No module named 'no_such_library_of_the_environment'"),
        ("no_taskset", "no_taskset exports no Taskset by its `__all__`, as v1 environments do"),
    ],
)
def test_a_missing_dependency_is_told_with_its_cause(
    import_folder: Path, monkeypatch: pytest.MonkeyPatch, env: str, told: str
) -> None:
    (import_folder / "verifiers" / "v1").mkdir(parents=True)
    (import_folder / "verifiers" / "__init__.py").write_text(CLASSIC)
    (import_folder / "verifiers" / "v1" / "__init__.py").write_text(LOADERS)
    (import_folder / "needs_much.py").write_text("import no_such_library_of_the_environment")
    (import_folder / "no_taskset.py").write_text("x = 1")
    with pytest.raises(ConfigError) as error:
        find_environment(env, {}, None)
    assert told in str(error.value)
    # what verifiers itself lacks is told too, though its own words hide it
    assert (
        "AttributeError: install as verifiers[all], because of ModuleNotFoundError: No module "
        "named" in str(error.value)
    )


class Rollout:
    """A rollout that calls the model with these conversations, one after the other."""

    def __init__(self, relay: Relay, *conversations: list[Message]) -> None:
        self._relay, self._conversations = relay, conversations
        self.requests: list[str] = []

    async def __call__(self) -> RolloutResult:
        for conversation in self._conversations:
            completion = await self._relay.generate(conversation)
            self.requests.append(completion.message.content)
        return RolloutResult(
            reward=0.5, is_truncated=False, stop_condition="done", metrics={"turns": 2.0}
        )


async def test_agents_with_roles_have_their_names_and_earn_the_rewards_of_their_roles() -> None:
    relay = Relay()
    solver, checker = relay.for_role("solver"), relay.for_role("checker")

    async def run_rollout() -> RolloutResult:
        await solver.generate([user("a")])
        await checker.generate([user("a")])
        await solver.generate([user("a"), said("b"), user("c")])
        await checker.generate([user("other")])
        return RolloutResult(
            reward=0.0,
            is_truncated=False,
            stop_condition="done",
            metrics={},
            rewards={"solver": 1.0, "checker": -1.0},
        )

    env = VerifiersEpisode(episode(0), relay, run_rollout, success_at=1.0)
    agents = [(await env.reset()).agent]
    for reply in ("b", "x", "d"):
        agents.append((await env.step(said(reply))).agent)
    last = await env.step(said("y"))
    assert agents == ["solver", "checker", "solver", "checker-2"]
    assert (last.agent, last.reward, last.credits) == (
        "checker-2",
        -1.0,
        {"solver": 1.0, "checker": -1.0},
    )
    await env.cancel_rollout()


async def test_rules_for_a_reply_reach_the_policy() -> None:
    relay = Relay()
    rules = [ReplyOptions(stop=("\n",)), ReplyOptions(format=JsonFormat())]

    async def run_rollout() -> RolloutResult:
        for rule in rules:
            await relay.generate([user("a")], options=rule)
        return RolloutResult(reward=1.0, is_truncated=False, stop_condition="done", metrics={})

    env = VerifiersEpisode(episode(0), relay, run_rollout, success_at=1.0)
    assert (await env.reset()).options == rules[0]
    assert (await env.step(said("b"))).options == rules[1]
    await env.cancel_rollout()


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


async def test_a_call_that_continues_no_conversation_begins_another_one() -> None:
    relay = Relay()
    rollout = Rollout(
        relay,
        [user("a")],
        [user("summarise")],
        [user("a"), said(" b "), user("c")],
        [user("rewritten"), user("c")],
    )
    env = VerifiersEpisode(episode(0), relay, rollout, success_at=0.5)
    start = await env.reset()
    assert (start.agent, [message.content for message in start.messages]) == ("policy", ["a"])
    second = await env.step(said("b"))
    assert (second.agent, [message.content for message in second.messages]) == (
        "policy-2",
        ["summarise"],
    )
    third = await env.step(said("short"))
    assert (third.agent, [message.content for message in third.messages]) == ("policy", ["c"])
    fourth = await env.step(said("d"))
    assert (fourth.agent, [message.content for message in fourth.messages]) == (
        "policy-3",
        ["rewritten", "c"],
    )
    last = await env.step(said("e"))
    assert (last.reward, last.terminated, last.info["is_success"], last.info["stop"]) == (
        0.5,
        True,
        True,
        "done",
    )
    assert rollout.requests == ["b", "short", "d", "e"]
    await env.cancel_rollout()


async def test_a_worker_that_dies_while_the_policy_speaks_is_what_the_episode_is_told() -> None:
    relay, speaks = Relay(), asyncio.Event()

    async def dies() -> RolloutResult:
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
    await env.cancel_rollout()


async def test_a_rollout_that_fails_or_calls_nobody_is_told_and_one_that_is_left_ends() -> None:
    relay = Relay()
    silent = VerifiersEpisode(episode(0), relay, Rollout(relay), success_at=1.0)
    with pytest.raises(EnvError, match="ended without calling the model once"):
        await silent.reset()

    async def fails() -> RolloutResult:
        raise EnvError("the rubric failed")

    with pytest.raises(EnvError, match="the rubric failed"):
        await VerifiersEpisode(episode(0), relay, fails, success_at=1.0).reset()
    ended = asyncio.Event()

    async def waits() -> RolloutResult:
        try:
            return await Rollout(relay, [user("a")])()
        finally:
            ended.set()

    env = VerifiersEpisode(episode(0), relay, waits, success_at=1.0)
    await env.reset()
    await env.cancel_rollout()
    assert ended.is_set()


async def test_an_error_after_a_reply_ends_the_run_or_where_it_is_allowed_the_episode() -> None:
    async def run(relay: Relay) -> RolloutResult:
        await relay.generate([Message(role="user", content="Reply with JSON.")])
        raise EnvError("the reply is no JSON")

    for note in (None, (noted := []).append):
        relay = Relay()
        env = VerifiersEpisode(episode(0), relay, lambda relay=relay: run(relay), 1.0, note)
        await env.reset()
        reply = Message(role="assistant", content="hello")
        if note is None:
            with pytest.raises(EnvError, match="the reply is no JSON"):
                await env.step(reply)
            continue
        outcome = await env.step(reply)
        assert (outcome.terminated, outcome.truncated, outcome.reward) == (False, True, 0.0)
        assert outcome.info["stop"] == "environment_error"
        assert not outcome.info["is_success"]
        assert [str(error) for error in noted] == ["the reply is no JSON"]


def test_the_process_finds_the_programs_of_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin")
    config = VerifiersConfig(env="vf_sums", python="/venvs/verifiers/bin/python")
    assert config.variables["PATH"] == "/venvs/verifiers/bin:/usr/bin"
    assert VerifiersConfig(env="vf_sums").variables == {}
