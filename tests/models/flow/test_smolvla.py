"""SmolVLA is LeRobot's: the network computes the same numbers, folders are read, refused, written back bit by
bit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pi_folders
import pytest
import tiny_smolvla
import torch
from safetensors.torch import load_file, save_file
from tiny_smolvla import SHAPES, TINY, golden_arrays, golden_inputs, golden_weights

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.flow.network import FlowInputs, Prefix
from vla_rl.models.flow.smolvla import SmolVlaNetwork
from vla_rl.models.flow.smolvla_folder import SmolVlaParts, is_smolvla, load_smolvla
from vla_rl.models.small_files import save_folder
from vla_rl.types import Observation


@pytest.fixture(scope="module")
def network() -> SmolVlaNetwork:
    made = SmolVlaNetwork(TINY).eval()
    made.load_state_dict(golden_weights())
    return made


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return golden_arrays()


@pytest.fixture(scope="module")
def inputs() -> FlowInputs:
    return golden_inputs()


@pytest.fixture(scope="module")
def prefix(network: SmolVlaNetwork, inputs: FlowInputs) -> Prefix:
    with torch.no_grad():
        return network.embed_prefix(inputs)


def require_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare as the golden files are meant to be: max |a - b| / max |b|."""
    assert found.shape == wanted.shape
    assert float((found - wanted).abs().max() / wanted.abs().max()) <= 1e-5


def integrate(
    network: SmolVlaNetwork, prefix: Prefix, noise: torch.Tensor, num_steps: int
) -> torch.Tensor:
    x = noise
    for step in range(num_steps):
        time = torch.full((len(x),), 1 - step / num_steps)
        x = x - network.velocity(prefix, x, time) / num_steps
    return x


def test_parameters_have_lerobots_names_and_shapes(network: SmolVlaNetwork) -> None:
    named = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
    assert named == SHAPES


def test_prefix_is_lerobots(
    network: SmolVlaNetwork,
    inputs: FlowInputs,
    prefix: Prefix,
    golden: dict[str, torch.Tensor],
) -> None:
    with torch.no_grad():
        embeddings, mask = network.embed_tokens(inputs)
    require_near(embeddings, golden["out_prefix_embeddings"])
    assert torch.equal(mask, golden["out_prefix_pad_mask"])
    assert torch.equal(prefix.mask, golden["out_prefix_pad_mask"])
    assert torch.equal(prefix.positions, golden["out_prefix_pad_mask"].cumsum(1) - 1)
    require_near(prefix.output, golden["out_prefix_output"])
    for layer in (0, 1):
        require_near(prefix.keys[layer], golden[f"out_prefix_key_layer{layer}"])
        require_near(prefix.values[layer], golden[f"out_prefix_value_layer{layer}"])


@torch.no_grad()
def test_velocity_and_loss_are_lerobots(
    network: SmolVlaNetwork, prefix: Prefix, golden: dict[str, torch.Tensor]
) -> None:
    noise, time = golden["in_noise"], golden["in_time"]
    require_near(network.velocity(prefix, noise, time), golden["out_velocity_at_noise_time"])
    mixed = time[:, None, None] * noise + (1 - time[:, None, None]) * golden["in_actions"]
    error = network.velocity(prefix, mixed, time) - (noise - golden["in_actions"])
    require_near(error**2, golden["out_loss"])


@pytest.mark.parametrize("num_steps", [4, 10])
@torch.no_grad()
def test_actions_are_lerobots(
    network: SmolVlaNetwork, prefix: Prefix, golden: dict[str, torch.Tensor], num_steps: int
) -> None:
    actions = integrate(network, prefix, golden["in_noise"], num_steps)
    require_near(actions, golden[f"out_actions_k{num_steps}"])


@torch.no_grad()
def test_an_action_sees_earlier_actions_only(
    network: SmolVlaNetwork, prefix: Prefix, golden: dict[str, torch.Tensor]
) -> None:
    noise, time = golden["in_noise"], golden["in_time"]
    changed = noise.clone()
    changed[:, 3] += 1.0
    before = network.velocity(prefix, noise, time)
    after = network.velocity(prefix, changed, time)
    assert torch.allclose(before[:, :3], after[:, :3], atol=1e-7)
    assert not torch.allclose(before[:, 3:], after[:, 3:], atol=1e-4)


@torch.no_grad()
def test_padding_and_missing_cameras_change_nothing(
    network: SmolVlaNetwork,
    inputs: FlowInputs,
    prefix: Prefix,
    golden: dict[str, torch.Tensor],
) -> None:
    images, tokens = inputs.images.clone(), inputs.tokens.clone()
    images[1, 1] = 0.5
    tokens[1, 4:] = 7
    other = network.embed_prefix(replace(inputs, images=images, tokens=tokens))
    wanted = network.velocity(prefix, golden["in_noise"], golden["in_time"])
    found = network.velocity(other, golden["in_noise"], golden["in_time"])
    assert torch.allclose(found, wanted, atol=1e-6)
    assert torch.allclose(network.features(other), network.features(prefix), atol=1e-5)


@torch.no_grad()
def test_a_repeated_row_of_a_prefix_gives_the_same_velocity(
    network: SmolVlaNetwork, prefix: Prefix, golden: dict[str, torch.Tensor]
) -> None:
    rows = torch.tensor([1, 0, 1])
    noise, time = golden["in_noise"], golden["in_time"]
    wanted = network.velocity(prefix, noise, time)[rows]
    found = network.velocity(prefix.rows(rows), noise[rows], time[rows])
    assert torch.allclose(found, wanted, atol=1e-6)


@torch.no_grad()
def test_image_marks_and_a_padded_prefix_are_masked_as_they_should_be(inputs: FlowInputs) -> None:
    config = msgspec.structs.replace(
        TINY, add_image_special_tokens=True, image_tokens=(201, 202), prefix_length=30
    )
    prefix = SmolVlaNetwork(config).eval().embed_prefix(inputs)
    assert prefix.mask.shape == (2, 30)
    # two cameras of 4 tokens and 3 marks, and a whole prompt of 6, and the state
    assert prefix.mask[0].tolist() == [True] * 21 + [False] * 9
    # of the missing camera only the marks are seen, as in LeRobot
    assert int(prefix.mask[1].sum()) == 4 + 3 + 3 + 4 + 1


def test_fewer_expert_layers_beside_two_kinds_of_attention_are_refused() -> None:
    config = msgspec.structs.replace(TINY, num_expert_layers=2)
    with pytest.raises(ConfigError, match=r"num_expert_layers is 2.*set num_expert_layers to -1"):
        SmolVlaNetwork(config)
    with pytest.raises(ConfigError, match=r"num_expert_layers is 3.*divisor"):
        SmolVlaNetwork(msgspec.structs.replace(TINY, num_expert_layers=3))


@torch.no_grad()
def test_fewer_expert_layers_attend_to_every_second_layer_of_the_text(inputs: FlowInputs) -> None:
    config = msgspec.structs.replace(TINY, num_expert_layers=2, self_attn_every_n_layers=-1)
    made = SmolVlaNetwork(config).eval()
    prefix = made.embed_prefix(inputs)
    x, time = torch.zeros(2, 5, 7), torch.ones(2)
    keys = list(prefix.keys)
    keys[1] = keys[1] + 1.0
    without = made.velocity(replace(prefix, keys=tuple(keys)), x, time)
    assert torch.equal(without, made.velocity(prefix, x, time))
    keys[2] = keys[2] + 1.0
    changed = made.velocity(replace(prefix, keys=tuple(keys)), x, time)
    assert not torch.equal(changed, made.velocity(prefix, x, time))


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
