"""LeRobot's folders of SmolVLA: read, refused, and written back bit by bit."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pi_folders
import pytest
import tiny_smolvla
import torch
from safetensors.torch import load_file, save_file

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.flow.smolvla_folder import SmolVlaParts, is_smolvla, load_smolvla
from vla_rl.models.small_files import save_folder
from vla_rl.types import Observation

CONFIG, WEIGHTS = "config.json", "model.safetensors"

OBSERVATION: Observation = {
    "image": np.full((28, 56, 3), 255, np.uint8),
    "wrist_image": np.full((64, 64, 3), 9, np.uint8),
    "state": np.linspace(-0.5, 0.5, 8, dtype=np.float32),
    "instruction": "pick up the bowl",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_smolvla.write_smolvla(tmp_path / "policy")


@torch.no_grad()
def act(parts: SmolVlaParts) -> torch.Tensor:
    inputs = parts.processor.prepare([OBSERVATION], torch.device("cpu"))
    prefix = parts.network.embed_prefix(inputs)
    return parts.network.velocity(prefix, torch.ones(1, 5, 32), torch.ones(1))


def save(parts: SmolVlaParts, folder: Path) -> Path:
    save_folder(folder, parts.layout.write_tensors(parts.network), parts.layout.files)
    return folder


def test_a_folder_comes_back_bit_by_bit_and_needs_nothing_beside_it(
    folder: Path, tmp_path: Path
) -> None:
    parts = load_smolvla(folder)
    saved = save(parts, tmp_path / "saved")
    before, after = load_file(folder / WEIGHTS), load_file(saved / WEIGHTS)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for path in folder.iterdir():
        if path.name != WEIGHTS:
            assert (saved / path.name).read_bytes() == path.read_bytes()
    folder.with_name("vlm").rename(tmp_path / "gone")
    assert torch.equal(act(parts), act(load_smolvla(saved)))


def test_half_precision_is_kept_tensor_by_tensor(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    halves = {
        name: tensor.bfloat16() if ".vlm." in name else tensor for name, tensor in tensors.items()
    }
    save_file(halves, folder / WEIGHTS)
    whole = act(load_smolvla(tiny_smolvla.write_smolvla(tmp_path / "whole/policy")))
    parts = load_smolvla(folder)
    saved = load_file(save(parts, tmp_path / "saved") / WEIGHTS)
    assert all(torch.equal(saved[name], halves[name]) for name in halves)
    assert saved["model.vlm_with_expert.vlm.lm_head.weight"].dtype == torch.bfloat16
    assert torch.allclose(act(parts), whole, atol=0.05)


def test_names_without_prefix_and_head_are_the_networks_own(folder: Path) -> None:
    held = load_file(folder / WEIGHTS)
    names = {name.removeprefix("model.") for name in held} - {tiny_smolvla.HEAD}
    assert names == set(load_smolvla(folder).network.state_dict()) == set(tiny_smolvla.SHAPES)
    assert is_smolvla(held)
    assert not is_smolvla(pi_folders.lerobot_tensors("pi0"))


def test_images_are_padded_above_and_on_the_left(folder: Path) -> None:
    inputs = load_smolvla(folder).processor.prepare([OBSERVATION], torch.device("cpu"))
    assert inputs.images.shape == (1, 2, 3, 56, 56)
    assert (inputs.images[0, 0, :, :28] == -1.0).all()
    assert (inputs.images[0, 0, :, 28:] == 1.0).all()
    assert (inputs.images[0, 1] == 9 / 255 * 2 - 1).all()


def test_the_prompt_is_the_instruction_and_a_line_break(folder: Path) -> None:
    parts = load_smolvla(folder)
    asked = {**OBSERVATION, "instruction": "go"}
    inputs = parts.processor.prepare([asked], torch.device("cpu"))
    letters = inputs.tokens[0][inputs.token_mask[0]].tolist()
    again = parts.processor.prepare([{**asked, "instruction": "go\n"}], torch.device("cpu"))
    assert len(letters) == 4  # <bos>, g, o, line break
    assert again.tokens[0][again.token_mask[0]].tolist() == letters


def test_a_missing_camera_is_masked(folder: Path) -> None:
    parts = load_smolvla(folder, cameras=["image", "none"])
    inputs = parts.processor.prepare([OBSERVATION], torch.device("cpu"))
    assert inputs.image_mask.tolist() == [[True, False]]
    with pytest.raises(ConfigError, match="one observation key for each camera"):
        load_smolvla(folder, cameras=["image"])


def drop_tensor(folder: Path) -> None:
    pi_folders.change_tensors(folder / WEIGHTS, model__state_proj__bias=None)


def add_tensor(folder: Path) -> None:
    pi_folders.change_tensors(folder / WEIGHTS, model__extra=torch.zeros(2))


def rename_all(folder: Path) -> None:
    pi_folders.rename_tensors(folder / WEIGHTS, "model.", "policy.")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop_tensor, r"state_proj\.bias"),
        (add_tensor, r"model\.extra"),
        (rename_all, r"begin with policy\., expected 'model\.'"),
        (
            lambda folder: pi_folders.change_json(folder / CONFIG, adapt_to_pi_aloha=True),
            "adapt_to_pi_aloha is on",
        ),
        (
            lambda folder: pi_folders.change_json(folder / CONFIG, num_expert_layers=2),
            "num_expert_layers is 2",
        ),
        (
            lambda folder: pi_folders.change_json(folder / CONFIG, n_action_steps=6),
            "6 rows of each chunk are to be executed, but a chunk has 5",
        ),
        (
            lambda folder: pi_folders.change_json(folder / CONFIG, vlm_model_name="nowhere at all"),
            "names 'nowhere at all'",
        ),
        (
            lambda folder: pi_folders.change_json(folder / CONFIG, vlm_model_name=7),
            "vlm_model_name is 7",
        ),
        (
            lambda folder: pi_folders.change_json(
                folder / CONFIG, resize_imgs_with_padding=[512, 256]
            ),
            r"resize_imgs_with_padding is \[512, 256\], expected a square",
        ),
        (
            lambda folder: pi_folders.change_json(folder / CONFIG, attention_mode="none"),
            "attention_mode",
        ),
        (
            lambda folder: (folder / "policy_preprocessor.json").unlink(),
            "policy_preprocessor.json is missing",
        ),
    ],
)
def test_a_broken_folder_is_refused_by_name(
    spoil: Callable[[Path], object], message: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(CheckpointError, match=message):
        load_smolvla(folder)
