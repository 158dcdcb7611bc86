"""A tiny pi0 and pi0.5 as the golden files of other projects' code have them."""

import json
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vla_rl.models.flow.network import FlowInputs
from vla_rl.models.flow.pi import PiKind, PiNetwork, PiSize, VisionSize
from vla_rl.models.flow.pi_layers import GemmaSize

GOLDEN = Path(__file__).parents[1] / "flow" / "golden"


def pi_size(kind: PiKind, action_dim: int = 32, horizon: int = 5) -> PiSize:
    """Return the sizes that the golden files were made with."""
    return PiSize(
        kind=kind,
        text=GemmaSize(width=64, depth=2, mlp_width=128, head_size=16),
        expert=GemmaSize(width=32, depth=2, mlp_width=64, head_size=16),
        vision=VisionSize(width=48, depth=2, mlp_width=96, num_heads=4, image_size=56),
        vocabulary=300,
        action_dim=action_dim,
        state_dim=action_dim,
        horizon=horizon,
    )


def weight_by_formula(name: str, shape: list[int]) -> Tensor:
    """Return the weight that the golden files were made with."""
    offset = 2 * math.pi * (zlib.crc32(name.encode()) % 1000) / 1000
    wave = np.sin(0.37 * np.arange(math.prod(shape)) + offset)
    weight = wave * (0.08 if len(shape) > 1 else 0.05)
    return torch.from_numpy(weight.reshape(shape).astype(np.float32))


def golden_names(name: str) -> dict[str, list[int]]:
    """Return the shapes of all tensors by name, as the other project's module lists them."""
    shapes: dict[str, list[int]] = json.loads((GOLDEN / f"{name}_names.json").read_text())["shapes"]
    return shapes


def golden_weights(name: str) -> dict[str, Tensor]:
    """Return the tensors of `pi0`, `pi05`, `pi0_openpi` or `pi05_openpi` under that project's names."""
    return {each: weight_by_formula(each, shape) for each, shape in golden_names(name).items()}


def golden_network(kind: PiKind, project: str) -> PiNetwork:
    """Return a network with the golden weights of `lerobot` or `openpi`."""
    is_lerobot = project == "lerobot"
    network = PiNetwork(pi_size(kind, 7 if is_lerobot else 32)).eval()
    weights = golden_weights(kind if is_lerobot else f"{kind}_openpi")
    network.load_state_dict(
        {
            name.replace("vision_tower.vision_model.", "vision_tower."): tensor
            for name, tensor in weights.items()
        }
    )
    return network


def golden_arrays(kind: PiKind, project: str) -> dict[str, Tensor]:
    """Return the golden inputs and outputs by name."""
    suffix = "lerobot" if project == "lerobot" else "openpi_rlinf_flow_sde"
    return read_arrays(f"{kind}_{suffix}")


def read_arrays(name: str) -> dict[str, Tensor]:
    """Return the arrays of a golden file."""
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {each: torch.from_numpy(file[each]) for each in file.files}


def golden_inputs(arrays: dict[str, Tensor]) -> FlowInputs:
    """Return the golden observations; pictures follow a formula."""
    count = np.arange(2 * 3 * 56 * 56, dtype=np.float64)
    cameras = [np.sin(0.013 * count + camera).reshape(2, 3, 56, 56) for camera in range(2)]
    return FlowInputs(
        torch.from_numpy(np.stack(cameras, 1).astype(np.float32)),
        arrays["in_image_mask"],
        arrays["in_tokens"],
        arrays["in_token_mask"],
        arrays["in_state"],
    )
