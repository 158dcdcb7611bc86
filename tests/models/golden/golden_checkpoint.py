"""Write the golden checkpoint in the public layout, with the variants that the reference projects
were run on.
"""

import json
from functools import cache
from pathlib import Path

import golden_recipe
import torch
from safetensors.torch import save_file

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
