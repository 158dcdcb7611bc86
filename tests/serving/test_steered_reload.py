"""A served head takes newer weights over; a head over another base leaves it as it is."""

import shutil
from pathlib import Path

import numpy as np
import torch

from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.models.steered.folder import load_base
from vla_rl.serving.checkpoint_watcher import CheckpointWatcher, find_policy
from vla_rl.types import Sampling

SHAPE = MlpConfig(state_size=1, action_low=(-1.0,), action_high=(1.0,), num_bins=5, hidden=(4,))
OBSERVATION = {"state": np.ones(1, np.float32)}


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
        MlpPolicy.create(SHAPE, seed=seed).save(tmp_path / f"base-{seed}")
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
