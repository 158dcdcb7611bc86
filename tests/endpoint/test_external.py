"""Agents that know nothing of us play episodes: coroutines and programs, well-behaved and not."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import psutil
import pytest
from byte_policy import AskOnce, BytePolicy, as_tokens
from openai import AsyncOpenAI

from vla_rl.endpoint import Endpoint, ExternalTask, RecordedCall, external_agent, find_threads
from vla_rl.errors import ActorFrozen, ContextOverflow, ConversationRejected, EnvError
from vla_rl.types import Completion, Message, Prompt, StopReason, Trajectory

PROGRAM = """
import sys
from openai import OpenAI
client = OpenAI()
answer = client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": sys.stdin.read()}])
print(answer.choices[0].message.content)
"""


@pytest.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    async with asyncio.timeout(60), Endpoint() as endpoint:
        yield endpoint


async def chat(task: ExternalTask, *contents: str) -> list[str]:
    """One conversation of several turns."""
    history: Any = []
    answers = []
    async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        for content in contents:
            history.append({"role": "user", "content": content})
            answer = (
                (await client.chat.completions.create(model="m", messages=history))
                .choices[0]
                .message
            )
            history.append({"role": "assistant", "content": answer.content})
            answers.append(str(answer.content))
    return answers


def texts_of(trajectory: Trajectory) -> list[str]:
    return [bytes(step.chunk.tokens.tolist()).decode().strip() for step in trajectory.steps]


async def test_a_coroutine_answers_and_the_environment_evaluates(endpoint: Endpoint) -> None:
    async def agent(task: ExternalTask) -> str:
        return (await chat(task, task.prompt, "sure?"))[-1]

    env = AskOnce()
    trajectory = await external_agent(agent, endpoint)(env, BytePolicy("41", "42"))
    assert env.answers == ["42"]
    assert trajectory.stop_reason is StopReason.SUCCESS
    assert texts_of(trajectory) == ["41", "42"]
    assert [step.rewards.tolist() for step in trajectory.steps] == [[0.0], [1.0]]
    assert trajectory.info["num_threads"] == 1
    first, second = trajectory.steps
    known_tokens = np.concatenate([first.observation["prompt_tokens"], first.chunk.tokens])
    assert np.array_equal(second.observation["prompt_tokens"][: len(known_tokens)], known_tokens)
    assert first.chunk.weight_version == 7
    assert first.chunk.weight_versions is not None
    assert trajectory.newest_version == 7 + 2


async def test_a_number_is_the_reward_itself(endpoint: Endpoint) -> None:
    async def agent(task: ExternalTask) -> float:
        await chat(task, task.prompt)
        return 0.25

    env = AskOnce()
    trajectory = await external_agent(agent, endpoint)(env, BytePolicy("41"))
    assert env.answers == []
    assert (trajectory.undiscounted_return, trajectory.stop_reason) == (0.25, StopReason.TERMINATED)


@pytest.mark.parametrize("answer", [None, float("nan")])
async def test_an_agent_that_forgets_its_reward_is_told(endpoint: Endpoint, answer: Any) -> None:
    async def agent(task: ExternalTask) -> Any:
        await chat(task, task.prompt)
        return answer

    with pytest.raises(
        EnvError,
        match=f"returned {answer!r}, expected its reward as a finite number, or its answer",
    ):
        await external_agent(agent, endpoint)(AskOnce(), BytePolicy("41"))


async def test_an_unchanged_program_runs_with_two_environment_variables(
    endpoint: Endpoint, tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    agent = external_agent([sys.executable, str(tmp_path / "agent.py")], endpoint)
    trajectory = await agent(AskOnce(), BytePolicy("42"))
    assert trajectory.is_success
    assert np.array_equal(
        trajectory.steps[0].observation["prompt_tokens"], as_tokens("<user>6x7?\n<assistant>")
    )


async def test_a_program_that_fails_is_told_with_its_last_words(endpoint: Endpoint) -> None:
    agent = external_agent([sys.executable, "-c", "raise SystemExit('no such file')"], endpoint)
    with pytest.raises(
        EnvError, match=r"ended with exit code 1; the end of its stderr:\n    no such file"
    ):
        await agent(AskOnce(), BytePolicy("42"))


async def test_a_program_that_never_answers_is_ended_with_what_it_started(
    endpoint: Endpoint,
) -> None:
    program = "import subprocess; subprocess.run(['sleep', '8765.5'])"
    agent = external_agent([sys.executable, "-c", program], endpoint, timeout_s=1.0)
    with pytest.raises(ActorFrozen, match="it made no call within timeout_s=1"):
        await agent(AskOnce(), BytePolicy("42"))
    while is_running("8765.5"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_program_that_is_given_up_while_it_starts_is_ended_with_what_it_started(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = asyncio.create_subprocess_exec

    async def create_slowly(*args: Any, **kwargs: Any) -> asyncio.subprocess.Process:
        process = await create(*args, **kwargs)
        while not is_running("8764.5"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.sleep(0)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_slowly)
    agent = external_agent(
        [sys.executable, "-c", "import subprocess; subprocess.run(['sleep', '8764.5'])"], endpoint
    )
    running = asyncio.ensure_future(agent(AskOnce(), BytePolicy("42")))
    with pytest.raises(asyncio.CancelledError):
        await running
    while is_running("8764.5"):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def is_running(argument: str) -> bool:
    return any(
        argument in (process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])
    )


async def test_an_agent_that_never_answers_is_cut_off_with_what_it_said(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeout, deadlines = asyncio.timeout, dict[float | None, asyncio.Timeout]()

    def noted(delay_s: float | None) -> asyncio.Timeout:
        deadlines[delay_s] = timeout(delay_s)
        return deadlines[delay_s]

    async def agent(task: ExternalTask) -> str:
        headers, asked = (
            {"Authorization": f"Bearer {task.api_key}"},
            {"messages": [{"role": "user", "content": "?"}]},
        )
        # without the client, which takes its time to begin
        url = f"{task.base_url}/chat/completions"
        async with (
            aiohttp.ClientSession() as client,
            client.post(url, json=asked, headers=headers) as response,
        ):
            assert response.status == 200
        # now that it has said something
        deadlines[3600.5].reschedule(asyncio.get_running_loop().time())
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(asyncio, "timeout", noted)
    trajectory = await external_agent(agent, endpoint, timeout_s=3600.5)(
        AskOnce(), BytePolicy("42")
    )
    assert (texts_of(trajectory), trajectory.undiscounted_return) == (["42"], 0.0)
    assert trajectory.stop_reason is StopReason.DEADLINE


async def test_an_agent_that_outgrows_the_context_is_cut_off(endpoint: Endpoint) -> None:
    async def agent(task: ExternalTask) -> str:
        return (await chat(task, "short", "long " * 100))[-1]

    trajectory = await external_agent(agent, endpoint)(
        AskOnce(), BytePolicy("a", "b", context_size=100)
    )
    assert (texts_of(trajectory), trajectory.stop_reason) == (["a"], StopReason.TOKEN_LIMIT)
    with pytest.raises(ContextOverflow):
        await external_agent(agent, endpoint)(AskOnce(), BytePolicy("a", context_size=5))


class Choosy(BytePolicy):
    """Its chat template rejects a conversation that has one of its replies."""

    async def generate(self, prompt: Prompt, **options: Any) -> Completion:
        if any(message.role == "assistant" for message in prompt):  # type: ignore[union-attr]
            raise ConversationRejected("one tool call a message", is_reply_at_fault=True)
        return await super().generate(prompt, **options)


async def test_an_agent_that_ends_because_of_the_policys_own_reply_is_no_failure(
    endpoint: Endpoint,
) -> None:
    async def agent(task: ExternalTask) -> str:
        return (await chat(task, "first", "second"))[-1]

    trajectory = await external_agent(agent, endpoint)(AskOnce(), Choosy("a", "b"))
    assert (texts_of(trajectory), trajectory.stop_reason) == (["a"], StopReason.REPLY_REJECTED)


async def test_what_the_agent_or_the_policy_raises_is_raised(endpoint: Endpoint) -> None:
    async def broken(task: ExternalTask) -> str:
        raise LookupError("a mistake of the agent's own")

    async def forgiving(task: ExternalTask) -> str:
        try:
            await chat(task, task.prompt)
        except Exception:
            return "42"
        return "41"

    with pytest.raises(LookupError, match="a mistake of the agent's own"):
        await external_agent(broken, endpoint)(AskOnce(), BytePolicy("42"))
    policy = BytePolicy("42")
    policy.fails_with = RuntimeError("the engine is gone")
    with pytest.raises(RuntimeError, match="the engine is gone"):
        await external_agent(forgiving, endpoint)(AskOnce(), policy)


async def test_an_agent_that_speaks_to_somebody_else_is_told(endpoint: Endpoint) -> None:
    async def deaf(task: ExternalTask) -> str:
        return "42"

    with pytest.raises(EnvError, match="ended without calling the policy"):
        await external_agent(deaf, endpoint)(AskOnce(), BytePolicy("42"))


def call(prompt: str, reply: str, agent: str = "policy") -> RecordedCall:
    completion = Completion(
        message=Message(role="assistant", content=reply),
        prompt_tokens=as_tokens(prompt),
        tokens=as_tokens(reply),
        log_probs=np.zeros(len(reply), np.float32),
        weight_versions=np.zeros(len(reply), np.int64),
        finish_reason="stop",
    )
    return RecordedCall(agent=agent, completion=completion)


def test_turns_are_one_conversation_only_where_one_begins_with_exactly_the_other() -> None:
    assert find_threads([call("a", "b"), call("abc", "d"), call("abcde", "f")]) == [[0, 1, 2]]
    # the past was written in another way
    assert find_threads([call("a", "b"), call("aBc", "d")]) == [[0], [1]]
    assert find_threads([call("a", "b"), call("x", "y"), call("abc", "d"), call("xyz", "w")]) == [
        [0, 2],
        [1, 3],
    ]
    # a branch
    assert find_threads([call("a", "b"), call("abc", "d"), call("abc", "e")]) == [[0, 1], [2]]
    assert find_threads([call("a", "b", "solver"), call("abc", "d", "checker")]) == [[0], [1]]
