"""A dry run looks at every file that the run would read, raises the run's own errors, and writes
nothing.
"""

import asyncio
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from toy_runs import small_run

from vla_rl.algorithms import EmbeddingConfig, VJepa2Config
from vla_rl.cli import dry_run
from vla_rl.cli.command_line import Command, Launch, TrainingLaunch
from vla_rl.cli.dry_run import distinct_envs, open_each, rehearse_training
from vla_rl.cli.memory_plan import EpisodeFootprint
from vla_rl.datasets import LeRobotWriter, RecordedEpisode
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs.experts import Demonstration
from vla_rl.errors import CheckpointError, ConfigError, DataError, EnvError, VlaRlError
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes import record_demonstrations, sft_libero, srpo_toy, watch_libero
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.srpo_toy import SrpoToyConfig, new_policy, training_starts
from vla_rl.reporting import RunDirectory
from vla_rl.rollout import TaskStart
from vla_rl.run.train import train
from vla_rl.types import EnvSpec


def changed(config: SrpoToyConfig, **run: Any) -> SrpoToyConfig:
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, **run))


def without_a_vjepa2_folder(root: Path) -> SrpoToyConfig:
    embedding = EmbeddingConfig(encoder="vjepa2", vjepa2=VJepa2Config(folder=str(root / "nowhere")))
    return msgspec.structs.replace(small_run(root / "runs"), embedding=embedding)


def with_a_vjepa2_folder_without_weights(root: Path) -> SrpoToyConfig:
    (root / "vjepa2").mkdir()
    (root / "vjepa2" / "config.json").write_text('{"model_type": "vjepa2"}')
    embedding = EmbeddingConfig(encoder="vjepa2", vjepa2=VJepa2Config(folder=str(root / "vjepa2")))
    return msgspec.structs.replace(small_run(root / "runs"), embedding=embedding)


def with_a_recording_among_other_files(root: Path) -> SrpoToyConfig:
    (root / "data").mkdir()
    (root / "data" / "notes.txt").write_text("mine")
    return changed(small_run(root / "runs"), record_to=str(root / "data"))


def with_a_recording_of_another_robot(root: Path) -> SrpoToyConfig:
    actions = np.zeros((3, 2), np.float32)
    episode = RecordedEpisode(
        name="a", instruction="go", actions=actions, vectors={"state": actions}, frames={}
    )
    LeRobotWriter(root / "data", fps=50, robot_type="cart").add_episode(episode)
    (root / "data/data/chunk-000/file-001.parquet.part").write_bytes(b"left by a kill")
    return changed(small_run(root / "runs"), record_to=str(root / "data"))


def in_a_file(root: Path) -> SrpoToyConfig:
    (root / "file").write_text("in the way")
    return small_run(root / "file" / "runs")


def without_wandb(root: Path) -> SrpoToyConfig:
    return changed(small_run(root / "runs"), wandb_project="robots")


CASES = [
    (without_a_vjepa2_folder, ConfigError, "and there is no such folder"),
    (with_a_vjepa2_folder_without_weights, ConfigError, "has none of model.safetensors"),
    (with_a_recording_among_other_files, DataError, "holds other files and no meta/info.json"),
    (with_a_recording_of_another_robot, DataError, "says 50.0, expected the same"),
    (in_a_file, ConfigError, "cannot be written"),
    (without_wandb, ConfigError, "wandb is not installed"),
]


def snapshot_of(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("case", CASES, ids=[case[0].__name__ for case in CASES])
async def test_what_the_run_would_refuse_a_dry_run_refuses_too(
    case: tuple[Callable[[Path], SrpoToyConfig], type[VlaRlError], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare, error, message = case
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = prepare(tmp_path)
    before = snapshot_of(tmp_path)
    async with asyncio.timeout(60):
        with pytest.raises(error) as by_dry_run:
            await srpo_toy.main(Command(TrainingLaunch(dry_run=True), config))
        assert snapshot_of(tmp_path) == before
        with pytest.raises(error) as by_run:
            await train(config, training_starts(config), new_policy(config))
    assert message in str(by_dry_run.value)
    assert message in str(by_run.value)


async def test_an_environment_that_cannot_be_opened_fails_a_dry_run_with_the_error_of_the_run(
    import_folder: Path, tmp_path: Path
) -> None:
    program = """
        import gymnasium

        class Reading(gymnasium.Env):
            def __init__(self, file):
                open(file)

        gymnasium.register("me/reading-v0", entry_point="reading_env:Reading")
    """
    (import_folder / "reading_env.py").write_text(textwrap.dedent(program))
    env = EnvSpec(id="reading_env:me/reading-v0", kwargs={"file": "no/such/scene.xml"})
    policy = OpenVlaOft.create(
        tiny(image_size=28, cameras=("image",), proprio=None, chunk_size=4), seed=0
    )
    starts = [TaskStart(env=env, task="reading")]
    async with asyncio.timeout(60):
        for begin in (rehearse_training, train):
            with pytest.raises(EnvError, match=r"scene.xml.* could not be made: FileNotFoundError"):
                await begin(small_run(tmp_path / "runs"), starts, policy)  # type: ignore[operator]


async def test_a_dry_run_looks_at_the_checkpoint_that_would_be_resumed_from(tmp_path: Path) -> None:
    config = changed(small_run(tmp_path), updates=1)
    async with asyncio.timeout(100):
        run = (await train(config, training_starts(config), new_policy(config))).run
        before = snapshot_of(tmp_path)
        await srpo_toy.main(Command(TrainingLaunch(dry_run=True, resume=run.path), config))
        assert snapshot_of(tmp_path) == before
        tensors = run.checkpoints / "update-000001" / "optimizer.safetensors"
        tensors.write_bytes(tensors.read_bytes()[:-1])
        with pytest.raises(CheckpointError, match=r"optimizer.safetensors has \d+ bytes, expected"):
            await srpo_toy.main(Command(TrainingLaunch(dry_run=True, resume=run.path), config))
        shutil.rmtree(run.path)
        with pytest.raises(ConfigError, match="holds no run"):
            await srpo_toy.main(Command(TrainingLaunch(dry_run=True, resume=run.path), config))


async def test_a_dry_run_of_what_can_be_trained_opens_each_environment_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = msgspec.structs.replace(small_run(tmp_path / "runs"), task_ids=(0, 1))
    async with asyncio.timeout(60):
        assert await srpo_toy.main(Command(TrainingLaunch(dry_run=True), config)) == 0
    out = capsys.readouterr().out
    assert "opening 2 environments once" in out
    assert "everything that the run would read was found" in out
    assert os.listdir(tmp_path) == []


async def test_the_other_recipes_look_too(tmp_path: Path) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(ConfigError, match="LIBERO's assets were not found in nowhere"):
            await watch_libero.main(
                Command(Launch(dry_run=True), watch_libero.WatchConfig(assets="nowhere"))
            )
    with pytest.raises(FileNotFoundError, match="LIBERO's assets were not found in nowhere"):
        record_demonstrations.main(
            Command(
                Launch(dry_run=True),
                record_demonstrations.RecordConfig(out=str(tmp_path), assets="nowhere"),
            )
        )
    demonstration(tmp_path / "demos" / "0000.npz", num_frames=3)
    config = sft_libero.SftLiberoConfig(
        demonstrations=str(tmp_path / "demos"), out=str(tmp_path / "base"), device="cpu"
    )
    async with asyncio.timeout(60):
        assert await sft_libero.main(Command(Launch(dry_run=True), config)) == 0
    assert sorted(os.listdir(tmp_path)) == ["demos"]


def demonstration(path: Path, num_frames: int) -> None:
    frames = np.zeros((num_frames, 84, 84, 3), np.uint8)
    path.parent.mkdir(parents=True)
    Demonstration(
        observations={
            "image": frames,
            "wrist_image": frames,
            "state": np.zeros((num_frames, 8), np.float32),
        },
        actions=np.full((num_frames, 7), -1.0, np.float32),
        executed_actions=np.zeros((num_frames, 7), np.float32),
        instruction="turn on the stove",
        task="libero_goal/7",
        init_state_id=0,
        settings={"scene_seed": 0, "physics": "fast"},
        is_success=True,
    ).write_npz(path)


def test_a_run_directory_that_cannot_be_written_is_found_before_it_is_made(tmp_path: Path) -> None:
    from vla_rl.reporting.run_directory import require_writable

    require_writable(tmp_path / "not" / "yet" / "there")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"file/runs cannot be written \(.*file is not a folder"):
        require_writable(tmp_path / "file" / "runs")
    assert RunDirectory(tmp_path).is_there() is False
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # trying leaves nothing behind


def test_a_run_directory_in_a_folder_that_stores_no_files_is_found_even_by_root() -> None:
    from vla_rl.reporting.run_directory import require_writable

    with pytest.raises(ConfigError, match=r"/proc/x cannot be written \(/proc"):
        require_writable(Path("/proc/x"))


def test_environments_that_are_equal_are_one_whatever_the_order_of_their_arguments() -> None:
    first = EnvSpec(id="a", kwargs={"x": 1, "y": 2})
    same = EnvSpec(id="a", kwargs={"y": 2, "x": 1})
    other = EnvSpec(id="a", kwargs={"x": 2})
    assert distinct_envs([first, other, same]) == [first, other]


async def test_text_tasks_are_opened_without_a_simulator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    await open_each([EnvSpec(id="text/arithmetic")], SimulatorConfig(num_envs=8))
    assert capsys.readouterr().out == ""
    wrong = EnvSpec(id="text/arithmetic", kwargs={"num_digts": 2})
    with pytest.raises(ConfigError, match="num_digts"):
        await open_each([wrong], SimulatorConfig(num_envs=8))


def test_a_plan_names_the_gpu_only_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(dry_run, "gpu_memory", lambda: [SimpleNamespace(name="H100")])
    config = small_run(tmp_path)
    footprint = EpisodeFootprint(
        what_runs="toys", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    for device, computes in (("cpu", "(CPU)"), ("auto", "(H100)")):
        on_device = msgspec.structs.replace(
            config, run=msgspec.structs.replace(config.run, device=device)
        )
        dry_run.print_plan(on_device, footprint, 1, 1)
        assert computes in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a/b", "", ".hidden", "été", "n" * 240])
def test_a_name_that_cannot_name_a_folder_is_refused_before_a_run_begins(name: str) -> None:
    told = r"Config\.name is .*expected letters, digits"
    with pytest.raises(ConfigError, match=told):
        RunConfig(name=name)
    with pytest.raises(ConfigError, match=told):
        EvalLiberoConfig(checkpoint="policy", name=name)
    assert RunConfig(name="n" * 239).name == "n" * 239
