"""Reading public checkpoints: strict names, shards, damage, statistics, memory, and exact
positions.
"""

import copy
import ctypes
import gc
import json
import re
import shutil
from pathlib import Path

import public_checkpoint
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.openvla import OpenVla, OpenVlaNetwork, read_config
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.models.prismatic.config import TINY_TOKENIZER, LlmConfig, tiny
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.models.prismatic.folder import open_folder
from vla_rl.models.prismatic.public_config import public_name
from vla_rl.models.prismatic.trunk import build_trunk, require_bidirectional

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "tiny"
    public_checkpoint.write(folder, public_checkpoint.Parts(seed=0), TINY_TOKENIZER)
    return folder


@pytest.fixture
def folder(public: Path, tmp_path: Path) -> Path:
    """A public checkpoint of its own, to be damaged."""
    return shutil.copytree(public, tmp_path / "public")


def load(folder: Path) -> OpenVla:
    return OpenVla.load(folder, norm_key="libero_goal")


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {SHARD} of 2 shards"):
        load(folder)


def test_a_truncated_shard_is_named(folder: Path) -> None:
    whole = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=f"{SHARD} is not a whole safetensors file"):
        load(folder)


def test_missing_unknown_and_misshapen_tensors_are_named_together(folder: Path) -> None:
    tensors = load_file(folder / SHARD)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["language_model.extra"] = SHARD
    del (
        index["weight_map"]["language_model.lm_head.weight"],
        tensors["language_model.lm_head.weight"],
    )
    tensors |= {"language_model.extra": torch.zeros(1), "projector.fc3.bias": torch.zeros(5)}
    save_file(tensors, folder / SHARD)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for complaint in (
        "1 missing: language_model.lm_head.weight",
        "1 unknown: language_model.extra",
        "1 of another shape: projector.fc3.bias [5] instead of [32]",
    ):
        assert complaint in str(caught.value)


def test_numbers_that_are_not_finite_are_damage(folder: Path) -> None:
    tensors = load_file(folder / SHARD)
    tensors["language_model.lm_head.weight"][3, 3] = float("inf")
    save_file(tensors, folder / SHARD)
    with pytest.raises(CheckpointError, match=r"language_model\.lm_head\.weight .* not finite"):
        load(folder)


def test_a_flipped_bit_in_a_checkpoint_of_ours_is_found(folder: Path, tmp_path: Path) -> None:
    load(folder).save(tmp_path / "ours")
    path = tmp_path / "ours" / SHARD
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is not what was written"):
        OpenVla.load(tmp_path / "ours")


def test_statistics_in_their_own_file_come_with_those_of_the_config(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"\['bridge_orig', 'libero_goal_no_noops'\]"):
        OpenVla.load(folder)
    with pytest.raises(CheckpointError, match="no 'libero_10'"):
        OpenVla.load(folder, norm_key="libero_10")
    assert OpenVla.load(folder, norm_key="bridge_orig").config.norm_key == "bridge_orig"


def test_least_and_greatest_values_are_the_other_normalization(folder: Path) -> None:
    quantiles = OpenVla.load(folder, norm_key="libero_goal").config.action_bounds
    extremes = OpenVla.load(
        folder, norm_key="libero_goal", normalization="bounds"
    ).config.action_bounds
    assert quantiles.low[0] == pytest.approx(-0.1)
    assert extremes.low[0] == pytest.approx(-1.1)
    assert extremes.high[0] == pytest.approx(1.2)


def test_a_saved_policy_knows_its_normalization(folder: Path, tmp_path: Path) -> None:
    extremes = OpenVla.load(folder, norm_key="libero_goal", normalization="bounds")
    extremes.save(tmp_path / "ours")
    assert OpenVla.load(tmp_path / "ours").config.action_bounds == extremes.config.action_bounds


def test_a_saved_policy_is_of_its_family_whoever_loads_it(folder: Path, tmp_path: Path) -> None:
    load(folder).save(tmp_path / "ours")
    with pytest.raises(
        CheckpointError, match="holds a policy of the family 'openvla', expected 'openvla_oft'"
    ):
        OpenVlaOft.load(tmp_path / "ours")


def test_an_action_head_beside_the_weights_of_a_token_policy_is_not_left_out_in_silence(
    folder: Path,
) -> None:
    torch.save({}, folder / "action_head--1000_checkpoint.pt")
    with pytest.raises(
        CheckpointError,
        match=r"has an action head, action_head--1000_checkpoint\.pt, so its actions are no",
    ):
        OpenVlaOft.load(folder, norm_key="libero_goal")


def test_another_trunk_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] = 2048
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="vocab_size is 2048, expected 1088"):
        load(folder)


def test_what_is_no_folder_and_no_hub_id_is_refused() -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        OpenVla.load("no such folder")


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="cannot be fetched from the hub"):
        OpenVla.load("vla-rl-tests/no-such-model")


def test_nothing_is_written_into_the_loaded_folder(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    load(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_weights_are_cast_while_positions_stay_float32(folder: Path) -> None:
    policy = OpenVla.load(folder, norm_key="libero_goal", dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in policy.checkpoint_tensors().values()} == {torch.bfloat16}
    exact = OpenVla.load(
        folder, norm_key="libero_goal"
    ).network.language_model.model.rotary_emb.inv_freq
    assert torch.equal(policy.network.language_model.model.rotary_emb.inv_freq, exact)


def test_no_cast_rounds_the_positions() -> None:
    trunk = build_trunk(
        LlmConfig(hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2), is_causal=False
    )
    exact = trunk.model.rotary_emb.inv_freq.clone()
    for cast in (trunk.bfloat16, trunk.half, trunk.float, lambda: trunk.to(torch.bfloat16)):
        cast()
        assert torch.equal(trunk.model.rotary_emb.inv_freq, exact)


def test_no_wrapping_rounds_the_positions(tmp_path: Path) -> None:
    """As a trainer wraps a network: copied, under DDP, and sharded by FSDP2 with bfloat16 to
    compute with.
    """
    policy = OpenVlaOft.create(tiny(image_size=28), seed=0)
    exact = policy.network.language_model.model.rotary_emb.inv_freq.clone()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        copied = copy.deepcopy(policy.network).bfloat16()
        parallel = nn.parallel.DistributedDataParallel(copied)
        sharded = fully_shard(
            copy.deepcopy(policy.network),
            mesh=init_device_mesh("cpu", (1,)),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
        )
        for network in (copied, parallel.module, sharded):
            assert torch.equal(network.language_model.model.rotary_emb.inv_freq, exact)
    finally:
        torch.distributed.destroy_process_group()


def test_rounded_positions_are_a_setting() -> None:
    config = LlmConfig(
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=2,
        rope_inv_freq_dtype="bfloat16",
    )
    frequencies = build_trunk(config, is_causal=False).model.rotary_emb.inv_freq
    assert frequencies.dtype is torch.float32
    assert torch.equal(frequencies, frequencies.bfloat16().float())


@pytest.mark.parametrize("is_masked", [True, False])
def test_a_causal_trunk_is_refused_at_the_first_decision(is_masked: bool) -> None:
    policy = OpenVlaOft.create(tiny(image_size=28), seed=0)
    trunk = policy.network.language_model.model
    forward = trunk.forward

    def causal(**inputs: object) -> object:
        if (inputs["attention_mask"] is not None) == is_masked:
            inputs["attention_mask"] = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
        return forward(**inputs)

    trunk.forward = causal
    import numpy as np

    frame = np.zeros((28, 28, 3), np.uint8)
    observation = {
        "image": frame,
        "wrist_image": frame,
        "state": np.zeros(8, np.float32),
        "instruction": "push",
    }
    with pytest.raises(ConfigError, match="attends causally"):
        policy.network(policy.prepare([observation]))


def test_a_trunk_that_looks_both_ways_passes() -> None:
    network = OpenVlaOft.create(tiny(image_size=28), seed=0).network
    weight = network.language_model.lm_head.weight
    require_bidirectional(network.hidden_states, weight.shape[1], weight)


def test_loading_holds_the_file_about_once(public: Path, folder: Path) -> None:
    """What loading adds to the peak memory of a process that has loaded a small one: under 1.15
    times the file.
    """
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= {
        "hidden_size": 512,
        "intermediate_size": 8192,
        "num_hidden_layers": 4,
    }
    (folder / "config.json").write_text(json.dumps(config))
    for path in folder.glob("model*"):
        path.unlink()
    large = read_config(open_folder(folder), CheckpointFormat(norm_key="libero_goal"))
    with torch.device("meta"):
        state = OpenVlaNetwork(large).state_dict()
    tensors = {public_name(name): torch.zeros(tensor.shape) for name, tensor in state.items()}
    save_file(tensors, folder / "model.safetensors")
    size = (folder / "model.safetensors").stat().st_size
    del tensors
    load(public)
    gc.collect()
    # else what other tests have freed, and the allocator kept, would be used before new memory
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    policy = load(folder)
    added = memory("VmHWM") - before
    assert size > 150e6
    assert 0.9 * size < added < 1.15 * size, added / size
    assert policy.config.llm.hidden_size == 512


def memory(name: str) -> int:
    """Bytes of this process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])
