"""Weights in the public layout, between a checkpoint folder and a network.

    folder checked (`weight_files`) ─► names checked ─► memory checked ─► each tensor: read, cast, assigned

The network is built on the meta device, so that host memory holds the weights only once. Names are
strict both ways: missing and unknown tensors are listed before any is read. An adapter is merged
into the weights, or kept for training. What is written is one file of weights, or shards and their
index, with small files beside them.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import msgspec
import psutil
import torch
from torch import Tensor, nn

from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.adapters import (
    ADAPTER_NAME,
    Adapter,
    describe_targets,
    freeze_all_but_adapters,
)
from vla_rl.models.prismatic.config import AdapterUse, LoraConfig, PrismaticConfig
from vla_rl.models.prismatic.folder import PublicFolder
from vla_rl.models.prismatic.public_config import timm_name
from vla_rl.models.prismatic.trunk import materialise
from vla_rl.models.tensor_reading import (
    INDEX_FILE,
    SINGLE_FILE,
    Index,
    IndexMetadata,
    iterate_tensors,
    stored_dtype,
    tensor_files,
    tensor_shapes,
)
from vla_rl.models.weight_files import check_shapes, check_weights, list_shapes
from vla_rl.util.arrays import require_finite
from vla_rl.util.atomic_files import writing_folder

NORM: Final = "language_model.model.norm.weight"
"""A weight whose dtype represents that of all main weights."""


def load_weights(
    network: nn.Module,
    folder: Path,
    *,
    inner_name: Callable[[str], str],
    extra: Mapping[str, Tensor] = MappingProxyType({}),
    adapters: Mapping[str, Adapter] = MappingProxyType({}),
    missing: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Assign the folder's tensors to `network`, which may be on the meta device.

    Args:
        network: its parameters' names and shapes are the expected ones.
        folder: a checkpoint in the public layout.
        timm_name: maps a public name to the network's.
        extra: tensors of separate files, by public name; they replace the folder's.
        adapters: adapters by layer; each is merged into its layer's weight.
        missing: prefixes of the network's names that the folder does not have; those are left
            unchanged.
        dtype: data type of the parameters; None keeps the files'.
        device: device of the parameters.

    Raises: CheckpointError naming missing, unknown, misshapen, damaged or non-finite tensors, or
    the missing memory.
    """
    # All checks come before the first tensor: a folder of 15 GB that does not fit is refused
    # within a second.
    check_weights(folder)
    files = {name: file for name, file in tensor_files(folder).items() if name not in extra}
    held = {**tensor_shapes(folder, files), **list_shapes(extra)}
    # An adapter for another layer would be left out in silence otherwise.
    _refuse_misfits(adapters, held, folder)
    expected = {
        name: tensor
        for name, tensor in network.state_dict().items()
        if not name.startswith(missing)
    }
    check_shapes(
        list_shapes(expected), {inner_name(name): shape for name, shape in held.items()}, folder
    )
    if dtype is None:
        num_bytes = sum((folder / file).stat().st_size for file in set(files.values()))
    else:
        num_bytes = sum(tensor.numel() for tensor in expected.values()) * dtype.itemsize
    _require_memory(num_bytes, torch.device(device))
    for name, tensor in _all_tensors(folder, files, extra):
        require_finite({name: tensor}, folder)
        # One tensor at a time, so that host memory holds the weights only once.
        moved, layer = tensor.to(device), name.removesuffix(".weight")
        if layer in adapters:
            moved = adapters[layer].merged(moved)
        _assign(
            network,
            inner_name(name),
            moved.to(dtype) if dtype and tensor.is_floating_point() else moved,
        )


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


def _require_memory(needed: int, device: torch.device) -> None:
    if device.type == "cuda":
        free, available = torch.cuda.mem_get_info(device)[0], f"{device} has {{}} GB free"
    else:
        free, available = psutil.virtual_memory().available, "{} GB are available"
    if needed > free:
        raise CheckpointError(
            f"the weights need {needed / 1e9:.1f} GB, but "
            + available.format(f"{free / 1e9:.1f}")
            + "; choose another device or a smaller dtype."
        )


def _all_tensors(
    folder: Path, files: Mapping[str, str], extra: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    # File by file, so that each shard is opened once.
    for file in dict.fromkeys(files.values()):
        yield from iterate_tensors(folder / file, [name for name in files if files[name] == file])
    yield from extra.items()


def _assign(network: nn.Module, name: str, tensor: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = network.get_submodule(owner_name)
    if leaf in owner._parameters:
        owner.register_parameter(
            leaf, nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
        )
    else:
        owner.register_buffer(leaf, tensor)


ConfigT = TypeVar("ConfigT", bound=PrismaticConfig)


def with_adapter(
    config: ConfigT, folder: PublicFolder, use: AdapterUse, build: Callable[[ConfigT], nn.Module]
) -> ConfigT:
    """Return the configuration with the checkpoint's adapter if it is to be trained; else
    unchanged.

    Args:
        config: the checkpoint's configuration, without its adapter.
        folder: the checkpoint.
        use: whether the adapter is merged or trained.
        build: builds a network from the configuration.

    Raises: CheckpointError if there is no adapter to train.
    """
    if use == "merge" or config.lora is not None:
        return config
    if folder.adapter is None:
        raise CheckpointError(
            f"{folder.path} has no adapter to train (adapter_use 'train'); name one (adapter), or "
            "add new ones "
            "(lora_rank, or `adapted`)."
        )
    # Names of layers are all that is wanted, so no memory is taken.
    with torch.device("meta"):
        network = build(config)
    adapter = folder.adapter
    targets = describe_targets(network, adapter.read_tensors().layers)
    return msgspec.structs.replace(
        config, lora=LoraConfig(rank=adapter.rank, alpha=adapter.alpha, targets=targets)
    )


def load_folder(
    network: nn.Module,
    folder: PublicFolder,
    *,
    extra: Mapping[str, Tensor] = MappingProxyType({}),
    missing: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Fill a network that was built on the meta device.

    Args:
        network: the network, with adapters if the checkpoint's are to be kept.
        folder: the checkpoint.
        extra: tensors of its parts, by public name.
        missing: prefixes of names that the checkpoint does not have; those tensors are left
            unchanged.
        without: prefixes of the adapter's layers that a part already holds merged.
        dtype: data type of the parameters; None keeps the files'.
        device: device of the parameters.

    Raises: CheckpointError.
    """
    wrapped = {
        name.replace(".base_layer.", "."): name
        for name in network.state_dict()
        if ".base_layer." in name
    }
    whole, adapters = _read_adapter(folder, without)
    extra = {**extra, **whole}
    if wrapped:  # the adapters stay apart, beside the layers that they belong to
        kept_dtype = dtype or stored_dtype(folder.path, NORM)
        for layer, adapter in adapters.items():
            for half, tensor in (("A", adapter.down), ("B", adapter.up)):
                extra[f"{layer}.lora_{half}.{ADAPTER_NAME}.weight"] = tensor.to(kept_dtype)
        adapters = {}
    load_weights(
        network,
        folder.path,
        inner_name=(lambda name: wrapped.get(timm_name(name), timm_name(name)))
        if wrapped
        else timm_name,
        extra=extra,
        adapters=adapters,
        missing=missing,
        dtype=dtype,
        device=device,
    )
    materialise(network, device)
    if wrapped:
        freeze_all_but_adapters(network)


def _read_adapter(
    folder: PublicFolder, without: tuple[str, ...]
) -> tuple[Mapping[str, Tensor], dict[str, Adapter]]:
    """Return the tensors of a folder's adapter that replace others, and its layers."""
    if folder.adapter is None:
        return {}, {}
    held = folder.adapter.read_tensors()
    return held.whole, {
        layer: adapter for layer, adapter in held.layers.items() if not layer.startswith(without)
    }


SHARD_BYTES: Final = 5 * 10**9
"""Size of the largest file that is written; public checkpoints have about this limit."""


def write_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    files: Mapping[str, bytes],
    index: bytes | None = None,
    parts: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
) -> None:
    """Write a checkpoint folder, all of it or nothing: one file of weights, or shards and their
    index if it is large.

    Args:
        folder: must not exist yet.
        tensors: tensors by public name.
        files: small files beside them.
        index: index of the folder that the weights came from; its split is reused if it still fits.
        parts: tensors of separate PyTorch files, by file name.
    """
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    num_part_bytes = sum(tensor.nbytes for part in parts.values() for tensor in part.values())
    # The loaded split is kept, so that a trained checkpoint differs from the first in its numbers
    # alone.
    shards = _reuse_shards(index, tensors, num_bytes)
    if shards is None:
        shards, index = _split_into_shards(tensors), None
    with writing_folder(
        folder, num_bytes + num_part_bytes + sum(map(len, files.values()))
    ) as writer:
        for name, shard in shards.items():
            writer.write_tensors(name, shard)
        if len(shards) > 1 and index is None:
            weight_map = {key: name for name, shard in shards.items() for key in shard}
            index = msgspec.json.format(
                msgspec.json.encode(Index(weight_map, IndexMetadata(num_bytes))), indent=2
            )
        if index is not None:
            writer.write_bytes(INDEX_FILE, index)
        for name, part in parts.items():
            writer.write_torch(name, part)
        for name, data in files.items():
            writer.write_bytes(name, data)


def _reuse_shards(
    index: bytes | None, tensors: Mapping[str, Tensor], num_bytes: int
) -> dict[str, dict[str, Tensor]] | None:
    """Return the shards of a loaded index, or None if there was none, or it lists other tensors."""
    loaded = msgspec.json.decode(index, type=Index) if index is not None else None
    if loaded is None or loaded.weight_map.keys() != tensors.keys():
        return None
    if loaded.metadata is None or loaded.metadata.total_size != num_bytes:
        return None
    parts: dict[str, dict[str, Tensor]] = {}
    for name, file in loaded.weight_map.items():
        parts.setdefault(file, {})[name] = tensors[name]
    return parts


def _split_into_shards(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > SHARD_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    if len(parts) == 1:
        return {SINGLE_FILE: parts[0]}
    return {
        f"model-{number:05d}-of-{len(parts):05d}.safetensors": part
        for number, part in enumerate(parts, start=1)
    }
