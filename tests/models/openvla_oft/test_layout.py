"""The public checkpoint layout: its names, a strict round trip, clear words about what is wrong.

The 7B network on the meta device has each published name with its shape. Checkpoints with action
tokens act as timm and transformers alone compute it.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import public_checkpoint
import pytest
import torch
from libero_bounds import LIBERO_BOUNDS
from safetensors.torch import load_file, save_file

from vla_rl.errors import CheckpointError
from vla_rl.models.openvla_oft import OpenVlaOft, OpenVlaOftConfig
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.prismatic.config import LIBERO_PROPRIO, TINY_TOKENIZER
from vla_rl.models.prismatic.public_config import public_name
from vla_rl.models.tensor_reading import SINGLE_FILE as TENSOR_FILE
from vla_rl.types import Sampling


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


def full_size(**fields: Any) -> OpenVlaOftNetwork:
    bounds = LIBERO_BOUNDS["libero_10"]
    with torch.device("meta"):
        return OpenVlaOftNetwork(
            OpenVlaOftConfig(tokenizer_file=str(TINY_TOKENIZER), action_bounds=bounds, **fields)
        )


def linear(name: str, size_out: int, size_in: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size_out, size_in), f"{name}.bias": (size_out,)}


def norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def tower(
    prefix: str, width: int, inner: int, depth: int, layer_scale: bool
) -> dict[str, tuple[int, ...]]:
    """A ViT of 16 x 16 patches of 14 pixels."""
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.pos_embed": (1, 256, width),
        f"{prefix}.patch_embed.proj.weight": (width, 3, 14, 14),
        f"{prefix}.patch_embed.proj.bias": (width,),
        **norm(f"{prefix}.norm", width),
    }
    for index in range(depth):
        block = f"{prefix}.blocks.{index}"
        shapes |= {**norm(f"{block}.norm1", width), **norm(f"{block}.norm2", width)}
        shapes |= {
            **linear(f"{block}.attn.qkv", 3 * width, width),
            **linear(f"{block}.attn.proj", width, width),
        }
        shapes |= {
            **linear(f"{block}.mlp.fc1", inner, width),
            **linear(f"{block}.mlp.fc2", width, inner),
        }
        if layer_scale:
            shapes |= {f"{block}.ls1.scale_factor": (width,), f"{block}.ls2.scale_factor": (width,)}
    return shapes


def published() -> dict[str, tuple[int, ...]]:
    dino, siglip = "vision_backbone.featurizer", "vision_backbone.fused_featurizer"
    shapes: dict[str, tuple[int, ...]] = {
        **tower(dino, 1024, 4096, 24, layer_scale=True),
        f"{dino}.cls_token": (1, 1, 1024),
        f"{dino}.reg_token": (1, 4, 1024),
        **tower(siglip, 1152, 4304, 27, layer_scale=False),
        f"{siglip}.attn_pool.latent": (1, 1, 1152),
        **linear(f"{siglip}.attn_pool.q", 1152, 1152),
        **linear(f"{siglip}.attn_pool.kv", 2304, 1152),
        **linear(f"{siglip}.attn_pool.proj", 1152, 1152),
        **norm(f"{siglip}.attn_pool.norm", 1152),
        **linear(f"{siglip}.attn_pool.mlp.fc1", 4304, 1152),
        **linear(f"{siglip}.attn_pool.mlp.fc2", 1152, 4304),
        **linear("projector.fc1", 8704, 2176),
        **linear("projector.fc2", 4096, 8704),
        **linear("projector.fc3", 4096, 4096),
        "language_model.model.embed_tokens.weight": (32064, 4096),
        "language_model.model.norm.weight": (4096,),
        "language_model.lm_head.weight": (32064, 4096),
    }
    for index in range(32):
        layer = f"language_model.model.layers.{index}"
        shapes |= {f"{layer}.self_attn.{name}_proj.weight": (4096, 4096) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (11008, 4096) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (4096, 11008)}
        shapes |= {
            f"{layer}.{name}_layernorm.weight": (4096,) for name in ("input", "post_attention")
        }
    return shapes


def test_each_of_982_names_has_its_published_shape() -> None:
    found = {
        public_name(name): tuple(tensor.shape) for name, tensor in full_size().state_dict().items()
    }
    assert len(found) == 982
    assert found == published()


def test_the_parts_of_continuous_policies_have_their_published_sizes() -> None:
    network = full_size(head="l1", proprio=LIBERO_PROPRIO)
    for part, size in ((network.action_head, 151_117_831), (network.proprio_projector, 16_818_176)):
        assert part is not None
        assert sum(parameter.numel() for parameter in part.parameters()) == size


INSTRUCTIONS = ("push", "pick up the black bowl on the stove and place it on the plate")


@pytest.fixture(scope="module")
def parts() -> public_checkpoint.Parts:
    return public_checkpoint.Parts(seed=3)


@pytest.fixture(scope="module")
def folder(parts: public_checkpoint.Parts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("public") / "tokens"
    public_checkpoint.write(folder, parts, TINY_TOKENIZER)
    return folder


def observation_of(instruction: str) -> dict[str, Any]:
    rng = np.random.default_rng(len(instruction))
    frames = {
        key: rng.integers(0, 256, (28, 28, 3), dtype=np.uint8) for key in ("image", "wrist_image")
    }
    return {**frames, "state": rng.uniform(-1, 1, 8).astype(np.float32), "instruction": instruction}


def decided(policy: OpenVlaOft, parts: public_checkpoint.Parts) -> None:
    """Greedy tokens and log-probs of both prompts in one batch are those of each alone, by the
    libraries.
    """
    observations = [observation_of(instruction) for instruction in INSTRUCTIONS]
    batch = policy.prepare(observations)
    with torch.no_grad():
        sampled = policy.sample(batch, [Sampling(greedy=True)] * len(observations))
        tokens, log_probs = sampled.tokens, sampled.log_probs
        for row, observation in enumerate(observations):
            prompt = public_checkpoint.prompt_ids(TINY_TOKENIZER, observation["instruction"])
            proprio = None if batch.proprio is None else batch.proprio[row]
            hidden = parts.read(list(batch.images[row]), prompt, proprio, num_numbers=56)
            first = public_checkpoint.VOCABULARY - 256
            logits = parts.llm.lm_head(hidden)[:, first : first + 256]
            assert tokens[row].tolist() == (logits.argmax(-1) + first).tolist()
            expected = logits.log_softmax(-1).max(-1).values
            torch.testing.assert_close(log_probs[row], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("cameras", [("image",), ("image", "wrist_image")])
def test_one_image_or_two_decide_as_the_libraries_alone_say(
    cameras: tuple[str, ...], folder: Path, parts: public_checkpoint.Parts
) -> None:
    decided(OpenVlaOft.load(folder, norm_key="libero_goal", cameras=cameras), parts)


def test_a_proprio_projector_may_stand_beside_the_weights_of_a_token_policy(
    parts: public_checkpoint.Parts, tmp_path: Path
) -> None:
    public_checkpoint.write(tmp_path / "tokens", parts, TINY_TOKENIZER)
    parts.write_parts(tmp_path / "tokens")
    (tmp_path / "tokens" / "action_head--150000_checkpoint.pt").unlink()
    decided(OpenVlaOft.load(tmp_path / "tokens", norm_key="libero_goal"), parts)


def test_a_convention_without_a_stop_token_decides_otherwise(folder: Path) -> None:
    official, bare = (
        OpenVlaOft.load(folder, norm_key="libero_goal", convention=name)
        for name in ("rlinf_official", "rlinf")
    )
    observation = observation_of(INSTRUCTIONS[1])
    with torch.no_grad():
        one, other = (policy.network(policy.prepare([observation])) for policy in (official, bare))
    assert (
        bare.config.llm.rope_inv_freq_dtype == official.config.llm.rope_inv_freq_dtype == "bfloat16"
    )
    assert (one - other).abs().max() > 1e-3
