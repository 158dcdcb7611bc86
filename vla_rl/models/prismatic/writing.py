"""Write a checkpoint in the public layout: one file of weights, or shards and their index, and
small files beside them.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec
from torch import Tensor

from vla_rl.models.weight_files import INDEX_FILE, SINGLE_FILE, Index, IndexMetadata
from vla_rl.util.atomic_folder import writing_folder

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
    num_beside = sum(tensor.nbytes for part in parts.values() for tensor in part.values())
    shards = _shards_of(index, tensors, num_bytes)
    if shards is None:
        shards, index = _shards(tensors), None
    with writing_folder(folder, num_bytes + num_beside + sum(map(len, files.values()))) as writer:
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


def _shards_of(
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


def _shards(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
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
