"""Folders of openpi and LeRobot: read, refused, and written back bit by bit."""

from pathlib import Path

import numpy as np
import pi_folders
import pytest
import tiny_pi
import torch
from safetensors.torch import load_file, save_file

from vla_rl.errors import ConfigError
from vla_rl.models.flow.pi import PiKind, PiNetwork
from vla_rl.models.flow.pi_folder import PiParts, load_pi
from vla_rl.models.loading import load_policy
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.small_files import save_folder
from vla_rl.types import Observation

KINDS: tuple[PiKind, ...] = ("pi0", "pi05")
WRITERS = {"openpi": pi_folders.write_openpi, "lerobot": pi_folders.write_lerobot}
CONFIG, PREPROCESSOR, POSTPROCESSOR = (
    "config.json",
    "policy_preprocessor.json",
    "policy_postprocessor.json",
)
OBSERVATION: Observation = {
    "image": np.full((64, 48, 3), 200, np.uint8),
    "wrist_image": np.full((64, 64, 3), 9, np.uint8),
    "state": np.linspace(-0.5, 0.5, 8, dtype=np.float32),
    "instruction": "pick up the bowl",
}


@pytest.fixture(params=[(project, kind) for project in WRITERS for kind in KINDS])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    project, kind = request.param
    return WRITERS[project](tmp_path / "policy", kind)


def act(parts: PiParts) -> torch.Tensor:
    inputs = parts.processor.prepare([OBSERVATION], torch.device("cpu"))
    with torch.no_grad():
        prefix = parts.network.embed_prefix(inputs)
        return parts.network.velocity(prefix, torch.ones(1, 5, 32), torch.ones(1))


def test_a_folder_comes_back_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    parts = load_pi(folder)
    save_folder(tmp_path / "saved", parts.layout.write_tensors(parts.network), parts.layout.files)
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    small = [
        path for path in folder.rglob("*") if path.is_file() and path.name != "model.safetensors"
    ]
    assert len(small) >= 3
    for path in small:
        assert (tmp_path / "saved" / path.relative_to(folder)).read_bytes() == path.read_bytes()
    torch.testing.assert_close(act(parts), act(load_pi(tmp_path / "saved")), rtol=0, atol=1e-6)


def test_both_layouts_of_the_same_weights_move_alike(tmp_path: Path) -> None:
    """The golden weights follow from names, so they are given the same here."""
    first = load_pi(pi_folders.write_openpi(tmp_path / "openpi", "pi0"))
    second = load_pi(pi_folders.write_lerobot(tmp_path / "lerobot", "pi0"))
    second.network.load_state_dict(first.network.state_dict())
    inputs = first.processor.prepare([OBSERVATION], torch.device("cpu"))
    found = [
        parts.network.velocity(
            parts.network.embed_prefix(inputs), torch.ones(1, 5, 32), torch.ones(1)
        )
        for parts in (first, second)
    ]
    # weights that lie elsewhere in memory are added in another order
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)


def test_the_tensors_say_which_model_it_is_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi05")
    pi_folders.change_json(folder / CONFIG, type="pi0")
    pi_folders.change_step(folder, PREPROCESSOR, "tokenizer_processor", max_length=48)
    assert load_pi(folder).processor.tokenizer.max_length == 200
    policy = load_policy(str(folder), AS_STORED, "cpu")
    assert isinstance(policy.network, PiNetwork)
    assert policy.network.size.kind == "pi05"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "says pi0, but its tensors are those of pi05" in line


def test_a_table_that_is_stored_as_the_head_alone_is_read_and_written_so(tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi0")
    table = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    pi_folders.change_tensors(folder / "model.safetensors", **{table: None})
    parts = load_pi(folder)
    written = parts.layout.write_tensors(parts.network)
    assert table not in written
    assert "model.paligemma_with_expert.paligemma.lm_head.weight" in written


def test_names_and_shapes_that_are_saved_are_those_of_the_other_project(folder: Path) -> None:
    parts = load_pi(folder)
    project, kind = parts.settings.project, parts.network.size.kind
    golden = tiny_pi.golden_names(kind if project == "lerobot" else f"{kind}_openpi")
    written = {
        name.removeprefix("model." if project == "lerobot" else ""): list(tensor.shape)
        for name, tensor in parts.layout.write_tensors(parts.network).items()
        if "lm_head" not in name
    }
    assert written.keys() == golden.keys()
    # the golden files of LeRobot have actions of 7 numbers, its folders pad them to 32
    differing = {name for name in golden if written[name] != golden[name]}
    assert all("_proj" in name and name.startswith(("action_", "state_")) for name in differing)


def test_cameras_follow_from_their_names_or_are_named(tmp_path: Path) -> None:
    openpi = pi_folders.write_openpi(tmp_path / "openpi", "pi0")
    assert load_pi(openpi).processor.cameras == ("image", "wrist_image", "none")
    assert load_pi(openpi, cameras=["front", "none", "none"]).processor.cameras[0] == "front"
    with pytest.raises(ConfigError, match="one observation key for each camera"):
        load_pi(openpi, cameras=["image"])
    with pytest.raises(ConfigError, match="would see nothing"):
        load_pi(openpi, cameras=["none"] * 3)


def test_a_camera_that_was_renamed_is_found_under_its_first_name(tmp_path: Path) -> None:
    folder = pi_folders.write_lerobot(tmp_path / "policy", "pi0")
    names = {"observation.images.front": "observation.images.image"}
    pi_folders.change_step(folder, PREPROCESSOR, "rename_observations_processor", rename_map=names)
    assert load_pi(folder).processor.cameras == ("front", "wrist_image")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": np.zeros(7, np.float32)}, r"observation\['state'\] is float32 \[7\]"),
        ({"image": np.zeros((4, 4), np.uint8)}, r"observation\['image'\] is uint8 \[4, 4\]"),
        ({"wrist_image": None}, r"observation\['wrist_image'\] is NoneType"),
        ({"instruction": 3}, "instruction.* is int"),
    ],
)
def test_an_observation_that_does_not_suit_the_policy_is_named(
    tmp_path: Path, changes: Observation, message: str
) -> None:
    parts = load_pi(pi_folders.write_lerobot(tmp_path / "policy", "pi0"))
    with pytest.raises(ValueError, match=message):
        parts.processor.prepare([OBSERVATION | changes], torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_of_openpi_is_kept_tensor_by_tensor(kind: PiKind, tmp_path: Path) -> None:
    """openpi rounds PaliGemma and the expert, but for norms and the first layer of the tower."""
    folder = pi_folders.write_openpi(tmp_path / "policy", kind)
    whole = act(load_pi(folder))
    kept = ("patch_embedding", "position_embedding", "layernorm", "model.norm")
    tensors = load_file(folder / "model.safetensors")
    rounded = {
        name: tensor.bfloat16()
        if name.startswith("paligemma_with_expert") and not any(part in name for part in kept)
        else tensor
        for name, tensor in tensors.items()
    }
    # the tower's last norm is no norm of Gemma's, and is rounded with its layers
    rounded |= {name: each.bfloat16() for name, each in rounded.items() if "post_layernorm" in name}
    save_file(rounded, folder / "model.safetensors")
    parts = load_pi(folder)
    written = parts.layout.write_tensors(parts.network)
    assert {name: each.dtype for name, each in written.items()} == {
        name: each.dtype for name, each in rounded.items()
    }
    assert all(torch.equal(written[name], rounded[name]) for name in written)
    assert (act(parts) - whole).abs().max() < 0.02
