"""Towers with FiLM as OpenVLA-OFT's code stores them: in a separate file, under different names.

    [vision_backbone.]vision_backbone.<tower>.blocks.7.block.<layer>     a tower's block, one level further in
    [vision_backbone.]vision_backbone.<tower>.blocks.7.{scale,shift}.*   the block's FiLM layers
    <layer>.base_layer.*, <layer>.lora_{A,B}.<adapter>.weight            a layer and the adapter it was trained with

That code puts adapters into the towers (on every linear layer, and on the convolution that cuts the
patches), FiLM around them, and then loads the file strictly, so a file written for it needs the
adapters too. Here they are merged into the layers when a file is read, and written in their initial
state (A noise, B zeros), so that they add nothing and can be trained.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.peft_adapter import adapters_of

TOWERS: Final = ("featurizer", "fused_featurizer")
TOWER_PREFIX: Final = "vision_backbone."
FILM_PREFIX: Final = "film."

FILMED_TOWERS: Final = "vision_backbone.vision_backbone."
"""Prefix of the towers' layers in an adapter that peft saved while FiLM wrapped the towers."""

RANK: Final = 32
"""Rank of the adapters that are written: OpenVLA-OFT's own default (`lora_rank`)."""

LARGEST_ALPHA: Final = 16
"""OpenVLA-OFT's adapters have alpha = min(rank, 16)."""

_TOWER = re.compile(rf"(?:vision_backbone\.){{1,2}}({'|'.join(TOWERS)})\.(.+)")
_FILM = re.compile(r"blocks\.(\d+)\.((?:scale|shift)\.(?:weight|bias))")
_BLOCK = re.compile(r"blocks\.(\d+)\.block\.(.+)")


def read_film(part: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return both towers and their FiLM layers under the names of our network, with adapters
    merged.

    Args:
        part: the file's tensors.
        path: the file, for errors.

    Raises: CheckpointError for names that do not belong to a tower with FiLM, and for adapters that
    do not fit.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in _with_adapters_merged(part, path).items():
        inside = _TOWER.fullmatch(name)
        if inside is None:
            raise CheckpointError(
                f"{path} holds {name}; expected the towers {' and '.join(TOWERS)} with FiLM."
            )
        tower, rest = inside.groups()
        if film := _FILM.fullmatch(rest):
            ours = f"{FILM_PREFIX}{tower}.{film[1]}.{film[2]}"
        else:
            ours = f"{TOWER_PREFIX}{tower}." + _BLOCK.sub(r"blocks.\1.\2", rest)
        if ours in found:
            raise CheckpointError(f"{path} holds {ours} twice, as {name} too.")
        found[ours] = tensor
    return found


def written_film(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the file's content for towers and FiLM layers under the names of our network.

    Views, except the adapters.
    """
    part: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(FILM_PREFIX):
            tower, index, rest = name.removeprefix(FILM_PREFIX).split(".", 2)
            part[f"{TOWER_PREFIX}{tower}.blocks.{index}.{rest}"] = tensor
        elif name.startswith(TOWER_PREFIX):
            theirs = re.sub(r"\.blocks\.(\d+)\.", r".blocks.\1.block.", name)
            part |= (
                _with_new_adapter(theirs, tensor)
                if _is_adapted(name, tensors)
                else {theirs: tensor}
            )
    return part


def _with_adapters_merged(part: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Add adapters to their layers: W + alpha / rank * B A in float32, rounded to W's dtype."""
    adapters = adapters_of(part, path, lambda rank: min(rank, LARGEST_ALPHA) / rank)
    merged: dict[str, Tensor] = {}
    for name, tensor in part.items():
        if ".lora_" in name:
            continue
        owner, is_wrapped, leaf = name.rpartition(".base_layer.")
        if is_wrapped and leaf == "weight" and owner in adapters:
            adapter = adapters.pop(owner)
            if adapter.weight_shape != list(tensor.shape):
                raise CheckpointError(
                    f"{path} has an adapter of another shape than {name} {list(tensor.shape)}."
                )
            tensor = adapter.merged(tensor)
        merged[f"{owner}.{leaf}" if is_wrapped else name] = tensor
    if adapters:
        raise CheckpointError(f"{path} has an adapter for {min(adapters)}, which it does not hold.")
    return merged


def _with_new_adapter(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a layer's weight with an adapter that adds nothing, or its bias, which has none."""
    owner, _, leaf = name.rpartition(".")
    adapted = {f"{owner}.base_layer.{leaf}": tensor}
    if leaf == "weight":
        size_out, *size_in = tensor.shape
        noise = torch.randn(RANK, *size_in, generator=torch.Generator().manual_seed(0)) / RANK
        adapted[f"{owner}.lora_A.default.weight"] = noise.to(tensor)
        adapted[f"{owner}.lora_B.default.weight"] = tensor.new_zeros(
            size_out, RANK, *(1 for _ in size_in[1:])
        )
    return adapted


def _is_adapted(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor belongs to a linear layer or to the patches' convolution: only their
    weights have several axes.
    """
    weight = tensors.get(name.rpartition(".")[0] + ".weight")
    return weight is not None and weight.ndim >= 2
