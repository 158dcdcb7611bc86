"""The configurations that ship: each parses alone, and each passes a dry run with a checkpoint in the
public layout, without the weights of 7B and without the hub.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from vla_rl.cli import rehearsal
from vla_rl.cli.command_line import Command, TrainingLaunch, parse_command
from vla_rl.cli.config_files import SHIPPED, found_config
from vla_rl.cli.opening import open_each
from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import ConfigError
from vla_rl.models.openvla_oft.config import TINY_TOKENIZER
from vla_rl.recipes.grpo_libero import GrpoLiberoConfig
from vla_rl.recipes.libero_training import LiberoConfig, main
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.types import EnvSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "support"))
import public_checkpoint

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


def parsed(name: str, *arguments: str) -> Command[TrainingLaunch, LiberoConfig]:
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

    monkeypatch.setattr(rehearsal, "open_each", open_others)


def test_each_suite_has_a_configuration_for_each_method() -> None:
    assert sorted(path.stem for path in SHIPPED.glob("*.toml")) == sorted(NAMES)


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
    # one scene with plain pictures: opening all of a suite takes half a minute
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
