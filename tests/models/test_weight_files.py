"""Every family refuses the same damaged folders, whichever way they come in."""

import ast
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import public_checkpoint
import pytest
import torch
from pi_folders import write_lerobot, write_openpi
from safetensors.torch import load_file, save_file
from small_flow import tiny_policy
from steered_bases import write_head
from tiny_smolvla import write_smolvla
from tiny_vision import write_tiny_vision

import vla_rl
from vla_rl.algorithms import VJepa2Config
from vla_rl.errors import CheckpointError, VlaRlError
from vla_rl.learner.checkpoint.folders import HEADER, CheckpointHeader
from vla_rl.models.flow.loading import load_pi_policy, load_smolvla_policy
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small_folder import load_small_flow
from vla_rl.models.language import CausalLanguageModel, TinyConfig, load_language_model
from vla_rl.models.language.tiny import write_tiny
from vla_rl.models.language.vision_policy import VisionLanguageModel
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft
from vla_rl.models.prismatic.config import TINY_TOKENIZER
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.steered import SteeredPolicy
from vla_rl.models.tensor_reading import INDEX_FILE, SINGLE_FILE
from vla_rl.models.vjepa2 import check_folder, load_encoder
from vla_rl.util.atomic_files import MANIFEST, FileEntry, digest_file

SHAPE = MlpConfig(state_size=3, action_low=(-1.0,), action_high=(1.0,), num_bins=5, chunk_size=2)
SMALL = TinyConfig(
    hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, vocab_size=300, context_size=64
)


@dataclass(frozen=True)
class Family:
    """One way to read weights: a maker of its folder, and the loader."""

    write: Callable[[Path], Any]
    load: Callable[[Path], Any]


def write_public(folder: Path) -> None:
    public_checkpoint.write(folder, public_checkpoint.Parts(seed=0), TINY_TOKENIZER)


def write_continuous(folder: Path) -> None:
    parts = public_checkpoint.Parts(seed=0)
    public_checkpoint.write(folder, parts, TINY_TOKENIZER)
    parts.write_parts(folder)


def write_text(folder: Path) -> None:
    folder.mkdir()
    write_tiny(folder, SMALL, ["one two"], seed=0)


def write_vjepa2(folder: Path) -> None:
    from transformers import VJEPA2Config, VJEPA2Model

    shape = VJEPA2Config(
        crop_size=64, frames_per_clip=16, hidden_size=48, num_attention_heads=2, num_hidden_layers=1,
        pred_hidden_size=24, pred_num_attention_heads=2, pred_num_hidden_layers=1,
    )  # fmt: skip
    VJEPA2Model(shape).save_pretrained(folder)


def load_vjepa2(folder: Path) -> Any:
    check_folder(str(folder))
    return load_encoder(VJepa2Config(folder=str(folder), image_size=64))


FAMILIES: Final = {
    "openvla.py:OpenVla": Family(
        write_public, lambda folder: OpenVla.load(folder, norm_key="libero_goal")
    ),
    "openvla_oft/policy.py:OpenVlaOft": Family(
        write_public, lambda folder: OpenVlaOft.load(folder, norm_key="libero_goal")
    ),
    "openvla_oft/policy.py:ContinuousOpenVlaOft": Family(
        write_continuous, lambda folder: ContinuousOpenVlaOft.load(folder, norm_key="libero_goal")
    ),
    "mlp.py:MlpPolicy": Family(
        lambda folder: MlpPolicy.create(SHAPE, seed=0).save(folder), MlpPolicy.load
    ),
    "flow/small_folder.py:load_small_flow": Family(
        lambda folder: tiny_policy().save(folder), load_small_flow
    ),
    "steered/policy.py:SteeredPolicy": Family(write_head, SteeredPolicy.load),
    "flow/policy.py:FlowPolicy": Family(
        lambda folder: write_openpi(folder, "pi0"), FlowPolicy.load
    ),
    "flow/loading.py:load_pi_policy": Family(
        lambda folder: write_lerobot(folder, "pi05"),
        lambda folder: load_pi_policy(folder, AS_STORED, torch.device("cpu")),
    ),
    "flow/loading.py:load_smolvla_policy": Family(
        write_smolvla,
        lambda folder: load_smolvla_policy(folder, AS_STORED, torch.device("cpu")),
    ),
    "language/policy.py:CausalLanguageModel": Family(write_text, CausalLanguageModel.load),
    "language/vision_policy.py:VisionLanguageModel": Family(write_tiny_vision, load_language_model),
    "vjepa2.py:load_encoder": Family(write_vjepa2, load_vjepa2),
}
"""By the loader: its file below `vla_rl/models`, and its class or its own name."""


@pytest.fixture(scope="module", params=FAMILIES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one family with its weights in one file and without a manifest."""
    folder = tmp_path_factory.mktemp("written") / "policy"
    FAMILIES[request.param].write(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(file)
        file.unlink()
    (folder / INDEX_FILE).unlink(missing_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)
    save_file(tensors, folder / SINGLE_FILE, {"format": "pt"})
    return folder


@pytest.fixture
def family(request: pytest.FixtureRequest, written: Path) -> Family:
    return FAMILIES[request.node.callspec.params["written"]]


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return shutil.copytree(written, tmp_path / "policy")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / SINGLE_FILE)


def save(folder: Path, tensors: dict[str, torch.Tensor], name: str = SINGLE_FILE) -> None:
    (folder / name).unlink(missing_ok=True)
    save_file(tensors, folder / name, {"format": "pt"})


def in_shards(folder: Path, factor: float = 1.0, keep_whole: bool = False) -> None:
    tensors = {name: tensor * factor for name, tensor in tensors_of(folder).items()}
    names = list(tensors)
    files = {
        f"model-0000{number}-of-00002.safetensors": names[number - 1 :: 2] for number in (1, 2)
    }
    for file, held in files.items():
        save(folder, {name: tensors[name] for name in held}, file)
    weight_map = {name: file for file, held in files.items() for name in held}
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if not keep_whole:
        (folder / SINGLE_FILE).unlink()


def with_number(folder: Path, number: float) -> None:
    tensors = tensors_of(folder)
    # a tensor that each family reads: the encoder alone is read of V-JEPA 2
    name = next(name for name in reversed(tensors) if not name.startswith("predictor"))
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[0] = number
    save(folder, tensors)


def without_a_shard(folder: Path) -> None:
    in_shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def with_a_shard_of_another_save(folder: Path) -> None:
    in_shards(folder)
    save(folder, {"another": torch.zeros(2)}, "model-00003-of-00003.safetensors")


def twice(folder: Path, name: str, factor: float) -> None:
    tensors = {name: tensor * factor for name, tensor in tensors_of(folder).items()}
    if name.endswith(".bin"):
        torch.save(tensors, folder / name)
    else:
        save(folder, tensors, name)


def in_eight_bits(folder: Path) -> None:
    tensors = tensors_of(folder)
    name = next(name for name, each in tensors.items() if each.ndim == 2)
    save(folder, {**tensors, name: tensors[name].to(torch.float8_e4m3fn)})


def with_quantization(folder: Path) -> None:
    path = folder / "config.json"
    held = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**held, "quantization_config": {"quant_method": "fp8"}}))


DAMAGES: Final[dict[str, tuple[Callable[[Path], Any], str]]] = {
    "nan": (lambda folder: with_number(folder, float("nan")), "not finite"),
    "infinite": (lambda folder: with_number(folder, float("-inf")), "not finite"),
    "pointer": (
        lambda folder: (folder / SINGLE_FILE).write_bytes(
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        ),
        "Git LFS pointer",
    ),
    "truncated": (
        lambda folder: os.truncate(folder / SINGLE_FILE, 200),
        "not a whole safetensors file",
    ),
    "shards of another save": (
        lambda folder: in_shards(folder, 2.0, keep_whole=True),
        r"two sources of the tensor .* say different things: model-0000\d-of-00002.safetensors "
        r".*model.safetensors",
    ),
    "one shard of another save": (
        lambda folder: twice(folder, "model-00001-of-00001.safetensors", 2.0),
        "two sources of the tensor",
    ),
    "a shard that no index lists": (with_a_shard_of_another_save, "holds another, which"),
    "an index that names an absent shard": (without_a_shard, "lacks model-00002-of-00002"),
    "a .bin of another save": (
        lambda folder: twice(folder, "pytorch_model.bin", 2.0),
        "two sources of the tensor .* pytorch_model.bin",
    ),
    "quantised weights": (in_eight_bits, "holds quantised weights"),
    "a configuration of quantised weights": (with_quantization, "quantization_config"),
    "an adapter": (
        lambda folder: (folder / "adapter_config.json").write_text(
            '{"peft_type": "LORA", "r": 4, "lora_alpha": 8}'
        ),
        r"holds whole weights and an adapter \(adapter_config.json\)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_family_refuses_the_same_folders(family: Family, folder: Path, damage: str) -> None:
    apply, message = DAMAGES[damage]
    apply(folder)
    with pytest.raises(VlaRlError, match=message):
        family.load(folder)


def linked(folder: Path) -> None:
    """Turn a folder into one of the hub's cache: links to files under their digests."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        if blob.exists():
            path.unlink()
        else:
            path.rename(blob)
        path.symlink_to(os.path.relpath(blob, path.parent))


def with_hidden_copies(folder: Path) -> None:
    """Put a file `._NAME` beside each file NAME, and older versions of all in a hidden folder."""
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        path.with_name(f"._{path.name}").write_bytes(bytes(100))
        (path.parent / ".ipynb_checkpoints").mkdir(exist_ok=True)
        shutil.copy(path, path.parent / ".ipynb_checkpoints" / path.name)


def in_a_checkpoint(folder: Path) -> Path:
    """Put a folder where a run's checkpoint has its policy."""
    checkpoint = folder.parent / "update-000001"
    checkpoint.mkdir()
    moved = folder.rename(checkpoint / "policy")
    (checkpoint / HEADER).write_bytes(msgspec.json.encode(CheckpointHeader(1, 1)))
    entries = {
        path.relative_to(checkpoint).as_posix(): FileEntry(path.stat().st_size, digest_file(path))
        for path in checkpoint.rglob("*")
        if path.is_file()
    }
    (checkpoint / MANIFEST).write_bytes(msgspec.json.encode(entries))
    return moved


AGREEING: Final[dict[str, Callable[[Path], Any]]] = {
    "one file": lambda folder: None,
    "shards": in_shards,
    "links": linked,
    "links to shards": lambda folder: (in_shards(folder), linked(folder)),
    "equal shards beside": lambda folder: in_shards(folder, keep_whole=True),
    "an equal .bin": lambda folder: twice(folder, "pytorch_model.bin", 1.0),
    "an older shard that is equal": lambda folder: twice(
        folder, "model-00001-of-00001.safetensors", 1.0
    ),
    "a pointer for a .bin": lambda folder: (folder / "pytorch_model.bin").write_bytes(
        b"version https://git-lfs"
    ),
    "another tool's weights": lambda folder: save(
        folder, {"layers.0": torch.ones(2)}, "consolidated.safetensors"
    ),
    "another tool's manifest": lambda folder: (folder / MANIFEST).write_text('{"version": 3}'),
    "what tar on macOS adds": with_hidden_copies,
}


@pytest.mark.parametrize("change", AGREEING)
def test_every_family_takes_folders_whose_files_agree(
    family: Family, folder: Path, change: str
) -> None:
    AGREEING[change](folder)
    family.load(folder)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_is_found_in_the_hubs_cache(family: Family, folder: Path) -> None:
    linked(folder)
    family.load(folder)
    flipped((folder / SINGLE_FILE).resolve())
    with pytest.raises(VlaRlError, match="differs from what was published"):
        family.load(folder)


def test_numbers_that_are_not_finite_are_found_in_the_hubs_cache(
    family: Family, folder: Path
) -> None:
    with_number(folder, float("nan"))
    linked(folder)
    with pytest.raises(VlaRlError, match="not finite"):
        family.load(folder)


@pytest.mark.parametrize("name", [SINGLE_FILE, "config.json"])
def test_a_flipped_bit_is_found_in_the_policy_of_a_runs_checkpoint(
    family: Family, folder: Path, name: str
) -> None:
    policy = in_a_checkpoint(folder)
    family.load(policy)
    data = (policy / name).read_bytes()
    # still JSON, still the same settings: only its digest tells
    (policy / name).write_bytes(data + b" " if name == "config.json" else data[:-1] + b"\x01")
    with pytest.raises(VlaRlError, match=r"digest differs|bytes, expected"):
        family.load(policy)


def test_a_file_that_the_manifest_does_not_list_is_refused_and_a_note_is_not(
    family: Family, folder: Path
) -> None:
    policy = in_a_checkpoint(folder)
    (policy / "README.md").write_text("about this policy")
    family.load(policy)
    (policy / "generation_config.json").write_text("{}") if not (
        policy / "generation_config.json"
    ).exists() else (policy / "added_tokens.json").write_text("{}")
    with pytest.raises(VlaRlError, match="does not list"):
        family.load(policy)


def test_a_head_that_is_not_finite_is_refused_as_the_weights_are(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    write_continuous(folder)
    (file,) = folder.glob("action_head--*")
    head = torch.load(file, weights_only=True)
    next(iter(head.values())).view(-1)[0] = float("nan")
    torch.save(head, file)
    with pytest.raises(CheckpointError, match=r"action_head\..*not finite"):
        ContinuousOpenVlaOft.load(folder, norm_key="libero_goal")


def test_a_head_under_another_name_is_not_left_out_in_silence(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    write_continuous(folder)
    (file,) = folder.glob("action_head--*")
    file.rename(folder / "action_head.pt")
    for family in (OpenVlaOft, ContinuousOpenVlaOft):
        with pytest.raises(CheckpointError, match=r"has action_head\.pt and no action_head--"):
            family.load(folder, norm_key="libero_goal")
    (folder / "action_head.pt").unlink()
    (folder / "optimizer.pt").write_bytes(b"of a trainer")
    (folder / "proprio_projector--1_checkpoint.pt").unlink(missing_ok=True)
    OpenVlaOft.load(folder, norm_key="libero_goal")


def test_an_index_that_names_a_file_outside_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    MlpPolicy.create(SHAPE, seed=0).save(folder)
    (folder / MANIFEST).unlink()
    (folder / SINGLE_FILE).rename(tmp_path / "outside.safetensors")
    weight_map = {"head.bias": "../outside.safetensors"}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        CheckpointError, match=r"names \.\./outside\.safetensors, expected files of"
    ):
        MlpPolicy.load(folder)


MODELS = Path(vla_rl.__file__).parent / "models"


def test_every_loader_of_a_policy_is_among_the_families_of_these_tests() -> None:
    """A class with a method `load`, or a function of these names: add a new one to FAMILIES."""
    loaders = set()
    for path in MODELS.rglob("*.py"):
        for owner in ast.parse(path.read_text()).body:
            for node in owner.body if isinstance(owner, ast.ClassDef) else [owner]:
                is_loader = isinstance(node, ast.FunctionDef) and node.name in (
                    "load",
                    "load_encoder",
                    "load_small_flow",
                    "load_pi_policy",
                    "load_smolvla_policy",
                )
                if is_loader and any(
                    each.arg in ("folder", "source", "checkpoint", "config")
                    for each in node.args.args
                ):
                    loaders.add(f"{path.relative_to(MODELS)}:{owner.name}")
    assert loaders == FAMILIES.keys() - {"language/vision_policy.py:VisionLanguageModel"}
    # it inherits its loader
    assert "load" not in vars(VisionLanguageModel)


READERS: Final = {
    "models/weight_files.py": {"load"},
    # tensors are checked by those who read; those of a part with the weights
    "models/tensor_reading.py": {"safe_open", "load", "snapshot_download"},
    "models/language/checkpoint.py": {"from_pretrained"},
    "models/vjepa2.py": {"from_pretrained"},
    # into a folder that `language/checkpoint.py` reads
    "models/language/gguf.py": {"from_pretrained"},
    "learner/checkpoint/files.py": {"load_file"},
    # of a checkpoint that `learner/checkpoint/files.py` has verified and read
    "learner/distributed/weights.py": {"load_file"},
    "learner/distributed/state.py": {"safe_open"},
}
"""Files that read weights by a library, each behind the checks of `weight_files` or
`finiteness`."""


LIBRARY_READERS = ("safe_open", "load_file", "from_pretrained", "snapshot_download")


def test_weights_are_read_by_a_library_only_where_they_are_checked() -> None:
    found: dict[str, set[str]] = {}
    for path in MODELS.parent.rglob("*.py"):
        text = path.read_text()
        if not any(name in text for name in (*LIBRARY_READERS, "torch.load")):
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call | ast.Name):
                continue
            called = node.func if isinstance(node, ast.Call) else node
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            owner = getattr(getattr(called, "value", None), "id", "")
            if name in LIBRARY_READERS or (owner == "torch" and name == "load"):
                found.setdefault(str(path.relative_to(MODELS.parent)), set()).add(name)
    assert found == READERS


def test_an_older_format_of_pytorch_is_compared_as_well(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    MlpPolicy.create(SHAPE, seed=0).save(folder)
    (folder / MANIFEST).unlink()
    tensors = tensors_of(folder)
    old: dict[str, Any] = {"_use_new_zipfile_serialization": False}
    torch.save(tensors, folder / "pytorch_model.bin", **old)
    MlpPolicy.load(folder)
    tensors["head.bias"] = tensors["head.bias"] + 1.0
    torch.save(tensors, folder / "pytorch_model.bin", **old)
    with pytest.raises(
        CheckpointError, match=r"tensor head\.bias .* number 0 is 0.* number 0 is 1"
    ):
        MlpPolicy.load(folder)


def test_weights_of_lower_precision_agree_with_those_they_were_rounded_from(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    MlpPolicy.create(SHAPE, seed=0).save(folder)
    (folder / MANIFEST).unlink()
    half = {name: tensor.bfloat16() for name, tensor in tensors_of(folder).items()}
    torch.save(half, folder / "pytorch_model.bin")
    MlpPolicy.load(folder)


def test_an_adapter_without_its_configuration_is_left_aside_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MlpPolicy.create(SHAPE, seed=0).save(tmp_path / "policy")
    (tmp_path / "policy" / MANIFEST).unlink()
    save(tmp_path / "policy", {"x": torch.ones(1)}, "adapter_model.safetensors")
    MlpPolicy.load(tmp_path / "policy")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("adapter_model.safetensors in")
