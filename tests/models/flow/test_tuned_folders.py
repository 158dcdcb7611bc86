"""Folders of fine-tuned flow policies: adapters beside their base or merged into it, statistics of other data."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pi_folders
import pytest
import tiny_smolvla
import torch
from safetensors.torch import load_file, save_file
from small_flow import observe, run_episodes, tiny_policy
from torch import Tensor

from vla_rl.engines import DeviceLane
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.families import find_family
from vla_rl.models.flow.new_statistics import copy_with_statistics
from vla_rl.models.flow.pi_folder import PiParts, load_pi
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.smolvla_folder import SmolVlaParts, load_smolvla
from vla_rl.models.flow.trained_parts import LORA_FILE, choose_trained
from vla_rl.models.loading import CheckpointFormat, load_policy
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.recipes.trainable_policy import add_adapters, choose_trained_part
from vla_rl.types import Sampling

LORA = LoraConfig(rank=2, alpha=4)

ADVANTAGES = [1.0, -1.0, 0.5]


def adapted(part: Any = "expert") -> FlowPolicy:
    policy = tiny_policy()
    choose_trained_part(policy, part)
    found: FlowPolicy = add_adapters(policy, LORA, seed=3)
    return found


def move_adapters(policy: FlowPolicy) -> None:
    """Change adapters as training would: new ones have a half of zeros."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.network.named_parameters():
            if ".lora_" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def decide(policy: FlowPolicy) -> Tensor:
    with torch.inference_mode():
        seen = [observe(0), observe(1)]
        return policy.sample(policy.prepare(seen), [Sampling(seed=1), Sampling(seed=2)]).tokens


def test_new_adapters_change_nothing() -> None:
    torch.testing.assert_close(decide(adapted()), decide(tiny_policy()), atol=1e-6, rtol=0.0)
    assert adapted().has_frozen_prefix
    assert not adapted("all").has_frozen_prefix


async def test_a_learner_trains_adapters_and_leaves_the_weights(lane: DeviceLane) -> None:
    policy = adapted()
    episodes = await run_episodes(policy, lane)
    config = LearnerConfig(epochs=2, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0))
    before = {name: each.clone() for name, each in policy.network.named_parameters()}
    report = await Learner(policy, lane, config).update(episodes, ADVANTAGES)
    assert report.metrics["update/log_prob_gap_max"] < 1e-5
    assert report.metrics["update/kept_prefix_gib"] > 0.0
    moved = {
        name
        for name, each in policy.network.named_parameters()
        if not torch.equal(each, before[name])
    }
    assert any(".lora_B." in name for name in moved)
    assert not any(".base_layer." in name for name in moved)


@pytest.mark.parametrize("family", ["small_flow", "openpi", "lerobot", "smolvla"])
def test_a_folder_with_adapters_comes_back_to_the_bit(family: str, tmp_path: Path) -> None:
    if family == "small_flow":
        tiny_policy().save(tmp_path / "base")
    elif family == "openpi":
        pi_folders.write_openpi(tmp_path / "base", "pi05")
    elif family == "lerobot":
        pi_folders.write_lerobot(tmp_path / "base", "pi0")
    else:
        tiny_smolvla.write_smolvla(tmp_path / "base")
    policy: Any = load_policy(str(tmp_path / "base"), CheckpointFormat(), "cpu")
    choose_trained_part(policy, "expert")
    policy = policy.adapted(LORA, seed=3)
    move_adapters(policy)
    policy.save(tmp_path / "saved")
    for loaded in (
        FlowPolicy.load(tmp_path / "saved"),
        load_policy(str(tmp_path / "saved"), CheckpointFormat(), "cpu"),
    ):
        expected = policy.network.state_dict()
        found = loaded.network.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], each) for name, each in expected.items())
        assert dict(loaded.checkpoint_files()) == dict(policy.checkpoint_files())
    # merged, it is a folder of its project again, with the names that it had
    merged = policy.merged()
    merged.save(tmp_path / "merged")
    names = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert names == load_file(tmp_path / "base" / "model.safetensors").keys()
    found_family = find_family(tmp_path / "merged")
    assert found_family is not None
    assert found_family.name != "adapted_flow"
    again: Any = load_policy(str(tmp_path / "merged"), CheckpointFormat(), "cpu")
    seen = [policy.example_observation(0)]
    for each in seen:
        del each["drawn"]
    tokens = [
        model.sample(model.prepare(seen), [Sampling(seed=1)]).tokens.detach()
        for model in (policy, again)
    ]
    torch.testing.assert_close(tokens[0], tokens[1], atol=1e-4, rtol=1e-4)


def test_a_resumed_run_has_the_very_numbers() -> None:
    policy, fresh = adapted(), adapted()
    move_adapters(policy)
    fresh.load_checkpoint_tensors(policy.checkpoint_tensors())
    assert torch.equal(decide(fresh), decide(policy))
    assert torch.equal(decide(policy.copy()), decide(policy))


@pytest.mark.parametrize("part", ["all", "expert"])
def test_a_further_run_trains_what_the_run_before_trained(part: Any, tmp_path: Path) -> None:
    policy = tiny_policy()
    choose_trained_part(policy, "expert")
    policy = policy.adapted(LORA, seed=3)
    policy.save(tmp_path / "saved")
    again = FlowPolicy.load(tmp_path / "saved")
    choose_trained_part(again, part)
    assert not any(".base_layer." in name for name in list_trained(again))
    if part == "expert":
        assert list_trained(again) == list_trained(policy)
        assert again.has_frozen_prefix
    # new adapters go on the layers that had some
    assert list_trained(again.adapted(LORA, seed=4)) >= list_trained(policy)


def list_trained(policy: FlowPolicy) -> set[str]:
    return {name for name, each in policy.network.named_parameters() if each.requires_grad}


def test_adapters_of_adapters_are_merged_first() -> None:
    policy = adapted()
    move_adapters(policy)
    expected = decide(policy)
    choose_trained(policy.network, "expert", None, seed=0, freezes_prefix=True)
    twice = policy.adapted(LORA, seed=4)
    torch.testing.assert_close(decide(twice), expected, atol=1e-5, rtol=0.0)
    names = [name for name in twice.network.state_dict() if ".lora_" in name]
    assert len(names) == len([name for name in adapted().network.state_dict() if ".lora_" in name])


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    adapted().save(tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    (half, *_) = [name for name in tensors if name.endswith("lora_B.default.weight")]
    changes = {
        "missing": {name: each for name, each in tensors.items() if name != half},
        "which is no linear layer": tensors
        | {"lora/nothing.lora_A.default.weight": tensors[half].clone()},
    }
    for words, changed in changes.items():
        folder = tmp_path / words.replace(" ", "-")
        folder.mkdir()
        shutil.copy(tmp_path / "saved" / "config.json", folder)
        shutil.copy(tmp_path / "saved" / LORA_FILE, folder)
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match=words):
            FlowPolicy.load(folder)
    shutil.copytree(tmp_path / "saved", tmp_path / "alone")
    (tmp_path / "alone" / LORA_FILE).unlink()
    with pytest.raises(CheckpointError, match="copy the whole folder"):
        FlowPolicy.load(tmp_path / "alone")


def test_layers_by_name_and_a_policy_of_which_nothing_is_trained_are_refused() -> None:
    policy = tiny_policy()
    with pytest.raises(ConfigError, match="expected 'hidden' for a flow policy"):
        policy.adapted(LoraConfig(targets="all-linear"), seed=0)
    policy.network.requires_grad_(False)
    with pytest.raises(ConfigError, match="no linear layer of the policy is trained"):
        policy.adapted(LORA, seed=0)


ROWS = {
    "state": np.random.default_rng(0).normal(2.0, 0.5, (400, 6)),
    "action": np.random.default_rng(1).normal(-1.0, 3.0, (400, 5)),
}

STATISTICS = {
    name: {
        "mean": rows.mean(0).tolist(),
        "std": rows.std(0).tolist(),
        "min": rows.min(0).tolist(),
        "max": rows.max(0).tolist(),
        "q01": np.quantile(rows, 0.01, axis=0).tolist(),
        "q99": np.quantile(rows, 0.99, axis=0).tolist(),
    }
    for name, rows in ROWS.items()
}

OBSERVATION = {
    "image": np.zeros((64, 64, 3), np.uint8),
    "wrist_image": np.zeros((64, 64, 3), np.uint8),
    "state": ROWS["state"].mean(0).astype(np.float32),
    "instruction": "go",
}

FOLDERS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], PiParts | SmolVlaParts]]] = {
    "openpi's pi0": (lambda path: pi_folders.write_openpi(path, "pi0"), load_pi),
    "openpi's pi0.5": (lambda path: pi_folders.write_openpi(path, "pi05"), load_pi),
    "LeRobot's pi0.5": (lambda path: pi_folders.write_lerobot(path, "pi05"), load_pi),
    "LeRobot's SmolVLA": (tiny_smolvla.write_smolvla, load_smolvla),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_states_and_actions_are_scaled_by_the_data(name: str, tmp_path: Path) -> None:
    write, load = FOLDERS[name]
    folder = write(tmp_path / "policy")
    parts = load(copy_with_statistics(folder, tmp_path / "copy", STATISTICS))
    assert (parts.settings.state_dim, parts.settings.action_dim) == (6, 5)
    assert parts.settings.action.kind == load(folder).settings.action.kind
    scaled = parts.processor.normalise_actions(ROWS["action"][None].astype(np.float32))
    assert abs(float(scaled.mean())) < 0.1
    back = parts.processor.restore_actions(scaled)
    assert np.allclose(back, ROWS["action"], atol=1e-4)
    # the mean of the data is near the middle of either kind
    inputs = parts.processor.prepare([OBSERVATION], torch.device("cpu"))
    assert float(inputs.state[0, :6].abs().max()) < 0.2
    assert float(inputs.state[0, 6:].abs().max()) == 0.0


@pytest.mark.parametrize(
    ("write", "asset"),
    [
        (pi_folders.write_openpi, "physical-intelligence/libero"),
        (pi_folders.write_lerobot, None),
    ],
)
def test_a_saved_folder_forgets_the_statistics_and_the_offsets_that_it_was_read_with(
    write: Any, asset: str | None, tmp_path: Path
) -> None:
    policy = load_policy(
        str(write(tmp_path / "policy", "pi0")),
        CheckpointFormat(norm_key=asset, state_offsets=6),
        "cpu",
    )
    policy.save(tmp_path / "saved")
    copy = copy_with_statistics(tmp_path / "saved", tmp_path / "copy", STATISTICS)
    config: Any = load_policy(str(copy), CheckpointFormat(), "cpu").config
    assert (config.action_dim, config.state_offsets) == (5, 0)


def test_weights_are_linked_and_stay_as_they_are(tmp_path: Path) -> None:
    folder = tiny_smolvla.write_smolvla(tmp_path / "policy")
    copy = copy_with_statistics(folder, tmp_path / "copy", STATISTICS)
    assert (copy / "model.safetensors").is_symlink()
    before = load_file(folder / "model.safetensors")
    written = load_smolvla(copy)
    found = written.layout.write_tensors(written.network)
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_statistics_that_lerobot_left_out_are_added(tmp_path: Path) -> None:
    folder = tiny_smolvla.write_smolvla(tmp_path / "policy")
    for file, step in (
        ("policy_preprocessor.json", "normalizer_processor"),
        ("policy_postprocessor.json", "unnormalizer_processor"),
    ):
        pi_folders.change_step(folder, file, step, state_file=None)
    with pytest.raises(CheckpointError, match="has no statistics"):
        load_smolvla(folder)
    parts = load_smolvla(copy_with_statistics(folder, tmp_path / "copy", STATISTICS))
    assert parts.settings.action_dim == 5


def test_a_folder_without_processors_is_refused(tmp_path: Path) -> None:
    folder = tiny_smolvla.write_smolvla(tmp_path / "policy")
    (folder / "policy_postprocessor.json").unlink()
    with pytest.raises(CheckpointError, match=r"policy_postprocessor\.json is missing"):
        copy_with_statistics(folder, tmp_path / "copy", STATISTICS)
