"""The public checkpoint layout: its names, a strict round trip, and clear words about what is wrong
with a folder.
"""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from libero_bounds import LIBERO_BOUNDS
from safetensors.torch import load_file, save_file

from vla_rl.errors import CheckpointError
from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.tensor_reading import SINGLE_FILE as TENSOR_FILE


@pytest.fixture(scope="module")
def saved(policy: OpenVlaOft, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    policy.save(folder)
    return folder


def test_the_full_size_network_has_the_public_names_and_shapes(config: OpenVlaOftConfig) -> None:
    full = OpenVlaOftConfig(
        tokenizer_file=config.tokenizer_file, action_bounds=LIBERO_BOUNDS["libero_10"]
    )
    with torch.device("meta"):
        network = OpenVlaOftNetwork(full)
    assert len(network.state_dict()) == 982
    assert sum(parameter.numel() for parameter in network.parameters()) == 7_541_237_184


def test_names_on_disk_are_the_public_ones(saved: Path) -> None:
    names = load_file(saved / TENSOR_FILE).keys()
    assert {
        "vision_backbone.featurizer.blocks.0.ls1.scale_factor",
        "vision_backbone.featurizer.reg_token",
        "vision_backbone.fused_featurizer.attn_pool.latent",
        "projector.fc3.bias",
        "proprio_projector.fc1.weight",
        "language_model.model.layers.2.self_attn.q_proj.weight",
        "language_model.lm_head.weight",
    } <= names
    assert not any("gamma" in name or "inv_freq" in name or "constants" in name for name in names)


def test_a_saved_policy_loads_to_the_last_bit_and_saves_to_the_same_bytes(
    saved: Path, tmp_path: Path
) -> None:
    loaded = OpenVlaOft.load(saved)
    loaded.save(tmp_path / "again")
    for name in ("config.json", "tokenizer.json", TENSOR_FILE):
        assert (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_the_config_survives(policy: OpenVlaOft, saved: Path) -> None:
    loaded = OpenVlaOft.load(saved).config
    assert loaded == msgspec.structs.replace(
        policy.config, tokenizer_file=str(saved / "tokenizer.json")
    )


def test_missing_unknown_and_misshapen_tensors_are_named(saved: Path, policy: OpenVlaOft) -> None:
    tensors = load_file(saved / TENSOR_FILE)
    del tensors["projector.fc1.bias"]
    tensors["projector.fc4.bias"] = torch.zeros(1)
    tensors["projector.fc2.bias"] = torch.zeros(5)
    with pytest.raises(CheckpointError) as caught:
        policy.load_checkpoint_tensors(tensors)
    for complaint in (
        "1 missing: projector.fc1.bias",
        "1 unknown: projector.fc4.bias",
        "1 of another shape: projector.fc2.bias [5] instead of [128]",
    ):
        assert complaint in str(caught.value)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a folder with config\.json"):
        OpenVlaOft.load(tmp_path)


def test_another_architecture_is_refused(saved: Path, tmp_path: Path) -> None:
    public = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(public | {"arch_specifier": "linear"}))
    with pytest.raises(CheckpointError, match="arch_specifier is 'linear', expected 'no-align"):
        OpenVlaOft.load(tmp_path)


def test_a_truncated_tensor_file_is_refused(saved: Path, tmp_path: Path) -> None:
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    whole = (saved / TENSOR_FILE).read_bytes()
    (tmp_path / TENSOR_FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=TENSOR_FILE):
        OpenVlaOft.load(tmp_path)


def test_tensors_written_by_others_in_the_public_layout_load(
    saved: Path, tmp_path: Path, policy: OpenVlaOft
) -> None:
    """Without our manifest and with a config that holds more than we know, as public folders do."""
    public = json.loads((saved / "config.json").read_text())
    public |= {
        "auto_map": {"AutoConfig": "x.py"},
        "hf_llm_id": "meta-llama/Llama-2-7b-hf",
        "torch_dtype": "float32",
    }
    (tmp_path / "config.json").write_text(json.dumps(public))
    for name in ("tokenizer.json", "vla_rl.json"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    save_file(
        {name: tensor.contiguous() for name, tensor in policy.checkpoint_tensors().items()},
        tmp_path / TENSOR_FILE,
    )
    loaded = OpenVlaOft.load(tmp_path).checkpoint_tensors()
    assert all(
        torch.equal(tensor, loaded[name]) for name, tensor in policy.checkpoint_tensors().items()
    )


def test_saving_over_something_is_refused(saved: Path, policy: OpenVlaOft) -> None:
    with pytest.raises(CheckpointError, match="exists already"):
        policy.save(saved)
