"""Environments of the package openenv, unchanged, at servers of an interpreter of their own: actions of
text, of fields, and calls of tools; and the recipe, with SmolLM2 where it is installed.

Run by this project's interpreter; VLA_RL_CLIENT_PYTHON names the one that has openenv.
"""

import asyncio
import os
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from vla_rl import EnvSpec, EpisodeSpec
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.envs.text import TextEnvPool
from vla_rl.errors import ConfigError
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.models.language.gguf import cache_folder
from vla_rl.recipes import grpo_openenv
from vla_rl.reporting import read_metrics
from vla_rl.types import JsonFormat, Message, ToolCall

PYTHON = os.environ["VLA_RL_CLIENT_PYTHON"]
SUPPORT = Path(__file__).parent / "support"
SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=1024,
)

pytestmark = pytest.mark.timeout(600)


@contextmanager
def serve(app: str) -> Iterator[str]:
    """Run a server of an environment of OpenEnv, and yield its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        PYTHON,
        "-m",
        "uvicorn",
        f"oe_environments:{app}",
        "--port",
        str(port),
        "--log-level",
        "error",
    ]
    server = subprocess.Popen(command, cwd=SUPPORT)
    try:
        url = f"http://127.0.0.1:{port}"
        while not answers(url):
            assert server.poll() is None, "the server has ended"
        yield url
    finally:
        server.kill()
        server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=10):
            return True
    except (urllib.error.URLError, OSError):
        return False


@asynccontextmanager
async def lease(url: str, seed: int = 4, **kwargs: Any) -> AsyncIterator[Any]:
    spec = EnvSpec(id="text/openenv", kwargs={"url": url, **kwargs})
    episode = EpisodeSpec(
        episode_id=0, group_id=0, member=0, env=spec, task="openenv", seed=seed, policy_seed=0
    )
    async with asyncio.timeout(120), TextEnvPool(specs=[spec]) as pool, pool.lease(episode) as env:
        yield env


def say(text: str) -> Message:
    return Message(role="assistant", content=text)


async def test_an_answer_of_text_is_the_action_and_seed_and_arguments_reach_the_reset() -> None:
    with serve("question_app") as url:
        async with lease(url, seed=14, reset={"largest": 9}) as env:
            assert (await env.reset()).messages[0].content == "What is 4 plus 3?"
            wrong = await env.step(say("8"))
            assert (wrong.messages[0].content, wrong.terminated) == ("Try again.", False)
            right = await env.step(say("7"))
            assert (right.terminated, right.reward, right.info["is_success"]) == (True, 1.0, True)


async def test_an_action_of_fields_is_a_json_object_and_its_sessions_are_counted() -> None:
    with serve("move_app") as url:
        async with lease(url, success_at=0.9) as env:
            start = await env.reset()
            assert isinstance(start.options.format, JsonFormat)
            assert start.options.format.schema["properties"]["direction"]["enum"] == [
                "LEFT",
                "RIGHT",
            ]
            refused = await env.step(say('{"direction": "RIGHT", "steps": 9}'))
            assert "steps: Input should be less than or equal to 3" in refused.messages[0].content
            on = await env.step(say('{"direction": "LEFT", "steps": 1}'))
            assert (on.reward, on.messages[0].content) == (-0.1, '{"x":-1}')
            async with lease(url) as other:
                with pytest.raises(ConfigError, match="all 1 sessions of the OpenEnv server"):
                    await other.reset()
        async with lease(url) as env:  # the session has become free
            await env.reset()
            assert (await env.step(say('{"direction": "RIGHT", "steps": 3}'))).terminated


async def test_tools_are_called_and_their_errors_are_read() -> None:
    with serve("tools_app") as url:
        async with lease(url, instruction="Add 2 and 3.") as env:
            start = await env.reset()
            assert [tool.name for tool in start.tools] == ["add"]

            async def call(arguments: str) -> str:
                calls = (ToolCall(id="0", name="add", arguments=arguments),)
                answer = await env.step(Message(role="assistant", tool_calls=calls))
                text: str = answer.messages[0].content
                return text

            assert await call('{"left": 2, "right": 3}') == "5"
            assert (await call('{"left": "two"}')).startswith("error: ")
            assert (await env.step(say("It is 5."))).terminated


@pytest.mark.parametrize("policy", ["small", "smollm2"])
async def test_the_recipe_trains_with_any_policy(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "VLA_RL_USER_CACHE" in os.environ:
        monkeypatch.setenv("XDG_CACHE_HOME", os.environ["VLA_RL_USER_CACHE"])
    if policy == "small":
        tiny(SHAPE, ["What is 4 plus 3?"], seed=0).save(tmp_path / "small")
    elif not (cache_folder() / "smollm2").is_dir():
        pytest.skip("smollm2 is not installed: vla-rl install smollm2")
    name = str(tmp_path / "small") if policy == "small" else policy
    with serve("question_app") as url:
        arguments = (
            f"--policy {name} --url {url} --run.updates 1 --run.device cpu --run.root {tmp_path} "
            "--group-size 2 --scheduler.groups-per-update 1 --text.num-envs 2 --chat.max-turns 2 "
            "--chat.max-reply 12 --num-starts 4"
        )
        command = parse_command(
            TrainingLaunch, grpo_openenv.GrpoOpenEnvConfig, "", arguments.split()
        )
        assert await grpo_openenv.main(command) == 0
    (run,) = list_runs(tmp_path)
    (line,) = read_metrics(run / "metrics.jsonl")
    assert line["text/leases"] == 2.0


def list_runs(root: Path) -> list[Path]:
    return list(root.glob("grpo_openenv-*"))
