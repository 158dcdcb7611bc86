"""Recipes whose environments come from another library: runs, own pools, bad options."""

import importlib.util
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from openenv_server import serve

from vla_rl import EnvSpec, RunConfig, Runtime, TaskStart, train
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cli.dry_run import rehearse_training
from vla_rl.engines import EngineConfig
from vla_rl.envs.text import TextEnvPool, TextPoolConfig
from vla_rl.errors import ConfigError, ContextOverflow, EnvError
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.pipelines.config import TextTrainingConfig
from vla_rl.recipes import grpo_openenv, grpo_verifiers
from vla_rl.remote_rollout.host_recipe import make_host_recipe
from vla_rl.reporting import read_metrics
from vla_rl.rollout import SchedulerConfig, chat_agent
from vla_rl.team.members import Team
from vla_rl.types import EpisodeSpec

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=512,
)


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    tiny(SHAPE, ["Of seed 3: 2 + 2?"], seed=0).save(tmp_path / "policy")
    return tmp_path / "policy"


def command(recipe: Any, config: type[Any], arguments: str, *more: str) -> Any:
    return recipe.main(parse_command(TrainingLaunch, config, "", [*arguments.split(), *more]))


def list_runs(root: Path) -> list[Path]:
    return list(root.glob("grpo_openenv-*"))


@pytest.mark.parametrize("kind", ["question", "grid"])
async def test_one_command_trains_in_an_environment_of_openenv(
    kind: str, policy: Path, tmp_path: Path
) -> None:
    async with serve(kind) as server:
        arguments = (
            f"--policy {policy} --url {server.url} --run.updates 1 --run.device cpu "
            f"--run.root {tmp_path} --group-size 2 --scheduler.groups-per-update 2 "
            "--text.num-envs 4 --chat.max-turns 2 --engine.max-reply 24 --engine.max-context 512 "
            "--num-starts 5 --num-validation 2 --num-tries 1 --success-at 0.5"
        )
        status = await command(grpo_openenv, grpo_openenv.GrpoOpenEnvConfig, arguments)
        assert status == 0
        (run,) = list_runs(tmp_path)
        (line,) = read_metrics(run / "metrics.jsonl")
        assert line["update"] == 1
        asked = [json.loads(each) for each in (run / "validation.jsonl").read_text().splitlines()]
        assert sorted((each["weights"], each["start"]) for each in asked) == [
            (weights, start) for weights in (0, 1) for start in (0, 1)
        ]
        seeds = {each["data"]["seed"] for each in server.received if each["type"] == "reset"}
        assert {5, 6} <= seeds <= set(range(7))  # those held out follow those that are trained on
        if kind == "grid":  # replies were restricted to actions, by a policy that knows none
            steps = [each["data"] for each in server.received if each["type"] == "step"]
            assert steps
            assert {each["action"] for each in steps} <= {"UP", "DOWN"}


async def test_a_first_observation_that_does_not_fit_is_one_error(
    policy: Path, tmp_path: Path
) -> None:
    async with serve("question") as server:
        arguments = (
            f"--policy {policy} --url {server.url} --run.updates 1 --run.device cpu "
            f"--run.root {tmp_path} --group-size 2 --scheduler.groups-per-update 1 --instruction"
        )
        with pytest.raises(ContextOverflow, match="expected room for at least one token"):
            await command(grpo_openenv, grpo_openenv.GrpoOpenEnvConfig, arguments, "1 " * 600)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--url 127.0.0.1:8000", "expected the address of a server, such as http://"),
        ("--reset [1]", r"reset='\[1\]', expected a JSON object"),
    ],
)
async def test_options_of_openenv_are_refused_before_the_policy_is_read(
    arguments: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        await command(grpo_openenv, grpo_openenv.GrpoOpenEnvConfig, f"--policy none {arguments}")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", "env is '', expected the name of an environment of verifiers"),
        ("--env glossary --arguments {", "arguments='{', expected a JSON object"),
        ("--env glossary --text.sandbox.max-calls 3", "the environments run in verifiers' process"),
        pytest.param(
            "--env glossary",
            "needs verifiers; run `pip install",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("verifiers") is not None, reason="verifiers is here"
            ),
        ),
    ],
)
async def test_what_verifiers_cannot_load_is_refused_before_the_policy_is_read(
    arguments: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        await command(
            grpo_verifiers, grpo_verifiers.GrpoVerifiersConfig, f"--policy none {arguments}"
        )


class CountedPool(TextEnvPool):
    """A pool of a program's own, which counts its leases."""

    is_left = False

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        type(self).is_left = True
        await super().__aexit__(kind, error, trace)

    @asynccontextmanager
    async def lease(self, episode: EpisodeSpec) -> AsyncIterator[Any]:
        async with super().lease(episode) as env:
            yield env


class OwnPoolConfig(TextTrainingConfig, frozen=True, kw_only=True):
    """A configuration with a pool of its own."""

    def make_own_pool(self, runtime: Runtime) -> CountedPool:
        return CountedPool(self.text)


async def test_a_configuration_may_bring_a_pool_of_its_own(policy: Path, tmp_path: Path) -> None:
    config = OwnPoolConfig(
        run=RunConfig(updates=1, root=str(tmp_path), device="cpu"),
        group_size=2,
        text=TextPoolConfig(num_envs=2),
        scheduler=SchedulerConfig(groups_per_update=1),
        engine=EngineConfig(max_reply=4),
    )
    start = TaskStart(env=EnvSpec(id="text/sum"), task="sum", options={"problem": "58 - 23"})
    outcome = await train(config, [start], tiny(SHAPE, ["58 - 23"], seed=0))
    assert outcome.progress.num_episodes == 2
    assert CountedPool.is_left
    (line,) = read_metrics(outcome.run.path / "metrics.jsonl")
    assert line["text/leases"] == 2.0


async def test_a_dry_run_leaves_the_environments_of_such_a_pool_to_it(tmp_path: Path) -> None:
    run, text = RunConfig(root=str(tmp_path), device="cpu"), TextPoolConfig(num_envs=2)
    config = OwnPoolConfig(run=run, text=text)
    start = TaskStart(env=EnvSpec(id="others/environment"), task="sum")
    model = tiny(SHAPE, ["58 - 23"], seed=0)
    await rehearse_training(config, [start], model)
    without = TextTrainingConfig(run=run, text=text)
    with pytest.raises(EnvError, match="others/environment"):
        await rehearse_training(without, [start], model)


def test_other_hosts_are_refused_where_environments_come_from_a_pool_of_its_own() -> None:
    model = tiny(SHAPE, ["58 - 23"], seed=0)
    start = TaskStart(env=EnvSpec(id="text/sum"), task="sum", options={"problem": "58 - 23"})
    config = OwnPoolConfig(text=TextPoolConfig(num_envs=4))
    with pytest.raises(ConfigError, match=r"a pool of its own, .* leave cluster\.hosts empty"):
        make_host_recipe(config, [start], Team.of(model), chat_agent)
