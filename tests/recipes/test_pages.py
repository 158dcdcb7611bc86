"""Configurations that ship, the numbers in them that decide a training run, the pages whose commands use recipes."""

import ast
import asyncio
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import public_checkpoint
import pytest
import torch
from torch import nn

from tests.cli.test_option_rules import training_recipes
from vla_rl.cli import dry_run
from vla_rl.cli.command_line import SHIPPED, Command, TrainingLaunch, found_config, parse_command
from vla_rl.cli.dry_run import open_each
from vla_rl.datasets import LeRobotWriter, RecordedEpisode
from vla_rl.engines import DeviceLane, EngineConfig, PolicyModel, TorchActionEngine
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import ConfigError, PolicyError
from vla_rl.learner import Demonstration, ImitationConfig, Imitator
from vla_rl.models.prismatic.config import TINY_TOKENIZER
from vla_rl.recipes.grpo_libero import GrpoLiberoConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig, main
from vla_rl.team.members import Member
from vla_rl.types import EnvSpec, Sampling

IN_THE_SUITE = (
    "srpo_openvla_oft_libero_10",
    "grpo_openvla_oft_libero_10",
    "srpo_openvla_oft_libero_10_8gpus",
)
"""Dry runs of the suite, which share a scene. Files of one method differ in the names of their suites
and in numbers, which another test compares."""

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
NAMES = [f"{method}_openvla_oft_{suite}" for method in ("srpo", "grpo") for suite in SUITES]


NAMES += [f"srpo_openvla_oft_{suite}_8gpus" for suite in SUITES]


def parsed(name: str, *arguments: str) -> Command[TrainingLaunch, SrpoLiberoConfig]:
    config = SrpoLiberoConfig if name.startswith("srpo") else GrpoLiberoConfig
    return parse_command(TrainingLaunch, config, "", ["--config", name, *arguments])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in the layout of the public ones, with the statistics of every suite."""
    folder = tmp_path_factory.mktemp("checkpoint") / "openvla-oft"
    public_checkpoint.write(folder, public_checkpoint.Parts(seed=0), TINY_TOKENIZER)
    statistics = {f"{suite}_no_noops": public_checkpoint.statistics() for suite in SUITES}
    (folder / "dataset_statistics.json").write_text(json.dumps(statistics))
    return folder


@pytest.fixture(scope="module")
def opened() -> set[bytes]:
    """Environments that a dry run of this file has opened."""
    return set()


@pytest.fixture
def opening_once(opened: set[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Open an environment for the first of the configurations that name it: it takes 3 s."""

    async def open_others(envs: Sequence[EnvSpec], config: SimulatorConfig) -> None:
        await open_each([env for env in envs if msgspec.json.encode(env) not in opened], config)
        opened.update(msgspec.json.encode(env) for env in envs)

    monkeypatch.setattr(dry_run, "open_each", open_others)


def test_each_suite_has_a_configuration_for_each_method() -> None:
    shipped = [path.stem for path in SHIPPED.glob("*.toml")]
    # those of small flow policies are tried in test_flow_training.py
    others = ("reach_", "libero_flow_")
    assert sorted(name for name in shipped if not name.startswith(others)) == sorted(NAMES)


@pytest.mark.usefixtures("opening_once")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in IN_THE_SUITE else pytest.mark.proof) for name in NAMES],
)
async def test_a_shipped_configuration_passes_a_dry_run(
    name: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite = name.partition("oft_")[2].removesuffix("_8gpus")
    arguments = ["--dry-run", "--policy", str(checkpoint), "--run.root", str(tmp_path / "runs")]
    if name.startswith("srpo"):
        arguments += ["--embedding.encoder", "pixels"]  # V-JEPA 2 would come from the hub
    # one scene with plain images: opening all of a suite takes half a minute
    arguments += ["--tasks", f"{suite}/0", "--quality", "fast", "--image-size", "84"]
    assert await main(parsed(name, *arguments)) == 0
    shown = capsys.readouterr().out
    assert (
        f"OpenVLA-OFT, tokens: sees image (exact), decides 8 x 7 numbers by the statistics '{suite}"
        in shown
    )
    assert "64 groups of 8 episodes" in shown
    assert ("8 ranks, shard weights" in shown) == name.endswith("_8gpus")
    assert "everything that the run would read was found" in shown
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_configuration_says_which_command_reads_it_and_where_its_numbers_come_from(
    name: str,
) -> None:
    text = (SHIPPED / f"{name}.toml").read_text()
    recipe = "srpo_libero" if name.startswith("srpo") else "grpo_libero"
    assert f"#     vla-rl {recipe} --config {name}\n" in text
    uncommented = [
        line
        for line in text.splitlines()
        if re.match(r"\w+ = ", line) and "#" not in line
        and line.partition(" =")[0] in ("lr", "group_size", "temperature", "updates", "groups_per_update")
    ]  # fmt: skip
    assert not uncommented
    assert "arXiv:" in text
    config = parsed(name).config
    assert config.run.name == name
    suite = name.partition("oft_")[2].removesuffix("_8gpus")
    assert config.tasks == (suite,)
    assert config.policy_format.norm_key in (suite, f"{suite}_no_noops")
    assert (config.scheduler.groups_per_update, config.group_size) == (64, 8)
    ranks = (config.learner.ranks, config.learner.shard)
    assert (ranks == (8, "weights")) == name.endswith("_8gpus")


def test_a_file_of_the_same_name_comes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert found_config(NAMES[0]) == SHIPPED / f"{NAMES[0]}.toml"
    Path(NAMES[0]).write_text("")
    assert found_config(NAMES[0]) == Path(NAMES[0])


def test_a_misspelt_name_gets_the_nearest_shipped_one() -> None:
    with pytest.raises(
        ConfigError, match="did you mean the shipped 'srpo_openvla_oft_libero_goal'"
    ):
        parsed("srpo_openvla_oft_libero_gaol")


DATA_PAGE = Path(__file__).parents[2] / "docs" / "data.md"
SMALLER = {
    "record_demonstrations": ["--num", "1", "--physics", "fast"],
    "sft_libero": ["--updates", "3", "--batch", "4"],
    "eval_libero": ["--init-states", "40", "--step-limit", "16", "--physics", "fast"],
}


def commands() -> list[list[str]]:
    """The arguments of each recipe in the page's block of three commands."""
    blocks = re.findall(r"```sh\n(.*?)```", DATA_PAGE.read_text(), re.DOTALL)
    (chain,) = [
        block for block in blocks if "record_demonstrations" in block and "eval_libero" in block
    ]
    return [shlex.split(line)[2:] for line in chain.replace("\\\n", " ").splitlines()]


@pytest.mark.proof
@pytest.mark.timeout(900)
def test_demonstrations_are_recorded_trained_and_evaluated_in_libero(tmp_path: Path) -> None:
    assert [words[0] for words in commands()] == [f"vla_rl.recipes.{name}" for name in SMALLER]
    for module, *words in commands():
        smaller = SMALLER[module.rpartition(".")[2]]
        for option in smaller[::2]:
            if option in words:
                del words[words.index(option) : words.index(option) + 2]
        ran = subprocess.run(
            [sys.executable, "-m", module, *words, *smaller],
            cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    (results,) = tmp_path.glob("runs/eval-*/results.json")
    assert json.loads(results.read_text())["summary"]["episodes"] == 1


FAMILY_PAGE = Path(__file__).parents[2] / "docs" / "add_a_policy_family.md"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The page's two files, as a reader would save and import them."""
    family, *rest = re.findall(r"```python\n(.*?)```", FAMILY_PAGE.read_text(), re.DOTALL)
    files = {"my_family": family, "train_mine": "\n".join(rest)}
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    for module, text in files.items():
        assert text.startswith(f"# {module}.py")
        (tmp_path / f"{module}.py").write_text(text)
        monkeypatch.delitem(sys.modules, module, raising=False)
        names |= vars(importlib.import_module(module))
    return names


@pytest.fixture
def policy(page: dict[str, Any]) -> PolicyModel[Any]:
    with torch.random.fork_rng():
        made: PolicyModel[Any] = page["CnnPolicy"](seed=0)
    return made


@pytest.fixture
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(num_threads=1) as lane:
        yield lane


async def test_the_family_is_trained_evaluated_and_loaded(
    page: dict[str, Any], policy: PolicyModel[Any], tmp_path: Path
) -> None:
    before = policy.network["head"].weight.detach().clone()  # type: ignore[index]
    async with asyncio.timeout(200):
        outcome = await page["train_mine"](policy, tmp_path)
        share = await page["evaluate"](policy)
    assert outcome.progress.num_episodes >= 4 * 16
    assert 0.0 <= share <= 1.0
    assert not torch.equal(policy.network["head"].weight, before)  # type: ignore[index]
    loaded = page["load_mine"](outcome.run.path).checkpoint_tensors()
    assert all(
        torch.equal(tensor, loaded[name]) for name, tensor in policy.checkpoint_tensors().items()
    )


async def test_the_family_is_trained_by_demonstrations(
    page: dict[str, Any], policy: PolicyModel[Any], tmp_path: Path
) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    episode = RecordedEpisode(
        name="a",
        instruction="reach the red square",
        actions=np.tile(np.array([1.0, -1.0], np.float32), (6, 1)),
        vectors={"state": np.zeros((6, 2), np.float32)},
        frames={"image": frames.__getitem__},
    )
    LeRobotWriter(tmp_path / "demos").add_episode(episode)
    async with asyncio.timeout(60):
        first = await page["imitate"](policy, tmp_path / "demos", 1)
        last = await page["imitate"](policy, tmp_path / "demos", 30)
    assert last < 0.5 * first


def test_a_class_in_place_of_an_instance_is_named(page: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match="the policy is the class CnnPolicy, expected an instance of it"
    ):
        Member(page["CnnPolicy"])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Dropout(0.1), "Dropout 'eyes.7' in training mode"),
        (nn.BatchNorm1d(64), "BatchNorm1d 'eyes.7' in training mode"),
    ],
)
def test_layers_by_which_acting_and_learning_disagree_are_named(
    layer: nn.Module, message: str, policy: PolicyModel[Any]
) -> None:
    policy.network["eyes"].append(layer)  # type: ignore[index]
    with pytest.raises(ConfigError, match=message):
        Member(policy)
    policy.network.eval()
    Member(policy)


def test_a_checkpoint_that_would_not_bring_the_policy_back_is_named(
    policy: PolicyModel[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "checkpoint_tensors", lambda: {"w": torch.zeros(1)}, raising=True)
    with pytest.raises(
        ConfigError, match=r"CnnPolicy has \d+ parameters, of which checkpoint_tensors gives 1"
    ):
        Member(policy)


async def test_actions_of_another_shape_are_named(
    policy: PolicyModel[Any], lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "decode", lambda tokens: np.zeros((len(tokens) * 4, 2), np.float32))
    seen = {"image": np.zeros((32, 32, 3), np.uint8)}
    async with asyncio.timeout(30):
        with pytest.raises(
            PolicyError,
            match=r"CnnPolicy\.decode gave \[4, 2\] for 1 decisions, expected \[1, H, D\]",
        ):
            async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
                await engine.act(seen, Sampling())


async def test_chunks_of_another_length_give_no_signal(
    policy: PolicyModel[Any], lane: DeviceLane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "encode", lambda actions: np.zeros((len(actions), 8), np.int64))
    seen = {"image": np.zeros((32, 32, 3), np.uint8)}
    whole, short = (
        Demonstration(observation=seen, actions=np.zeros((n, 2), np.float32), num_valid=n)
        for n in (4, 3)
    )
    async with asyncio.timeout(30):
        for shown in ([short], [whole, short]):
            with pytest.raises(ValueError, match=r"is a chunk \[3, 2\], expected \[4, 2\]"):
                await Imitator(policy, lane, ImitationConfig()).train_step(shown)


SHOWN = {"updates", "group_size", "groups_per_update", "lr", "clip_low", "clip_high"}


def stated_in(kind: Any) -> set[str]:
    """Return the names that a recipe gives a value, in its own file or in that of the recipe that it
    continues.
    """
    names = set()
    for each in kind.__mro__:
        module = each.__module__
        if not module.startswith("vla_rl.recipes.") or module.endswith("_training"):
            continue
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
            if isinstance(node, ast.keyword) and node.arg is not None:
                names.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


@pytest.mark.parametrize("kind", training_recipes(), ids=lambda kind: kind.__name__)
def test_a_recipe_states_what_decides_its_run(kind: Any) -> None:
    assert stated_in(kind) >= SHOWN


@pytest.mark.parametrize("kind", training_recipes(), ids=lambda kind: kind.__name__)
def test_a_recipe_runs_with_what_it_states(kind: Any) -> None:
    # the settings of a pipeline replace those of a recipe, so that its file could state others
    stated, run = kind(), parse_command(TrainingLaunch, kind, "", []).config
    assert run.learner == stated.learner
    assert (run.run, run.group_size, run.temperature, run.scheduler) == (
        stated.run,
        stated.group_size,
        stated.temperature,
        stated.scheduler,
    )
