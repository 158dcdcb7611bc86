"""Newer weights act between two replies, those of heads too; weights that cannot be loaded change nothing."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.errors import CheckpointError
from vla_rl.learner.checkpoint.folders import HEADER, MANIFEST
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.small_files import save_folder
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.models.steered.folder import load_base
from vla_rl.serving.checkpoint_watcher import CheckpointWatcher, find_policy
from vla_rl.types import Sampling

SHAPE = MlpConfig(state_size=1, action_low=(0.0,), action_high=(10.0,), num_bins=11, hidden=(4,))

OBSERVATION = {"state": np.ones(1, np.float32)}


def save(folder: Path, action: int, shape: MlpConfig = SHAPE) -> None:
    """Save a policy that always takes one action, in place of what is there."""
    policy = MlpPolicy.create(shape, seed=0)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.zero_()
        policy.network.get_parameter("head.bias")[action] = 100.0
    shutil.rmtree(folder, ignore_errors=True)
    save_folder(folder, policy.checkpoint_tensors(), policy.checkpoint_files())


def save_update(run: Path, update: int, action: int) -> None:
    folder = run / "checkpoints" / f"update-{update:06d}"
    save(folder / "policy", action)
    (folder / HEADER).write_text(f'{{"format": 1, "weight_version": {update}}}')
    (folder / MANIFEST).touch()


@asynccontextmanager
async def watching(checkpoint: Path) -> AsyncIterator[tuple[CheckpointWatcher, TorchActionEngine]]:
    found = find_policy(checkpoint)
    model = MlpPolicy.load(found.folder)
    async with (
        DeviceLane(1) as lane,
        TorchActionEngine(model, lane, EngineConfig(), found.version) as engine,
    ):
        yield CheckpointWatcher(checkpoint, MlpPolicy.load, model, engine, lane, found), engine


async def act(engine: TorchActionEngine) -> tuple[int, int]:
    chunk = await engine.act(OBSERVATION, Sampling(greedy=True))
    return round(float(chunk.actions[0, 0])), chunk.weight_version


async def test_the_newest_checkpoint_of_a_run_acts_with_its_update(tmp_path: Path) -> None:
    save_update(tmp_path, 3, action=1)
    async with watching(tmp_path) as (watcher, engine):
        assert await act(engine) == (1, 3)
        assert not await watcher.reload_newer()
        save_update(tmp_path, 7, action=2)
        assert await watcher.reload_newer()
        assert await act(engine) == (2, 7)
        assert watcher.state.error is None


async def test_a_folder_whose_files_change_is_read_again(tmp_path: Path) -> None:
    save(tmp_path / "policy", action=1)
    async with watching(tmp_path / "policy") as (watcher, engine):
        assert await act(engine) == (1, 0)
        save(tmp_path / "policy", action=2)
        assert await watcher.reload_newer()
        assert await act(engine) == (2, 1)
        assert not await watcher.reload_newer()


@pytest.mark.parametrize("damage", ["cut", "gone", "wider", "other settings", "not finite"])
async def test_a_reload_that_fails_keeps_the_old_weights_and_says_why(
    tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "policy"
    save(folder, action=1)
    async with watching(folder) as (watcher, engine):
        wider, other = {"hidden": (5,)}, {"action_high": (20.0,)}
        fields = {"wider": wider, "other settings": other}.get(damage, {})
        save(folder, action=2, shape=MlpConfig(**{**_fields(SHAPE), **fields}))
        weights = folder / "model.safetensors"
        if damage == "cut":
            weights.write_bytes(weights.read_bytes()[:-8])
        elif damage == "gone":
            weights.unlink()
        elif damage == "not finite":
            weights.write_bytes(weights.read_bytes()[:-4] + b"\xff" * 4)
        assert not await watcher.reload_newer()
        assert watcher.state.error is not None
        assert str(folder) in watcher.state.error
        assert await act(engine) == (1, 0)
        # whole again: the next look takes it
        save(folder, action=4)
        assert await watcher.reload_newer()
        assert await act(engine) == (4, 1)
        assert watcher.state.error is None


def _fields(config: MlpConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


async def test_a_reader_that_fails_in_its_own_way_and_a_checkpoint_that_is_taken_back(
    tmp_path: Path,
) -> None:
    save_update(tmp_path, 1, action=1)
    async with watching(tmp_path) as (watcher, engine):

        def fail(folder: Path) -> MlpPolicy:
            raise KeyError("no such layer")

        watcher._load = fail
        save_update(tmp_path, 2, action=2)
        assert not await watcher.reload_newer()
        assert watcher.state.error == "'no such layer'"
        assert await act(engine) == (1, 1)
        shutil.rmtree(tmp_path / "checkpoints" / "update-000002")
        assert not await watcher.reload_newer()
        assert watcher.state.error is None


async def test_no_reply_mixes_two_versions_while_checkpoints_follow_each_other(
    tmp_path: Path,
) -> None:
    save_update(tmp_path, 1, action=1)
    async with watching(tmp_path) as (watcher, engine):
        pairs: set[tuple[int, int]] = set()

        async def ask() -> None:
            while True:
                pairs.add(await act(engine))

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        for update in range(2, 9):
            save_update(tmp_path, update, action=update)
            assert await watcher.reload_newer()
        await asyncio.sleep(0.05)
        for task in asking:
            task.cancel()
        await asyncio.wait(asking)
    assert pairs <= {(update, update) for update in range(1, 9)}
    assert (8, 8) in pairs


async def test_a_run_without_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="a run without a checkpoint"):
        find_policy(tmp_path)


BASE_SHAPE = MlpConfig(
    state_size=1, action_low=(-1.0,), action_high=(1.0,), num_bins=5, hidden=(4,)
)


def save_head(folder: Path, base: Path, bias: float) -> None:
    """Save a head that corrects everything alike, in place of what is there."""
    frozen = load_base(str(base), AS_STORED, torch.device("cpu"))
    policy = SteeredPolicy.create(frozen, SteeringConfig(hidden=(4,)), seed=0)
    with torch.no_grad():
        policy.network.mean.bias.fill_(bias)
    shutil.rmtree(folder, ignore_errors=True)
    policy.save(folder)


async def test_a_newer_head_acts_and_one_over_another_base_does_not(tmp_path: Path) -> None:
    for seed in (0, 1):
        MlpPolicy.create(BASE_SHAPE, seed=seed).save(tmp_path / f"base-{seed}")
    head, greedy = tmp_path / "head", Sampling(greedy=True)
    save_head(head, tmp_path / "base-0", bias=0.0)
    found = find_policy(head)
    model = SteeredPolicy.load(head)
    async with (
        DeviceLane(1) as lane,
        TorchActionEngine(model, lane, EngineConfig(), found.version) as engine,
    ):
        watcher = CheckpointWatcher(head, SteeredPolicy.load, model, engine, lane, found)
        first = (await engine.act(OBSERVATION, greedy)).tokens
        save_head(head, tmp_path / "base-0", bias=30.0)
        assert await watcher.reload_newer()
        second = (await engine.act(OBSERVATION, greedy)).tokens
        np.testing.assert_allclose(second, first + 0.5)
        save_head(head, tmp_path / "base-1", bias=-30.0)
        assert not await watcher.reload_newer()
        assert "other settings than the policy that is served" in str(watcher.state.error)
        third = (await engine.act(OBSERVATION, greedy)).tokens
        np.testing.assert_array_equal(third, second)
