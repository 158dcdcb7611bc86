"""Weights of a public checkpoint, read from safetensors files directly into a network on the meta
device.

    folder ─► file of each tensor ─► names checked ─► memory checked ─► each tensor: read, cast, assigned

The network is built on the meta device, so that host memory holds the weights only once. Names are
strict both ways: missing and unknown tensors are listed before any is read.
"""

import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec
import psutil
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from vla_rl.engines.atomic_folder import MANIFEST, verify_folder
from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.hub import verify_download
from vla_rl.models.prismatic.lora import Adapter

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
MAIN_WEIGHTS: Final = "model*.safetensors"
"""Pattern of the main weights' files; an adapter's files have other names."""

NORM: Final = "language_model.model.norm.weight"
"""A weight whose dtype represents that of all main weights."""

NAMES_SHOWN: Final = 8

LFS_POINTER: Final = b"version https://git-lfs"
"""First bytes of the pointer file that replaces a large file in a repository cloned without Git
LFS."""


class IndexMetadata(msgspec.Struct):
    """Sizes in an index."""

    total_size: int


class Index(msgspec.Struct):
    """Index from each tensor to its file."""

    weight_map: dict[str, str]
    metadata: IndexMetadata | None = None


def holds_weights(folder: Path) -> bool:
    """Return whether a folder has main weights, whole or in shards."""
    return (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor in `folder`.

    Raises: CheckpointError if the folder has no weights or lacks shards.
    """
    if (folder / INDEX_FILE).is_file():
        files = _decode(folder / INDEX_FILE, Index).weight_map
        missing = sorted({name for name in files.values() if not (folder / name).is_file()})
        if missing:
            raise CheckpointError(
                f"{folder} lacks {_some(missing)} of {len(set(files.values()))} shards that "
                f"{INDEX_FILE} lists; download them, because the others cannot be used alone."
            )
        return files
    path = folder / SINGLE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no weights; expected {SINGLE_FILE}, or {INDEX_FILE} and its shards."
        )
    with _opened(path) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def stored_dtype(folder: Path, name: str) -> torch.dtype:
    """Return the dtype of one tensor in its file.

    Raises: CheckpointError if there is none of that name.
    """
    files = tensor_files(folder)
    if name not in files:
        raise CheckpointError(f"{folder} holds no {name} among its {len(files)} tensors.")
    (found,) = _tensors(folder / files[name], [name])
    return found[1].dtype


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
    if (folder / MANIFEST).is_file():
        verify_folder(folder)
    by_file: dict[str, list[str]] = {}
    for name, file in tensor_files(folder).items():
        if name not in beside:
            by_file.setdefault(file, []).append(name)
    held = {**_read_shapes(folder, by_file), **_shapes(beside)}
    _refuse_misfits(adapters, held, folder)
    expected = {
        name: tensor
        for name, tensor in network.state_dict().items()
        if not name.startswith(missing)
    }
    _refuse_others(_shapes(expected), {inner_name(name): shape for name, shape in held.items()})
    if dtype is None:
        num_bytes = sum((folder / file).stat().st_size for file in by_file)
    else:
        num_bytes = sum(tensor.numel() for tensor in expected.values()) * dtype.itemsize
    _check_room(num_bytes, torch.device(device))
    for file in by_file:
        verify_download(folder / file)
    for name, tensor in _all_tensors(folder, by_file, beside):
        if tensor.is_floating_point() and not _is_finite(tensor):
            raise CheckpointError(
                f"{name} in {folder} has numbers that are not finite; the file is damaged."
            )
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
    complaints = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names]
    if complaints:
        raise CheckpointError(
            f"the checkpoint's tensors do not fit the network of its config ({len(expected)} "
            "expected): " + "; ".join(complaints)
        )


def load_part(path: Path) -> dict[str, Tensor]:
    """Read a `.pt` part of the reference code, such as an action head: tensors by name, without
    DDP's prefix; no pickled code is run.
    """
    _refuse_pointer(path)
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
                f"{folder} holds {_some([path.name for path in found])}; expected one file for "
                f"{name}."
            )
        if found:
            return found[0]
    return None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file. Raises: CheckpointError if it is damaged."""
    with _opened(path) as file:
        names = list(file.keys())
    return dict(_tensors(path, names))


def _read_shapes(folder: Path, by_file: Mapping[str, list[str]]) -> dict[str, list[int]]:
    """Read shapes by name, from the files' headers only."""
    shapes: dict[str, list[int]] = {}
    for file, names in by_file.items():
        with _opened(folder / file) as opened:
            lost = sorted(set(names) - set(opened.keys()))
            if lost:
                raise CheckpointError(
                    f"{folder / file} lacks {_some(lost)}, which {INDEX_FILE} says it holds."
                )
            shapes |= {name: opened.get_slice(name).get_shape() for name in names}
    return shapes


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
    folder: Path, by_file: Mapping[str, list[str]], beside: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for file, names in by_file.items():
        yield from _tensors(folder / file, names)
    yield from beside.items()


def _tensors(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    with _opened(path) as file:
        for name in names:
            try:
                yield name, file.get_tensor(name)
            except SafetensorError as error:
                raise CheckpointError(
                    f"{name} in {path} cannot be read: {error}; the file is damaged."
                ) from error


def _refuse_pointer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the file itself; fetch it (git lfs pull)."
            )


def _opened(path: Path) -> Any:
    _refuse_pointer(path)
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file: {error}; download it again."
        ) from error


def _is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite, without a copy of its size: minimum and maximum are
    NaN if any number is.
    """
    return tensor.numel() == 0 or all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor))


def _assign(network: nn.Module, name: str, tensor: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = network.get_submodule(owner_name)
    if leaf in owner._parameters:
        owner.register_parameter(
            leaf, nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        )
    else:
        owner.register_buffer(leaf, tensor)


def _decode(path: Path, type: type[Index]) -> Index:
    try:
        return msgspec.json.decode(path.read_bytes(), type=type)
    except (OSError, ValueError) as error:  # bytes that are not text, and text that is not an index
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _some(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
