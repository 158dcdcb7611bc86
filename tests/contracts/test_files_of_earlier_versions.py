"""Files that earlier versions wrote still load, resume, report and evaluate.

`tests/fixtures/written_by_24320b8d/files.tar.xz` holds one of each kind that a user may keep: run folders
(with unfinished groups, adapters, a critic, two policies, two ranks, driving scores), checkpoints of
supervised training, an evaluation, data sets, traces, keys, a list of hosts, and every option of
every recipe. `how_written.txt` beside it is the program that wrote them with commit 24320b8d, and says how it
was started. A format may change: then the old one is converted when it is read, and these files stay as
they are.
"""

import json
import os
import shutil
import sys
import tarfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from vla_rl.actors.keys import read_keys
from vla_rl.cli.command_line import Command, Launch, TrainingLaunch, parse_command, read_config
from vla_rl.cli.evaluate import EvalLaunch, main as evaluate
from vla_rl.cli.main import main as vla_rl_command
from vla_rl.cluster.host_file import read_host_file
from vla_rl.datasets import DatasetOptions, open_dataset
from vla_rl.envs.libero.assets import PLACEHOLDER_ASSETS, find_assets
from vla_rl.evaluation.parity import compare, read_trace
from vla_rl.models.loading import CheckpointConfig, load_policy
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.recipes import driving_training, grpo_pair, sft_libero, srpo_toy, train_toy
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.grpo_driving import GrpoDrivingConfig
from vla_rl.recipes.grpo_libero import GrpoLiberoConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig

FILES = Path(__file__).parents[1] / "fixtures" / "written_by_24320b8d" / "files.tar.xz"

RUNS: dict[str, tuple[Any, type[Any]]] = {
    "srpo_toy": (srpo_toy, srpo_toy.SrpoToyConfig),
    "lora_toy": (srpo_toy, srpo_toy.SrpoToyConfig),
    "ppo_toy": (train_toy, train_toy.TrainToyConfig),
    "ranks_toy": (train_toy, train_toy.TrainToyConfig),
    "grpo_pair": (grpo_pair, grpo_pair.GrpoPairConfig),
    "grpo_driving": (driving_training, GrpoDrivingConfig),
}
"""The module whose `main` trains, and its configuration, by the folder of the run."""

KEPT_LINES = ("held_out.jsonl", "held_out_scores.jsonl", "validation.jsonl", "metrics.jsonl")


@pytest.fixture(scope="module")
def extracted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files as they were written."""
    folder = tmp_path_factory.mktemp("written")
    with tarfile.open(FILES) as archive:
        # keys are readable by their owner alone; Python before 3.11.4 knows no filters and needs none
        trusted = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
        archive.extractall(folder, **trusted)
    return folder


@pytest.fixture
def written(extracted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files, as the working directory: their configurations name each other by
    relative paths.
    """
    folder = tmp_path / "written"
    shutil.copytree(extracted, folder)
    monkeypatch.chdir(folder)
    return folder


def lines_in(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def checkpoint_in(run: Path) -> Path:
    return max(run.glob("checkpoints/update-*"))


def leaves(table: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested tables, by the path that leads there."""
    if not isinstance(table, dict):
        yield path, table
        return
    for name, value in table.items():
        yield from leaves(value, f"{path}.{name}" if path else name)


def todays_path(config: Any, path: str) -> str:
    """The path of an option in today's tables, from that in a file of an earlier version."""
    names = []
    for name in path.split("."):
        names.append(getattr(config, "FORMER_NAMES", {}).get(name, name))
        config = getattr(config, names[-1], None)
    return ".".join(names)


def require_values(config: Any, kept: dict[str, Any]) -> None:
    """Check that a configuration has each value of a file, under its name of today."""
    now = dict(leaves(json.loads(msgspec.json.encode(config, enc_hook=str))))
    for path, value in leaves(kept):
        assert now[todays_path(config, path)] == value, path


@pytest.mark.parametrize("name", RUNS)
async def test_a_run_resumes_by_one_update_and_reports(
    name: str, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, config_type = RUNS[name]
    run = written / "runs" / name
    checkpoint = checkpoint_in(run)
    before = {file: (run / file).read_bytes() for file in KEPT_LINES if (run / file).exists()}
    done = len(lines_in(run / "metrics.jsonl"))
    if module is srpo_toy:  # the recipe's own policy is wider than those of the files
        small = OpenVlaOft.load(checkpoint / "policy")
        monkeypatch.setattr(srpo_toy, "new_policy", lambda _: small)
    resume = ["--resume", str(run), "--run.updates", str(done + 1)]
    if name == "ranks_toy":  # the checkpoint of two ranks is one for any number of them
        resume += ["--learner.ranks", "1"]
    command = parse_command(TrainingLaunch, config_type, "", resume)
    assert await module.main(command) == 0
    for file, content in before.items():
        assert (run / file).read_bytes().startswith(content), file
    assert len(lines_in(run / "metrics.jsonl")) == done + 1
    after = checkpoint_in(run)
    assert after.name == f"update-{done + 1:06d}"
    policies = [file.relative_to(checkpoint) for file in checkpoint.rglob("model.safetensors")]
    assert len(policies) == (2 if name == "grpo_pair" else 1)
    for policy in policies:
        assert load_file(checkpoint / policy).keys() == load_file(after / policy).keys()
    critics = [(folder / "critic.safetensors").exists() for folder in (checkpoint, after)]
    assert critics == [name == "ppo_toy"] * 2


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_reported_as_it_is(
    name: str, written: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = written / "runs" / name / "report.html"
    report.unlink()
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    assert vla_rl_command(["report", str(report.parent)]) == 0
    assert str(report) in capsys.readouterr().out
    text = report.read_text()
    held_out = {"srpo_toy": "held out", "grpo_pair": "alidation", "grpo_driving": "ego_progress"}
    assert held_out.get(name, "update") in text


def test_the_groups_that_were_unfinished_are_in_the_files(written: Path) -> None:
    """Else resuming would not read trajectories."""
    for name, num_bytes in (("srpo_toy", 30_000), ("grpo_pair", 5_000)):
        part = checkpoint_in(written / "runs" / name) / "parts" / "scheduler.msgpack"
        assert part.stat().st_size > num_bytes


@pytest.mark.parametrize("name", ["tokens", "l1", "diffusion", "film", "adapted", "driver"])
def test_a_policy_of_actions_loads_and_is_saved_as_it_was(
    name: str, written: Path, tmp_path: Path
) -> None:
    folder = written / "policies" / name
    policy = load_policy(str(folder), CheckpointConfig(cameras=None), "cpu")
    policy.save(tmp_path / "again")
    again = tmp_path / "again"
    assert {file.name for file in folder.iterdir()} == {file.name for file in again.iterdir()}
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    before, after = (load_file(each / "model.safetensors") for each in (folder, again))
    assert before.keys() == after.keys()
    assert all(before[key].equal(after[key]) for key in before)


def test_a_policy_with_adapters_keeps_them(written: Path) -> None:
    folder = checkpoint_in(written / "runs" / "lora_toy") / "policy"
    policy = OpenVlaOft.load(folder)
    assert policy.config.lora is not None
    kept = load_file(folder / "model.safetensors")
    tensors = policy.checkpoint_tensors()
    assert kept.keys() == tensors.keys()
    assert all(tensors[name].equal(kept[name]) for name in kept)


async def test_an_evaluation_goes_on_with_what_is_missing(written: Path) -> None:
    run = written / "runs" / "evaluation"
    # who resumes has the package where it was; here it lies elsewhere
    conditions = json.loads((run / "conditions.json").read_text())
    conditions["assets_path"] = str(find_assets(PLACEHOLDER_ASSETS).path)
    (run / "conditions.json").write_text(json.dumps(conditions))
    before = json.loads((run / "results.json").read_text())["episodes"]
    resume = ["--resume", str(run), "--init-states", "40-42"]
    assert await evaluate(parse_command(EvalLaunch, EvalLiberoConfig, "", resume)) == 0
    after = json.loads((run / "results.json").read_text())["episodes"]
    assert [episode["init_state_id"] for episode in after] == [40, 41, 42]
    assert after[:2] == before
    assert len(open_dataset(written / "evaluated", DatasetOptions(gripper="none"))) == 3


@pytest.mark.parametrize(
    ("name", "episodes"),
    [("demos_lerobot", 2), ("demos_npz", 1), ("evaluated", 2), ("recorded", 3)],
)
def test_recorded_episodes_are_read(name: str, episodes: int, written: Path) -> None:
    found = open_dataset(written / name, DatasetOptions(gripper="none"))
    assert len(found) == episodes
    for episode in found:
        assert len(episode.actions) == episode.num_steps > 0
        assert episode.instruction
        assert episode.observation(episode.num_steps - 1)["image"].ndim == 3


@pytest.mark.parametrize("demonstrations", ["demos_lerobot", "demos_npz"])
async def test_supervised_training_goes_on_from_a_policy(
    demonstrations: str, written: Path
) -> None:
    config = sft_libero.SftLiberoConfig(
        demonstrations=demonstrations, checkpoint="policies/tokens", out="more", updates=1, batch=2
    )
    assert await sft_libero.main(Command(Launch(), config)) == 0
    assert (written / "more" / "model.safetensors").exists()


def test_every_option_that_was_kept_is_read_with_its_value(written: Path) -> None:
    for file in sorted((written / "configs").glob("*.json")):
        recipe = import_module(f"vla_rl.recipes.{file.stem}")
        config_type = next(
            kind
            for name, kind in vars(recipe).items()
            if name.lower() == f"{file.stem.replace('_', '')}config" or name == "WatchConfig"
        )
        config = read_config(file, config_type)
        require_values(config, json.loads(file.read_bytes()))


@pytest.mark.parametrize(
    ("name", "config_type"),
    [
        ("srpo_openvla_oft_libero_10_8gpus", SrpoLiberoConfig),
        ("grpo_openvla_oft_libero_goal", GrpoLiberoConfig),
    ],
)
def test_a_file_of_options_is_read(name: str, config_type: type[Any], written: Path) -> None:
    file = written / "configs" / f"{name}.toml"
    command = parse_command(TrainingLaunch, config_type, "", ["--config", str(file)])
    require_values(command.config, msgspec.toml.decode(file.read_bytes()))


def test_a_trace_is_compared_with_itself(written: Path) -> None:
    trace = read_trace(written / "traces" / "a.jsonl")
    assert compare(trace, trace).difference is None
    assert len(trace.entries) == 15


def test_keys_and_a_list_of_hosts_are_read(written: Path) -> None:
    (host,) = read_host_file(written / "hosts.toml")
    assert host.placement.address == "tcp://127.0.0.1:7070"
    assert host.placement.client_keys == read_keys(written / "keys" / "client.key")
    assert os.stat(written / "keys" / "client.key").st_mode & 0o077 == 0
