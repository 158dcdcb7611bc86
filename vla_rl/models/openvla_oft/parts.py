"""Weights that OpenVLA-OFT's code stores in PyTorch files beside the main ones.

    action_head--*_checkpoint.pt                L1 or diffusion head
    proprio_projector--*_checkpoint.pt          unless it stands among the main weights, as in SimpleVLA-RL's
    noisy_action_projector--*_checkpoint.pt     with diffusion
    vision_backbone--*_checkpoint.pt            towers with FiLM, instead of those among the main weights

They are read without executing any pickled code, and written so that OpenVLA-OFT's code finds and
loads them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from vla_rl.errors import CheckpointError
from vla_rl.models.openvla_oft.film_part import FILM_PREFIX, TOWER_PREFIX, read_film, written_film
from vla_rl.models.prismatic.weights import find_part, load_part

MODULES: Final = ("action_head", "proprio_projector", "noisy_action_projector")
"""Modules beside the trunk; each part has the name of its module."""

FILM_TOWERS: Final = "vision_backbone"


def find_parts(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the parts of a checkpoint by name, each from the first folder that has it.

    Raises: CheckpointError if a folder has several files for one part, or an unknown part.
    """
    found = {part: find_part(folders, part) for part in (*MODULES, FILM_TOWERS)}
    for path in (path for folder in folders for path in sorted(folder.glob("*--*checkpoint*.pt"))):
        if not any(part in path.name for part in found):
            raise CheckpointError(
                f"{path.parent} has {path.name} beside its weights, which is none of the parts "
                "that are read here "
                f"({', '.join(found)}); move it away if the policy is to do without."
            )
    _refuse_other_names(folders, found)
    return {part: path for part, path in found.items() if path is not None}


def _refuse_other_names(folders: Sequence[Path], found: Mapping[str, Path | None]) -> None:
    """Raise CheckpointError for a part that is missing although a file of its name is there, such
    as action_head.pt: the policy would be another without it.
    """
    for path in (path for folder in folders for path in sorted(folder.iterdir())):
        for part, held in found.items():
            if (
                held is None
                and part in path.name
                and path.suffix in (".pt", ".pth", ".safetensors")
            ):
                raise CheckpointError(
                    f"{path.parent} has {path.name} and no {part}--*_checkpoint.pt, the name under "
                    f"which a {part} is read; rename it, or move it away if the policy is to do "
                    "without."
                )


def read_parts(folders: Sequence[Path], dtype: torch.dtype) -> dict[str, Tensor]:
    """Read all parts beside a checkpoint's main weights, under public names.

    Args:
        folders: the checkpoint's folders; an earlier one takes precedence.
        dtype: data type to cast to; OpenVLA-OFT's code stores some parts in float32 and casts them
            to the main weights' dtype.

    Raises: CheckpointError.
    """
    tensors: dict[str, Tensor] = {}
    for part, path in find_parts(folders).items():
        held = load_part(path)
        if part == FILM_TOWERS:
            held = read_film(held, path)
        else:
            held = {f"{part}.{name}": tensor for name, tensor in held.items()}
        tensors |= {name: tensor.to(dtype) for name, tensor in held.items()}
    return tensors


def require_whole_towers(beside: Mapping[str, Tensor], expected: set[str], folder: Path) -> None:
    """Check that the part with FiLM holds whole towers: a gap would be filled by towers that FiLM
    was not trained with.

    Args:
        beside: tensors that `read_parts` returned.
        expected: public names of the network's tensors.
        folder: the checkpoint, for errors.

    Raises: CheckpointError.
    """
    if not any(name.startswith(FILM_PREFIX) for name in beside):
        return
    missing = sorted(
        name for name in expected - beside.keys() if name.startswith((FILM_PREFIX, TOWER_PREFIX))
    )
    if missing:
        raise CheckpointError(
            f"the towers with FiLM of {folder} lack {len(missing)} tensors, such as {missing[0]}."
        )


def split(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Split a network's tensors by public name: the main ones, and the parts beside them by file
    name.
    """
    parts = {part: _inside(tensors, part) for part in MODULES}
    if any(name.startswith(FILM_PREFIX) for name in tensors):
        parts[FILM_TOWERS] = written_film(tensors)
    beside = (FILM_PREFIX, *(f"{part}." for part in MODULES))
    main = {name: tensor for name, tensor in tensors.items() if not name.startswith(beside)}
    return main, {f"{part}--latest_checkpoint.pt": held for part, held in parts.items() if held}


def _inside(tensors: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    prefix = f"{module}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
