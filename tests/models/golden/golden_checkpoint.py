"""Write the golden checkpoint in the public layout, with the variants that the reference projects were run on."""

import json
from pathlib import Path

import golden_recipe
import numpy as np
import torch
from safetensors.torch import save_file

FILES = Path(__file__).parent

LAYOUT: dict[str, dict[str, list[int]]] = json.loads((FILES / "layout.json").read_text())
"""Names and shapes of every file's tensors, as the reference projects hold them."""

PROPRIO_INSIDE = {
    f"proprio_projector.{name.removeprefix('module.')}": shape
    for name, shape in LAYOUT["proprio_projector--1_checkpoint.pt"].items()
}


def golden(name: str) -> dict[str, np.ndarray]:
    """Read the outputs of one project."""
    with np.load(FILES / f"{name}.npz") as arrays:
        return dict(arrays)


def write(folder: Path, *parts: str, proprio_inside: bool = False) -> Path:
    """Write the main weights, the small files, and the named parts of the layout beside them.

    Args:
        folder: must not exist yet.
        parts: files of the layout, such as `action_head--1_checkpoint.pt`.
        proprio_inside: put the proprio projector among the main weights, as RLinf and SimpleVLA-RL do.
    """
    golden_recipe.write_small_files(folder)
    # the public layout has no place for the size of the towers
    sizes = {"featurizer_overrides": golden_recipe.TOWER_SIZES, "fused_featurizer_overrides": golden_recipe.TOWER_SIZES}
    (folder / "vla_rl.json").write_text(json.dumps(sizes))
    main = LAYOUT["model.safetensors"]
    if proprio_inside:
        main = main | PROPRIO_INSIDE
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "use_proprio": True, "proprio_dim": 8}))
    save_file(tensors(main), folder / "model.safetensors", {"format": "pt"})
    for part in parts:
        torch.save(tensors(LAYOUT[part]), folder / part.rpartition("/")[2])
    return folder


def tensors(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """The recipe's weights of one file."""
    return {name: torch.from_numpy(weight) for name, weight in golden_recipe.tensors(shapes).items()}
