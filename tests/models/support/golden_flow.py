"""Golden files of other projects' flow policies: arrays, names, weights by formula, pictures by formula, a tiny pi0
and pi0.5.

Another set of the same layout, of other seeds and shapes, is compared by naming its folder:

    VLA_RL_GOLDEN_FLOW=other_set python -m benchmarks.flow_policies
"""

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.models.flow.network import FlowInputs
from vla_rl.models.flow.pi import PiKind, PiNetwork
from vla_rl.models.flow.pi_tensors import PiLayout, TensorReport, read_size

OWN = Path(__file__).parents[1] / "flow" / "golden"
GOLDEN = Path(os.environ.get("VLA_RL_GOLDEN_FLOW") or OWN)


def read_arrays(name: str) -> dict[str, Tensor]:
    """Return the arrays of a golden file."""
    with np.load(GOLDEN / f"{name}.npz", allow_pickle=False) as file:
        return {each: torch.from_numpy(file[each]) for each in file.files}


def read_names(name: str) -> dict[str, Any]:
    """Return what `<name>_names.json` holds: `shapes` of all tensors, and the `set` of shapes and seeds."""
    held: dict[str, Any] = json.loads((GOLDEN / f"{name}_names.json").read_text())
    return held


def weight_by_formula(name: str, shape: list[int], phase: float = 0.0) -> Tensor:
    """Return the weight that the golden files were made with."""
    offset = 2 * math.pi * (zlib.crc32(name.encode()) % 1000) / 1000 + phase
    wave = np.sin(0.37 * np.arange(math.prod(shape)) + offset)
    weight = wave * (0.08 if len(shape) > 1 else 0.05)
    return torch.from_numpy(weight.reshape(shape).astype(np.float32))


def make_inputs(arrays: dict[str, Tensor], settings: dict[str, Any]) -> FlowInputs:
    """Return the golden observations.

    Args:
        arrays: of a golden file.
        settings: the `set` of its names: pixels of a picture, and step of the wave that fills it.
    """
    num_rows, num_cameras = arrays["in_image_mask"].shape
    shape = num_rows, 3, settings["img"], settings["img"]
    count = settings["img_step"] * np.arange(math.prod(shape), dtype=np.float64)
    cameras = [np.sin(count + camera).reshape(shape) for camera in range(num_cameras)]
    return FlowInputs(
        torch.from_numpy(np.stack(cameras, 1).astype(np.float32)),
        arrays["in_image_mask"],
        arrays["in_tokens"],
        arrays["in_token_mask"],
        arrays["in_state"],
    )


VISION_HEADS = 4
"""Heads of the image tower, which no tensor shows."""


def golden_names(name: str) -> dict[str, list[int]]:
    """Return the shapes of all tensors by name, as the other project's module lists them."""
    shapes: dict[str, list[int]] = read_names(name)["shapes"]
    return shapes


def golden_weights(name: str) -> dict[str, Tensor]:
    """Return the tensors of `pi0`, `pi05`, `pi0_openpi` or `pi05_openpi` under that project's names."""
    held = read_names(name)
    phase = held["set"]["phase"]
    return {each: weight_by_formula(each, shape, phase) for each, shape in held["shapes"].items()}


def golden_network(kind: PiKind, project: str) -> PiNetwork:
    """Return a network with the golden weights of `lerobot` or `openpi`, in the sizes that these show."""
    tensors = {
        name.replace("vision_tower.vision_model.", "vision_tower."): tensor
        for name, tensor in golden_weights(_names_file(kind, project)).items()
    }
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    report = TensorReport(kind, shapes, PiLayout("", has_old_vision=False))
    horizon = golden_arrays(kind, project)["in_noise"].shape[1]
    network = PiNetwork(read_size(report, horizon, VISION_HEADS, GOLDEN)).eval()
    network.load_state_dict(tensors)
    return network


def golden_arrays(kind: PiKind, project: str) -> dict[str, Tensor]:
    """Return the golden inputs and outputs by name."""
    suffix = "lerobot" if project == "lerobot" else "openpi_rlinf_flow_sde"
    return read_arrays(f"{kind}_{suffix}")


def golden_inputs(kind: PiKind, project: str) -> FlowInputs:
    """Return the golden observations."""
    settings = read_names(_names_file(kind, project))["set"]
    return make_inputs(golden_arrays(kind, project), settings)


def _names_file(kind: PiKind, project: str) -> str:
    return kind if project == "lerobot" else f"{kind}_openpi"
