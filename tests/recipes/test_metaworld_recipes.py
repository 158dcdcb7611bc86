"""Meta-World by the recipes of LIBERO: demonstrations, a policy, its evaluation and its training."""

import asyncio
import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from vla_rl.actors import LastingForkServers, Runtime
from vla_rl.cli import dry_run, evaluate
from vla_rl.cli.command_line import Command, Launch, TrainingLaunch
from vla_rl.cli.evaluate import EvalLaunch
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.metaworld import MetaWorldEnv
from vla_rl.envs.metaworld.scene import load_metaworld
from vla_rl.errors import ConfigError
from vla_rl.evaluation.config import planned_episodes
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes import sft_libero, suite_training
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.eval_metaworld import EvalMetaworldConfig
from vla_rl.recipes.grpo_metaworld import GrpoMetaworldConfig
from vla_rl.recipes.held_out_starts import HeldOutStarts
from vla_rl.recipes.record_demonstrations import RecordConfig, record_task
from vla_rl.recipes.sft_metaworld import SftMetaworldConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.recipes.srpo_metaworld import SrpoMetaworldConfig
from vla_rl.recipes.suite_training import held_out_episodes, training_starts
from vla_rl.rollout import SchedulerConfig

DRAWER_CLOSE = 5
IMAGE_SIZE = 28


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One demonstration of drawer-close, in small images."""
    try:
        load_metaworld()
    except ImportError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("metaworld") / "demos"
    config = RecordConfig(
        suite="metaworld_mt10",
        task_ids=(DRAWER_CLOSE,),
        num=1,
        image_size=IMAGE_SIZE,
        quality="fast",
        out=str(folder),
    )
    record_task(config, DRAWER_CLOSE)
    return folder


@pytest.fixture(scope="module")
def policy(demos: Path) -> Path:
    """A policy that was fine-tuned on it for two updates."""
    out = demos.with_name("base")
    config = SftMetaworldConfig(demonstrations=str(demos), updates=2, batch=2, out=str(out))
    assert asyncio.run(sft_libero.main(Command(Launch(), config))) == 0
    return out


def test_without_a_policy_the_commands_that_make_one_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for config in (SrpoMetaworldConfig(), GrpoMetaworldConfig()):
        with pytest.raises(
            ConfigError, match=r"policy is 'base', the default.*sft_metaworld.*--out base`"
        ):
            config.load_starting_policy()


def only_folder_in(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_a_demonstration_replays_to_success(demos: Path) -> None:
    with np.load(demos / "metaworld_mt10" / str(DRAWER_CLOSE) / "0000.npz") as saved:
        recorded = dict(saved)
    assert str(recorded["instruction"]) == "Push and close a drawer"
    assert recorded["action"].shape[1:] == (4,)
    assert recorded["state"].shape[1:] == (4,)
    env = MetaWorldEnv("metaworld_mt10", DRAWER_CLOSE, image_size=IMAGE_SIZE, quality="fast")
    env.reset(options={"init_state_id": int(recorded["init_state_id"])})
    env.render_every_step = False
    outcomes = [env.step(action)[2] for action in recorded["executed_action"]]
    env.close()
    assert outcomes == [False] * (len(outcomes) - 1) + [True]


async def test_an_evaluation_runs_each_start_once_as_its_dry_run_says(
    policy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = EvalMetaworldConfig(
        checkpoint=str(policy),
        tasks="drawer-close,reach",
        init_states="40,1000",
        step_limit=8,
        image_size=IMAGE_SIZE,
        num_envs=1,
        videos="none",
        root=str(tmp_path),
    )
    # the dry run and the evaluation fork their simulators from one server, which imports once
    async with asyncio.timeout(100), LastingForkServers("tests") as servers:
        for module in (dry_run, evaluate):
            monkeypatch.setattr(module, "Runtime", partial(Runtime, fork_servers=servers))
        assert await evaluate.main(Command(EvalLaunch(dry_run=True), config)) == 0
        planned = " ".join(capsys.readouterr().out.split())
        assert "4 episodes, 0 of them done already" in planned
        assert "everything that the evaluation would read was found" in planned
        assert not os.listdir(tmp_path)
        assert await evaluate.main(Command(EvalLaunch(), config)) == 0
    assert "at most 8 control steps" in " ".join(capsys.readouterr().out.split())
    folder = only_folder_in(tmp_path)
    results = json.loads((folder / "results.json").read_text())
    assert results["is_complete"]
    assert {(each["task"], each["init_state_id"]) for each in results["episodes"]} == {
        (f"metaworld_mt10/{task_id}", start) for task_id in (0, 5) for start in (40, 1000)
    }
    conditions = results["conditions"]
    assert (conditions["quality"], conditions["image_size"]) == ("fast", IMAGE_SIZE)
    assert not {"assets", "scenes", "physics"} & set(conditions)
    async with asyncio.timeout(100):  # nothing is missing
        assert await evaluate.main(Command(EvalLaunch(resume=folder), config)) == 0


async def test_a_run_trains_on_it_and_evaluates_held_out_starts(
    policy: Path, tmp_path: Path
) -> None:
    config = SrpoMetaworldConfig(
        run=RunConfig(name="small", updates=1, root=str(tmp_path)),
        policy=str(policy),
        tasks=("metaworld_mt10/drawer-close",),
        group_size=2,
        scheduler=SchedulerConfig(groups_per_update=1),
        simulators=SimulatorConfig(num_envs=1),
        step_limit=8,
        image_size=IMAGE_SIZE,
        held_out=HeldOutStarts(init_states="40", step_limit=8),
    )
    async with asyncio.timeout(200):
        assert await suite_training.main(Command(TrainingLaunch(), config)) == 0
    run = only_folder_in(tmp_path)
    lines = [json.loads(line) for line in (run / "held_out.jsonl").read_text().splitlines()]
    assert [line["weights"] for line in lines] == [0, 1]
    assert {line["task"] for line in lines} == {f"metaworld_mt10/{DRAWER_CLOSE}"}


def test_starts_of_training_and_held_out_starts_have_no_number_in_common() -> None:
    config = GrpoMetaworldConfig(policy="base")
    trained = {(start.task, start.options["init_state_id"]) for start in training_starts(config)}
    held_out = {
        (episode.task, episode.options["init_state_id"]) for episode in held_out_episodes(config)
    }
    assert len(trained) == 3 * 40
    assert len(held_out) == 3 * 34
    assert not trained & held_out
    with pytest.raises(ConfigError, match="the first 40 are trained on"):
        GrpoMetaworldConfig(policy="base", held_out=HeldOutStarts(init_states="39"))


def test_all_starts_are_fifty_of_each_task() -> None:
    episodes = planned_episodes(EvalMetaworldConfig(suites=("metaworld_mt50",)))
    assert len(episodes) == len({(each.task, str(each.options)) for each in episodes}) == 2500


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"suites": ("libero_goal",)}, "the recipes for LIBERO end in _libero"),
        ({"suites": ("metaworld_mt11",)}, r"expected suites of Meta-World \(metaworld_mt10, "),
        ({"tasks": "zzz"}, "names such as 'reach'; 'zzz' is no task's name"),
        ({"tasks": "drawer-opn"}, "did you mean 'drawer-open' by 'drawer-opn'"),
        ({"tasks": "10"}, "expected numbers from 0 to 9"),
        ({"init_states": "2147483648"}, "expected numbers from 0 to 2147483647"),
    ],
)
def test_what_meta_world_does_not_have_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EvalMetaworldConfig(**fields)  # type: ignore[arg-type]


def test_each_benchmark_has_its_own_recipes() -> None:
    with pytest.raises(ConfigError, match="expected tasks of LIBERO"):
        SrpoLiberoConfig(tasks=("metaworld_mt10/0",))
    with pytest.raises(ConfigError, match="the recipes for Meta-World end in _metaworld"):
        EvalLiberoConfig(suites=("metaworld_mt10",))


@pytest.mark.parametrize("field", [{"physics": "exact"}, {"assets": "x"}, {"scene_seeds": (1,)}])
def test_an_option_of_libero_is_refused_for_meta_world(field: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="only LIBERO's suites have this option"):
        RecordConfig(suite="metaworld_mt10", **field)  # type: ignore[arg-type]
