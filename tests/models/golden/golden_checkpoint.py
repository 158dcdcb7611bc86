"""The golden checkpoint in the public layout, in the variants that the reference projects were run on.

`golden` reads what they computed with it.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import golden_recipe
import msgspec
import numpy as np
import torch
from safetensors.torch import save_file

from vla_rl.types import Sampling

FILES = Path(__file__).parent

LAYOUT: dict[str, dict[str, list[int]]] = json.loads((FILES / "layout.json").read_text())
"""Names and shapes of every file's tensors, as the reference projects hold them."""

HEAD, PROPRIO = "action_head--1_checkpoint.pt", "proprio_projector--1_checkpoint.pt"
DIFFUSION = (
    "diffusion/action_head--1_checkpoint.pt",
    "diffusion/noisy_action_projector--1_checkpoint.pt",
)
FILM = "film/vision_backbone--1_checkpoint.pt"
"""Parts of the layout."""

PROPRIO_INSIDE = {
    f"proprio_projector.{name.removeprefix('module.')}": shape
    for name, shape in LAYOUT[PROPRIO].items()
}


def write(folder: Path, *parts: str, proprio_inside: bool = False) -> Path:
    """Write the main weights, the small files, and the named parts of the layout beside them.

    Args:
        folder: must not exist yet.
        parts: files of the layout, such as `action_head--1_checkpoint.pt`.
        proprio_inside: put the proprio projector among the main weights, as RLinf and SimpleVLA-RL
            do.
    """
    golden_recipe.write_small_files(folder)
    # the public layout has no place for the size of the towers
    sizes = {
        "featurizer_overrides": golden_recipe.TOWER_SIZES,
        "fused_featurizer_overrides": golden_recipe.TOWER_SIZES,
    }
    (folder / "vla_rl.json").write_text(json.dumps(sizes))
    main = LAYOUT["model.safetensors"]
    if proprio_inside:
        main = main | PROPRIO_INSIDE
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps({**config, "use_proprio": True, "proprio_dim": 8})
        )
    save_file(tensors(main), folder / "model.safetensors", {"format": "pt"})
    for part in parts:
        torch.save(tensors(LAYOUT[part]), folder / part.rpartition("/")[2])
    return folder


def write_adapter(folder: Path, base: Path | str = "openvla/openvla-7b") -> Path:
    """Write the adapter as peft saved it: its configuration, its halves, and a copy of the output
    head's weight.

    Args:
        folder: must not exist yet.
        base: what the configuration calls the checkpoint that the adapter was trained on.
    """
    folder.mkdir(parents=True)
    config = json.loads((FILES / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(base)})
    )
    found = tensors(LAYOUT["lora_adapter/adapter_model.safetensors"])
    halves = {
        name: golden_recipe.ADAPTER_GAIN * tensor
        for name, tensor in found.items()
        if ".lora_" in name
    }
    head = tensors(
        {
            "language_model.lm_head.weight": LAYOUT["model.safetensors"][
                "language_model.lm_head.weight"
            ]
        }
    )
    copied = {
        "base_model.model.language_model.lm_head.base_layer.weight": head[
            "language_model.lm_head.weight"
        ]
    }
    save_file({**halves, **copied}, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def tensors(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """The recipe's weights of one file."""
    return {name: tensor(name, *shape) for name, shape in shapes.items()}


@cache
def tensor(name: str, *shape: int) -> torch.Tensor:
    """The recipe's weight of that name, shared: it is written to files alone."""
    return torch.from_numpy(golden_recipe.tensor(name, shape))


ROWS = range(len(golden_recipe.INSTRUCTIONS))
GREEDY = [Sampling(greedy=True)] * len(ROWS)


def golden(name: str) -> dict[str, np.ndarray]:
    """Outputs of one project."""
    with np.load(Path(__file__).parent / f"{name}.npz") as arrays:
        return dict(arrays)


def observation(row: int, size: int) -> dict[str, Any]:
    return {
        "image": golden_recipe.frame(10 * row, size, size),
        "wrist_image": golden_recipe.frame(10 * row + 1, size, size),
        "state": golden_recipe.state(row),
        "instruction": golden_recipe.INSTRUCTIONS[row],
    }


def observations(size: int) -> list[dict[str, Any]]:
    return [observation(row, size) for row in ROWS]


def stacked(arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    return np.stack([arrays[f"{name}_{row}"] for row in ROWS])


def require_close(ours: torch.Tensor | np.ndarray, theirs: np.ndarray, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, atol=atol, rtol=0)


def uncropped(policy: Any) -> Any:
    """The same policy for frames of 224 pixels that the projects were given without their LIBERO
    steps.
    """
    config = msgspec.structs.replace(policy.config, images="bicubic")
    return type(policy)(config, policy.network, policy.tokenizer)
