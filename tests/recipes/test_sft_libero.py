"""Supervised learning from all three layouts, of all heads, with adapters, augmentation and statistics of the data."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vla_rl.data import LeRobotWriter, RecordedEpisode, statistics_of
from vla_rl.engines import ImitationConfig, OptimizerConfig
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.images.augmentation import AugmentationConfig
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft
from vla_rl.recipes.checkpoints import CheckpointConfig, family_of, load_policy
from vla_rl.recipes.command_line import Command, Launch
from vla_rl.recipes.imitation import Samples, augmented_batches, tiny_policy
from vla_rl.recipes.sft_libero import SftLiberoConfig, main

sys.path.insert(0, str(Path(__file__).parents[1] / "data" / "support"))
from made_datasets import hdf5, made_episode

FAST = ImitationConfig(optimizer=OptimizerConfig(lr=3e-3, warmup_steps=2), micro_batch=8)


def save_npz(path: Path, episode: RecordedEpisode) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = {key: np.stack([read(step) for step in range(episode.num_steps)]) for key, read in episode.frames.items()}
    np.savez_compressed(
        path,
        action=episode.actions,
        state=episode.vectors["state"],
        instruction=np.array(episode.instruction),
        **frames,
    )


def written(layout: str, folder: Path) -> Path:
    """A small data set of one of the layouts."""
    if layout == "lerobot":
        LeRobotWriter(folder).add(made_episode("a", 6)).add(made_episode("b", 4, seed=1))
    elif layout == "npz":
        save_npz(folder / "libero_goal/5/0000.npz", made_episode("a", 6))
        save_npz(folder / "libero_goal/5/0001.npz", made_episode("b", 4, seed=1))
    else:
        hdf5(folder / "x_demo.hdf5", {f"demo_{n}": made_episode("a", 6 - 2 * n, seed=n).actions for n in range(2)})
    return folder


async def sft(tmp_path: Path, **changed: Any) -> Path:
    """A short run; returns the folder of its checkpoint."""
    defaults: dict[str, Any] = {
        "demonstrations": str(tmp_path / "demos"), "out": str(tmp_path / "out"), "updates": 2, "batch": 4,
        "imitation": FAST,
    }  # fmt: skip
    config = SftLiberoConfig(**{**defaults, **changed})
    assert await main(Command(Launch(), config)) == 0
    return Path(config.out)


@pytest.mark.parametrize("layout", ["lerobot", "npz", "hdf5"])
async def test_a_policy_is_taught_from_each_layout(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(layout, tmp_path / "demos")
    folder = await sft(tmp_path)
    assert "10 samples of 2 episodes" in capsys.readouterr().out
    assert family_of(str(folder)) == "openvla_oft"
    assert OpenVlaOft.load(folder).config.chunk_size == 8


@pytest.mark.parametrize("head", ["tokens", "l1", "diffusion"])
async def test_each_head_learns_what_it_was_shown(
    head: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    episode = made_episode("a", 4)
    episode.actions[:] = [0.5, -0.5, 0.25, 0.0, 0.0, 0.0, -1.0]
    LeRobotWriter(tmp_path / "demos").add(episode)
    updates = {"tokens": 70, "l1": 30, "diffusion": 2}[head]
    folder = await sft(tmp_path, tiny_head=head, updates=updates, augment=True)
    l1 = float(capsys.readouterr().out.split("imitation/l1 ")[1].split()[0])
    config = CheckpointConfig()
    policy = load_policy(str(folder), config, "cpu")
    assert policy.config.head == head  # type: ignore[union-attr]
    if head != "diffusion":
        assert l1 < 0.25  # a fresh policy is off by about 0.5


async def test_a_continuous_policy_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    written("lerobot", tmp_path / "demos")
    first = await sft(tmp_path, tiny_head="l1")
    second = await sft(tmp_path, checkpoint=str(first), out=str(tmp_path / "more"))
    assert family_of(str(second)) == "continuous"
    before, after = (ContinuousOpenVlaOft.load(folder).checkpoint_tensors() for folder in (first, second))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    (first / "action_head--1_checkpoint.pt").touch()
    with pytest.raises(ConfigError, match=r"has an action head, action_head--1_checkpoint.pt; say continuous"):
        load_policy(str(first), CheckpointConfig(policy_family="openvla_oft"), "cpu")


async def test_adapters_are_merged_into_a_checkpoint_that_anybody_can_load(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written("lerobot", tmp_path / "demos")
    first = await sft(tmp_path)
    capsys.readouterr()
    second = await sft(tmp_path, checkpoint=str(first), out=str(tmp_path / "more"), lora_rank=2, lora_alpha=4)
    trained, every = (int(word) for word in capsys.readouterr().out.split("\n")[1].split()[0:3:2])
    assert 0 < trained < every / 5
    before, after = OpenVlaOft.load(first), OpenVlaOft.load(second)
    assert after.config.lora is None
    assert before.checkpoint_tensors().keys() == after.checkpoint_tensors().keys()
    assert any(
        not torch.equal(a, b) for a, b in zip(*[p.checkpoint_tensors().values() for p in (before, after)], strict=True)
    )


async def test_statistics_of_the_data_scale_the_actions_and_are_saved_beside_the_old_ones(tmp_path: Path) -> None:
    written("lerobot", tmp_path / "demos")
    episodes = [made_episode("a", 6), made_episode("b", 4, seed=1)]
    wanted = statistics_of(episodes)
    first = await sft(tmp_path, statistics="data")
    fresh = OpenVlaOft.load(first).config
    assert fresh.action_bounds.low == pytest.approx(wanted["action"]["q01"])
    assert fresh.action_bounds.is_scaled == (True,) * 6 + (False,)
    assert fresh.action_bounds.gripper == "openvla"
    assert fresh.proprio is not None
    assert fresh.proprio.high == pytest.approx(wanted["proprio"]["q99"])
    LeRobotWriter(tmp_path / "other").add(made_episode("c", 9, seed=8))
    changed = {"checkpoint": str(first), "demonstrations": str(tmp_path / "other"), "statistics": "data"}
    second = await sft(tmp_path, **changed, out=str(tmp_path / "more"))
    found = msgspec.json.decode((second / "dataset_statistics.json").read_bytes())
    assert found["other"]["num_transitions"] == 9
    assert OpenVlaOft.load(second).config.action_bounds.low == pytest.approx(found["other"]["action"]["q01"])
    assert OpenVlaOft.load(second, norm_key="default").config.norm_key == "default"
    # of several sets none has to be chosen where the data's take their place, whatever they are to be called
    third = await sft(tmp_path, **{**changed, "checkpoint": str(second)}, out=str(tmp_path / "named"), norm_key="mine")
    assert OpenVlaOft.load(third).config.norm_key == "mine"
    assert set(msgspec.json.decode((third / "dataset_statistics.json").read_bytes())) == {"other", "mine"}


async def test_weights_can_be_saved_on_the_way(tmp_path: Path) -> None:
    written("lerobot", tmp_path / "demos")
    last = OpenVlaOft.load(await sft(tmp_path, updates=5, save_every=2)).checkpoint_tensors()
    second, fourth = (OpenVlaOft.load(tmp_path / f"out-00000{n}").checkpoint_tensors() for n in (2, 4))
    name = next(iter(last))
    assert not torch.equal(second[name], fourth[name])
    assert not torch.equal(fourth[name], last[name])


def test_a_sample_is_what_was_seen_and_the_chunk_from_there_on() -> None:
    policy = tiny_policy("tokens", None, seed=0)
    episodes = [made_episode("a", 6), made_episode("b", 10, seed=1)]
    samples = Samples(episodes, policy)
    assert len(samples) == 16
    last, first, middle = samples.demonstrations([5, 6, 9])
    assert last.num_valid == 1
    assert np.array_equal(last.actions[0], episodes[0].actions[5])
    assert not last.actions[1:].any()
    assert first.num_valid == 8
    assert np.array_equal(first.actions, episodes[1].actions[:8])
    assert middle.num_valid == 7
    assert np.array_equal(middle.observation["image"], episodes[1].frames["image"](3))


def test_augmented_batches_change_frames_and_nothing_else() -> None:
    policy = tiny_policy("tokens", None, seed=0)
    seen = [made_episode("a").observation(step) for step in (0, 0)]
    plain = policy.prepare(seen)
    changed = augmented_batches(policy, AugmentationConfig(), torch.Generator().manual_seed(0))(seen)
    assert changed.images.shape == plain.images.shape
    assert changed.images.dtype == torch.uint8
    assert not torch.equal(changed.images[0], changed.images[1])  # draws of their own, for the same frame
    assert torch.equal(changed.prompts, plain.prompts)
    assert plain.proprio is not None
    assert changed.proprio is not None
    assert torch.equal(changed.proprio, plain.proprio)


async def test_what_cannot_be_taught_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds neither meta/info.json nor .hdf5 nor .npz files"):
        await sft(tmp_path)
    written("lerobot", tmp_path / "demos")
    with pytest.raises(CheckpointError, match="nowhere is neither a folder nor a hub id"):
        await sft(tmp_path, checkpoint="nowhere")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="out exists already"):
        await sft(tmp_path)
    (tmp_path / "out").rmdir()
    (tmp_path / "out-000002").mkdir()
    with pytest.raises(ConfigError, match="out-000002 exists already"):
        await sft(tmp_path, save_every=2, updates=3)
    with pytest.raises(ConfigError, match="lora_rank is 0"):
        SftLiberoConfig(lora_rank=0)
