"""Parts of an OpenVLA-OFT checkpoint beside its main weights.

    action_head--*_checkpoint.pt                L1 or diffusion head
    proprio_projector--*_checkpoint.pt          unless it stands among the main weights, as in SimpleVLA-RL's
    noisy_action_projector--*_checkpoint.pt     with diffusion
    vision_backbone--*_checkpoint.pt            towers with FiLM, instead of those among the main weights

They are read without executing any pickled code, and written so that OpenVLA-OFT's code finds and
loads them. Towers with FiLM have other names there:

    [vision_backbone.]vision_backbone.<tower>.blocks.7.block.<layer>     a tower's block, one level further in
    [vision_backbone.]vision_backbone.<tower>.blocks.7.{scale,shift}.*   the block's FiLM layers
    <layer>.base_layer.*, <layer>.lora_{A,B}.<adapter>.weight            a layer and the adapter it was trained with

That code puts adapters into the towers (on every linear layer, and on the convolution that cuts the
patches), FiLM around them, and then loads the file strictly, so a file written for it needs the
adapters too. Here they are merged into the layers when a file is read, and written in their initial
state (A noise, B zeros), so that they add nothing and can be trained.

Fine-tuning turns OpenVLA into OpenVLA-OFT by new parts beside pretrained weights (Kim et al. 2025,
section IV). They have to be requested by name, so that a part that is missing by mistake remains an
error.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import torch
from torch import Tensor, nn

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.prismatic.adapters import collect_adapters
from vla_rl.models.prismatic.config import NewPart
from vla_rl.models.tensor_reading import find_part, load_part
from vla_rl.util.foreign_data import find_files

MODULES: Final = ("action_head", "proprio_projector", "noisy_action_projector")
"""Modules beside the trunk; each part has the name of its module."""

FILM_TOWERS: Final = "vision_backbone"


def find_parts(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the parts of a checkpoint by name, each from the first folder that has it.

    Raises: CheckpointError if a folder has several files for one part, or an unknown part.
    """
    # A misspelt part would be left out in silence, and a policy without its proprio projector
    # acts from images alone.
    found = {part: find_part(folders, part) for part in (*MODULES, FILM_TOWERS)}
    for path in (path for folder in folders for path in find_files(folder, "*--*checkpoint*.pt")):
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
    for path in (path for folder in folders for path in find_files(folder, "*")):
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
        # The parts were saved under DDP on a GPU, some in float32.
        held = load_part(path)
        if part == FILM_TOWERS:
            held = read_film(held, path)
        else:
            held = {f"{part}.{name}": tensor for name, tensor in held.items()}
        tensors |= {name: tensor.to(dtype) for name, tensor in held.items()}
    return tensors


def require_whole_towers(
    part_tensors: Mapping[str, Tensor], expected: set[str], folder: Path
) -> None:
    """Check that the part with FiLM holds whole towers: a gap would be filled by towers that FiLM
    was not trained with.

    Args:
        part_tensors: tensors that `read_parts` returned.
        expected: public names of the network's tensors.
        folder: the checkpoint, for errors.

    Raises: CheckpointError.
    """
    # Without FiLM the towers come from the main weights, which are checked with all others.
    if not any(name.startswith(FILM_PREFIX) for name in part_tensors):
        return
    missing = sorted(
        name
        for name in expected - part_tensors.keys()
        if name.startswith((FILM_PREFIX, TOWER_PREFIX))
    )
    if missing:
        raise CheckpointError(
            f"the towers with FiLM of {folder} lack {len(missing)} tensors, such as {missing[0]}."
        )


def split_parts(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Split a network's tensors by public name: the main ones, and the parts beside them by file
    name.
    """
    parts = {part: _select_module(tensors, part) for part in MODULES}
    if any(name.startswith(FILM_PREFIX) for name in tensors):
        parts[FILM_TOWERS] = film_file_tensors(tensors)
    part_prefixes = (FILM_PREFIX, *(f"{part}." for part in MODULES))
    main = {name: tensor for name, tensor in tensors.items() if not name.startswith(part_prefixes)}
    return main, {f"{part}--latest_checkpoint.pt": held for part, held in parts.items() if held}


def _select_module(tensors: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    prefix = f"{module}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


TOWERS: Final = ("featurizer", "fused_featurizer")
TOWER_PREFIX: Final = "vision_backbone."
FILM_PREFIX: Final = "film."

FILMED_TOWERS: Final = "vision_backbone.vision_backbone."
"""Prefix of the towers' layers in an adapter that peft saved while FiLM wrapped the towers."""

WRITTEN_RANK: Final = 32
"""Rank of the adapters that are written: OpenVLA-OFT's own default (`lora_rank`)."""

LARGEST_ALPHA: Final = 16
"""OpenVLA-OFT's adapters have alpha = min(rank, 16)."""

_TOWER_NAME = re.compile(rf"(?:vision_backbone\.){{1,2}}({'|'.join(TOWERS)})\.(.+)")
_FILM_NAME = re.compile(r"blocks\.(\d+)\.((?:scale|shift)\.(?:weight|bias))")
_BLOCK_NAME = re.compile(r"blocks\.(\d+)\.block\.(.+)")


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
    for name, tensor in _merge_adapters(part, path).items():
        inside = _TOWER_NAME.fullmatch(name)
        if inside is None:
            raise CheckpointError(
                f"{path} holds {name}; expected the towers {' and '.join(TOWERS)} with FiLM."
            )
        tower, rest = inside.groups()
        if film := _FILM_NAME.fullmatch(rest):
            ours = f"{FILM_PREFIX}{tower}.{film[1]}.{film[2]}"
        else:
            ours = f"{TOWER_PREFIX}{tower}." + _BLOCK_NAME.sub(r"blocks.\1.\2", rest)
        if ours in found:
            raise CheckpointError(f"{path} holds {ours} twice, as {name} too.")
        found[ours] = tensor
    return found


def film_file_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
                _add_new_adapter(theirs, tensor) if _is_adapted(name, tensors) else {theirs: tensor}
            )
    return part


def _merge_adapters(part: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Add adapters to their layers: W + alpha / rank * B A in float32, rounded to W's dtype."""
    adapters = collect_adapters(part, path, lambda rank: min(rank, LARGEST_ALPHA) / rank)
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


def _add_new_adapter(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a layer's weight with an adapter that adds nothing, or its bias, which has none."""
    owner, _, leaf = name.rpartition(".")
    adapted = {f"{owner}.base_layer.{leaf}": tensor}
    if leaf == "weight":
        # peft begins A with noise and B with zeros; with both zero the adapter could never be
        # trained.
        size_out, *size_in = tensor.shape
        noise = (
            torch.randn(WRITTEN_RANK, *size_in, generator=torch.Generator().manual_seed(0))
            / WRITTEN_RANK
        )
        adapted[f"{owner}.lora_A.default.weight"] = noise.to(tensor)
        adapted[f"{owner}.lora_B.default.weight"] = tensor.new_zeros(
            size_out, WRITTEN_RANK, *(1 for _ in size_in[1:])
        )
    return adapted


def _is_adapted(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Return whether a tensor belongs to a linear layer or to the patches' convolution: only their
    weights have several axes.
    """
    weight = tensors.get(name.rpartition(".")[0] + ".weight")
    return weight is not None and weight.ndim >= 2


def require_known_parts(parts: Collection[NewPart]) -> None:
    """Raise ConfigError if a name is not a known part."""
    known = get_args(NewPart)
    if isinstance(parts, str) or any(part not in known for part in parts):
        raise ConfigError(f"new_parts is {parts!r}, expected some of {', '.join(known)}")


def require_new_parts(
    parts: Collection[NewPart], network: nn.Module, held: Iterable[str], folder: Path
) -> None:
    """Raise CheckpointError unless the network has these parts and the checkpoint has none of their
    tensors (`held`).
    """
    for part in parts:
        if getattr(network, part) is None:
            raise CheckpointError(
                f"a policy with this head has no {part}; leave it out of the new parts of {folder}."
            )
        found = next((name for name in held if name.startswith(f"{part}.")), None)
        if found is not None:
            raise CheckpointError(
                f"{folder} has {found}, so its {part} is not new; leave it out of the new parts."
            )


def initialize_new_parts(
    parts: Collection[NewPart],
    network: nn.Module,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> None:
    """Initialise parts of a network that is on the meta device.

    The global random state is left unchanged.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for part in parts:
            module: nn.Module = getattr(network, part)
            # On the CPU, so that one seed gives the same new weights on every device.
            module.to_empty(device="cpu")
            # an outer module may override the values of its inner ones
            for inner in reversed(list(module.modules())):
                reset: Any = getattr(inner, "reset_parameters", None)
                if reset is not None:
                    reset()
            module.to(device=device, dtype=dtype)
