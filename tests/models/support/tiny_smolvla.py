"""A tiny SmolVLA as LeRobot's golden file has it, and its folder as LeRobot lays it out."""

import json
from pathlib import Path
from typing import Any

import golden_flow
import pi_folders
import torch
from safetensors.torch import save_file

from vla_rl.models.flow.network import FlowInputs
from vla_rl.models.flow.smolvla import SmolVlaConfig

NAMES = golden_flow.read_names("smolvla")
SET: dict[str, Any] = NAMES["set"]
SHAPES: dict[str, list[int]] = NAMES["shapes"]
HEAD = "vlm_with_expert.vlm.lm_head.weight"

TINY_VLM: dict[str, Any] = {
    "model_type": "smolvlm",
    "text_config": {
        "model_type": "llama",
        "hidden_size": 64,
        # more than the policy takes, as in SmolVLM2, of whose 32 layers SmolVLA takes 16
        "num_hidden_layers": NAMES["layers"] + 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": SET["vocab"],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "image_size": SET["img"],
        "patch_size": 14,
    },
    "scale_factor": NAMES["scale_factor"],
    "image_token_id": 200,
    "pad_token_id": 0,
}

TINY = SmolVlaConfig(
    vlm=TINY_VLM,
    num_vlm_layers=NAMES["layers"],
    num_expert_layers=NAMES["num_expert_layers"],
    chunk_size=SET["H"],
    max_state_dim=SET["S"],
    max_action_dim=SET["A"],
    add_image_special_tokens=NAMES["add_image_special_tokens"],
    image_tokens=(NAMES["fake_image_token_id"], NAMES["global_image_token_id"]),
)


def weight_by_formula(name: str, shape: list[int]) -> torch.Tensor:
    """Return the weight that the golden files were made with."""
    weight = golden_flow.weight_by_formula(name, shape, SET["phase"])
    is_norm = len(shape) == 1 and "norm" in name and name.endswith("weight")
    return weight + 1.0 if is_norm else weight


def golden_weights() -> dict[str, torch.Tensor]:
    """Return every weight of the golden network by its name."""
    return {name: weight_by_formula(name, shape) for name, shape in SHAPES.items()}


def golden_arrays() -> dict[str, torch.Tensor]:
    """Return the golden inputs and outputs by name."""
    return golden_flow.read_arrays("smolvla_lerobot")


def golden_inputs() -> FlowInputs:
    """Return the inputs of the golden file."""
    return golden_flow.make_inputs(golden_arrays(), SET)


def write_smolvla(folder: Path) -> Path:
    """Write a folder as LeRobot's `save_pretrained` does; states and actions are padded to 32 numbers."""
    pi_folders.write_lerobot(folder, "pi0", "MEAN_STD")
    shapes = {name: list(shape) for name, shape in SHAPES.items()}
    for name in ("state_proj.weight", "action_in_proj.weight"):
        shapes[name][1] = 32
    shapes["action_out_proj.weight"][0], shapes["action_out_proj.bias"][0] = 32, 32
    shapes[HEAD] = [300, 64]
    tensors = {f"model.{name}": weight_by_formula(name, shape) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    vlm = folder.with_name("vlm")
    vlm.mkdir()
    (vlm / "config.json").write_text(json.dumps(TINY_VLM))
    (folder / "tokenizer.json").rename(vlm / "tokenizer.json")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in (
        "paligemma_variant",
        "action_expert_variant",
        "vision_config",
        "num_inference_steps",
    ):
        del config[name]
    config |= {
        "type": "smolvla",
        "num_steps": 10,
        "vlm_model_name": str(vlm),
        "num_vlm_layers": NAMES["layers"],
        "num_expert_layers": -1,
        "self_attn_every_n_layers": 2,
        "expert_width_multiplier": 0.75,
        "attention_mode": "cross_attn",
        "add_image_special_tokens": False,
        "prefix_length": -1,
        "resize_imgs_with_padding": [56, 56],
        "empty_cameras": 0,
        "adapt_to_pi_aloha": False,
        "min_period": 0.004,
        "max_period": 4.0,
    }
    path.write_text(json.dumps(config, indent=4))
    pi_folders.change_step(
        folder, "policy_preprocessor.json", "tokenizer_processor", tokenizer_name=str(vlm)
    )
    return folder
