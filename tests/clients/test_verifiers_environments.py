"""Environments of the package verifiers, unchanged, in an interpreter of its own: classic ones, v1
ones, tools, two agents.

Run by this project's interpreter; VLA_RL_CLIENT_PYTHON names the one that has verifiers.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import check_output
from typing import Any

import numpy as np
import pytest
from live_endpoint import as_tokens, text_of

import vla_rl
from vla_rl.actors import Runtime
from vla_rl.endpoint.verifiers import VerifiersConfig, VerifiersPool
from vla_rl.errors import ConfigError, DataError
from vla_rl.rollout import chat_agent
from vla_rl.types import Completion, EpisodeSpec, Message, ToolCall, Trajectory

PYTHON = os.environ["VLA_RL_CLIENT_PYTHON"]
SUPPORT = str(Path(__file__).parent / "support")
ROOT = str(Path(vla_rl.__file__).parents[1])
ASK_VERSION = "from importlib.metadata import version; print(*version('verifiers').split('.')[:2])"
VERSION = tuple(map(int, check_output([PYTHON, "-c", ASK_VERSION], text=True).split()))
LOCAL: dict[str, Any] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
V1: dict[str, Any] = {"harness": {"id": "null"}} if VERSION < (0, 3) else {"agent": LOCAL}

pytestmark = pytest.mark.timeout(900)  # the first rollout of v1 installs its harness


class Says:
    """Says what it is told to say, in turn; a message, or text."""

    def __init__(self, *says: str | Message) -> None:
        self._says = [
            Message(role="assistant", content=said) if isinstance(said, str) else said
            for said in says
        ]

    async def generate(self, prompt: Any, **options: Any) -> Completion:
        message = self._says.pop(0)
        tokens = as_tokens(
            message.content + "".join(call.name for call in message.tool_calls) + "\n"
        )
        return Completion(
            message=message,
            prompt_tokens=as_tokens(text_of(prompt)),
            tokens=tokens,
            log_probs=np.full(len(tokens), -0.5, np.float32),
            weight_versions=np.zeros(len(tokens), np.int64),
            finish_reason="stop",
        )


@asynccontextmanager
async def pool_of(
    env: str, monkeypatch: pytest.MonkeyPatch, **fields: Any
) -> AsyncIterator[VerifiersPool]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((ROOT, SUPPORT)))
    config = VerifiersConfig(env=env, python=PYTHON, num_envs=2, **fields)
    async with asyncio.timeout(600), Runtime() as runtime, VerifiersPool(runtime, config) as pool:
        yield pool


async def run_row(pool: VerifiersPool, row: int, policy: Any) -> Trajectory:
    start = pool.starts()[row]
    episode = EpisodeSpec(
        episode_id=row,
        group_id=row,
        member=0,
        env=start.env,
        task=start.task,
        seed=row,
        policy_seed=0,
        options=start.options,
    )
    async with pool.lease(episode) as env:
        return await chat_agent(env, policy)


@pytest.mark.skipif(VERSION >= (0, 4), reason="verifiers 0.4 has no classic environments")
async def test_a_classic_environment_is_run_with_its_tool_and_scored_by_its_rubric(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pool_of("vf_sums", monkeypatch, arguments={"num_rows": 5}) as pool:
        assert [start.options["row"] for start in pool.starts()] == [0, 1, 2, 3, 4]
        add = Message(
            role="assistant",
            tool_calls=(ToolCall(id="c0", name="add", arguments='{"left":3,"right":3}'),),
        )
        right = await run_row(pool, 2, Says(add, "6"))
        assert (right.is_success, [step.rewards.tolist() for step in right.steps]) == (
            True,
            [[0.0], [1.0]],
        )
        first, second = right.steps
        known_tokens = np.concatenate([first.observation["prompt_tokens"], first.chunk.tokens])
        assert len(second.observation["prompt_tokens"]) > len(known_tokens)
        wrong = await run_row(pool, 0, Says("3"))
        assert (wrong.is_success, wrong.undiscounted_return) == (False, 0.0)


async def test_a_v1_environment_is_run_by_its_harness_and_scored_by_its_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = {**V1, "taskset": {"num_rows": 4}}
    async with pool_of("vf_sums_v1", monkeypatch, arguments=arguments, max_rows=3) as pool:
        assert len(pool.starts()) == 3
        right, wrong = await asyncio.gather(
            run_row(pool, 1, Says("4")), run_row(pool, 2, Says("5"))
        )
        assert (right.is_success, right.undiscounted_return, right.info["metrics"]) == (
            True,
            1.0,
            {"length": 1.0},
        )
        assert (wrong.is_success, wrong.undiscounted_return) == (False, 0.0)
        with pytest.raises(DataError, match="row 3 of vf_sums_v1, expected a number from 0 to 2"):
            async with pool.lease(EpisodeSpec(**{**_fields(right), "options": {"row": 3}})):
                pass


@pytest.mark.skipif(
    VERSION < (0, 3),
    reason="the harness of verifiers 0.2 installs a newer mcp than its servers speak",
)
async def test_a_v1_environment_with_a_tool_server_is_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pool_of("vf_doubles_v1", monkeypatch, arguments=V1) as pool:
        call = Message(
            role="assistant",
            tool_calls=(ToolCall(id="c", name="math_double", arguments='{"number": 21}'),),
        )
        trajectory = await run_row(pool, 1, Says(call, "It is 42."))
        assert (trajectory.is_success, trajectory.info["num_turns"]) == (True, 2)


@pytest.mark.skipif(VERSION < (0, 3), reason="verifiers 0.2 has one agent")
async def test_two_agents_of_a_v1_environment_earn_their_own_rewards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with pool_of("vf_duel_v1", monkeypatch) as pool:
        trajectory = await run_row(pool, 0, {"left": Says("3"), "right": Says("4")})
        assert trajectory.returns_by_agent == {"left": -1.0, "right": 1.0}


async def test_an_environment_that_lacks_a_package_is_told_with_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lacks_much.py").write_text("import a_package_that_is_not_there\n__all__ = []\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((ROOT, SUPPORT, str(tmp_path))))
    async with Runtime() as runtime:
        with pytest.raises(ConfigError, match="No module named 'a_package_that_is_not_there'"):
            await VerifiersPool(
                runtime, VerifiersConfig(env="lacks_much", python=PYTHON)
            ).__aenter__()


def _fields(trajectory: Trajectory) -> dict[str, Any]:
    return {name: getattr(trajectory.episode, name) for name in EpisodeSpec.__struct_fields__}
