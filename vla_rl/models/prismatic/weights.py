"""Weights of a public checkpoint, read from safetensors files directly into a network on the meta
device.

    folder checked (`weight_files`) ─► names checked ─► memory checked ─► each tensor: read, cast, assigned

The network is built on the meta device, so that host memory holds the weights only once. Names are
strict both ways: missing and unknown tensors are listed before any is read.
"""

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import psutil
import torch
from torch import Tensor, nn

from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.hub import verify_download
from vla_rl.models.prismatic.lora import Adapter
from vla_rl.models.weight_files import (
    check_weights,
    refuse_pointer,
    some,
    tensor_files,
    tensor_shapes,
    tensors_of,
)
from vla_rl.util.finiteness import require_finite

NORM: Final = "language_model.model.norm.weight"
"""A weight whose dtype represents that of all main weights."""


def load_weights(
    network: nn.Module,
    folder: Path,
    *,
    inner_name: Callable[[str], str],
    beside: Mapping[str, Tensor] = MappingProxyType({}),
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
    missing: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Assign the folder's tensors to `network`, which may be on the meta device.

    Args:
        network: its parameters' names and shapes are the expected ones.
        folder: a checkpoint in the public layout.
        inner_name: maps a public name to the network's.
        beside: tensors of separate files, by public name; they replace the folder's.
        adapters: adapters by layer; each is merged into its layer's weight.
        missing: prefixes of the network's names that the folder does not have; those are left
            unchanged.
        dtype: data type of the parameters; None keeps the files'.
        device: device of the parameters.

    Raises: CheckpointError naming missing, unknown, misshapen, damaged or non-finite tensors, or
    the missing memory.
    """
    check_weights(folder)
    files = {name: file for name, file in tensor_files(folder).items() if name not in beside}
    held = {**tensor_shapes(folder, files), **_shapes(beside)}
    _refuse_misfits(adapters, held, folder)
    expected = {
        name: tensor
        for name, tensor in network.state_dict().items()
        if not name.startswith(missing)
    }
    _refuse_others(_shapes(expected), {inner_name(name): shape for name, shape in held.items()})
    if dtype is None:
        num_bytes = sum((folder / file).stat().st_size for file in set(files.values()))
    else:
        num_bytes = sum(tensor.numel() for tensor in expected.values()) * dtype.itemsize
    _check_room(num_bytes, torch.device(device))
    for name, tensor in _all_tensors(folder, files, beside):
        require_finite({name: tensor}, folder)
        moved, layer = tensor.to(device), name.removesuffix(".weight")
        if layer in adapters:
            moved = adapters[layer].merged(moved)
        _assign(
            network,
            inner_name(name),
            moved.to(dtype) if dtype and tensor.is_floating_point() else moved,
        )


def check_names(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless both have the same names with the same shapes."""
    _refuse_others(_shapes(expected), _shapes(found))


def _refuse_misfits(
    adapters: Mapping[str, Adapter], held: Mapping[str, list[int]], folder: Path
) -> None:
    for layer, adapter in adapters.items():
        shape = held.get(f"{layer}.weight")
        if shape is None:
            raise CheckpointError(
                f"an adapter belongs to {layer}, which {folder} does not have; the adapter is for "
                "another model."
            )
        if adapter.weight_shape != shape:
            raise CheckpointError(
                f"the adapter of {layer} fits a weight of shape {adapter.weight_shape}; that of "
                f"{folder} has {shape}."
            )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def _refuse_others(expected: Mapping[str, list[int]], found: Mapping[str, list[int]]) -> None:
    misshapen = [
        f"{name} {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    kinds = (
        ("missing", sorted(expected.keys() - found.keys())),
        ("unknown", sorted(found.keys() - expected.keys())),
        ("of another shape", misshapen),
    )
    complaints = [f"{len(names)} {kind}: {some(names)}" for kind, names in kinds if names]
    if complaints:
        raise CheckpointError(
            f"the checkpoint's tensors do not fit the network of its config ({len(expected)} "
            "expected): " + "; ".join(complaints)
        )


def load_part(path: Path) -> dict[str, Tensor]:
    """Read a `.pt` part of the reference code, such as an action head: tensors by name, without
    DDP's prefix; no pickled code is run.
    """
    refuse_pointer(path)
    verify_download(path)
    if not zipfile.is_zipfile(path):
        raise CheckpointError(
            f"{path} is not a whole PyTorch file ({path.stat().st_size} bytes); download it again."
        )
    try:
        part = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors by name; expected a state dict. Other objects could "
            "run code."
        ) from error
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; download it again.") from error
    if not isinstance(part, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in part.items()
    ):
        raise CheckpointError(f"{path} holds no tensors by name; expected a state dict.")
    return {name.removeprefix("module."): tensor for name, tensor in part.items()}


def find_part(folders: Sequence[Path], name: str) -> Path | None:
    """Return the one file `*<name>*checkpoint*` of the first folder that has any.

    Raises: CheckpointError for several.
    """
    for folder in folders:
        found = sorted(
            path
            for path in folder.glob(f"*{name}*")
            if "checkpoint" in path.name and path.is_file()
        )
        if len(found) > 1:
            raise CheckpointError(
                f"{folder} holds {some([path.name for path in found])}; expected one file for "
                f"{name}."
            )
        if found:
            return found[0]
    return None


def _check_room(needed: int, device: torch.device) -> None:
    if device.type == "cuda":
        free, place = torch.cuda.mem_get_info(device)[0], f"{device} has {{}} GB free"
    else:
        free, place = psutil.virtual_memory().available, "{} GB are available"
    if needed > free:
        raise CheckpointError(
            f"the weights need {needed / 1e9:.1f} GB, but "
            + place.format(f"{free / 1e9:.1f}")
            + "; choose another device or a smaller dtype."
        )


def _all_tensors(
    folder: Path, files: Mapping[str, str], beside: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for file in dict.fromkeys(files.values()):
        yield from tensors_of(folder / file, [name for name in files if files[name] == file])
    yield from beside.items()


def _assign(network: nn.Module, name: str, tensor: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = network.get_submodule(owner_name)
    if leaf in owner._parameters:
        owner.register_parameter(
            leaf, nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        )
    else:
        owner.register_buffer(leaf, tensor)
