"""A tiny SmolVLA as LeRobot's golden file has it, and its folder as LeRobot lays it out."""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pi_folders
import torch
from safetensors.torch import save_file

from vla_rl.models.flow.network import FlowInputs
from vla_rl.models.flow.smolvla import SmolVlaConfig

GOLDEN = Path(__file__).parents[1] / "flow" / "golden"
SHAPES: dict[str, list[int]] = json.loads((GOLDEN / "smolvla_names.json").read_text())["shapes"]
HEAD = "vlm_with_expert.vlm.lm_head.weight"

TINY_VLM: dict[str, Any] = {
    "model_type": "smolvlm",
    "text_config": {
        "model_type": "llama",
        "hidden_size": 64,
        # more than the policy takes, as in SmolVLM2, of whose 32 layers SmolVLA takes 16
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 300,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "image_size": 56,
        "patch_size": 14,
    },
    "scale_factor": 2,
    "image_token_id": 200,
    "pad_token_id": 0,
}

TINY = SmolVlaConfig(
    vlm=TINY_VLM, num_vlm_layers=4, chunk_size=5, max_state_dim=7, max_action_dim=7
)


def weight_by_formula(name: str, shape: list[int]) -> torch.Tensor:
    """Return the weight that the golden files were made with."""
    offset = 2 * math.pi * (zlib.crc32(name.encode()) % 1000) / 1000
    wave = np.sin(0.37 * np.arange(math.prod(shape)) + offset)
    weight = wave * (0.08 if len(shape) > 1 else 0.05)
    if len(shape) == 1 and "norm" in name and name.endswith("weight"):
        weight = weight + 1.0
    return torch.from_numpy(weight.reshape(shape).astype(np.float32))


def golden_weights() -> dict[str, torch.Tensor]:
    """Return every weight of the golden network by its name."""
    return {name: weight_by_formula(name, shape) for name, shape in SHAPES.items()}


def golden_inputs(golden: dict[str, torch.Tensor]) -> FlowInputs:
    """Return the inputs of the golden file, whose images follow a formula."""
    count = np.arange(2 * 3 * 56 * 56, dtype=np.float64)
    cameras = [np.sin(0.013 * count + camera).reshape(2, 3, 56, 56) for camera in range(2)]
    return FlowInputs(
        torch.from_numpy(np.stack(cameras, 1).astype(np.float32)),
        golden["in_image_mask"],
        golden["in_tokens"],
        golden["in_token_mask"],
        golden["in_state"],
    )


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
        "num_vlm_layers": 4,
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
