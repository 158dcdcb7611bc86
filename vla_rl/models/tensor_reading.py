"""Read the files of a checkpoint, from the hub's download to a single tensor.

    hub id ─► download ─► folder ─► index, or the only file ─► file of each tensor ─► tensor

The hub's client stores a large file under its SHA-256 and links to it from the folder. Files are
checked against that name when they are read, so that a damaged disk or download raises an error
instead of loading wrong weights. Nothing is unpickled but tensors. What may be used together is
decided in `weight_files`.
"""

import hashlib
import os
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vla_rl.errors import CheckpointError
from vla_rl.util.foreign_data import find_files

HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")

OTHER_WEIGHTS: Final = (
    ".ckpt", ".gguf", ".h5", ".joblib", ".mlmodel", ".msgpack", ".npy", ".npz", ".onnx", ".onnx_data", ".ot", ".pb",
    ".pickle", ".pkl", ".pth", ".tflite",
)  # fmt: skip
"""Suffixes of weights that no reader here takes."""

NOT_FETCHED: Final = (
    *(f"*{suffix}" for suffix in OTHER_WEIGHTS),
    "*pytorch_model*.bin", "model.bin", "*[!l].bin",  # every .bin but adapter_model.bin
    "*.arrow", "*.gif", "*.gz", "*.hdf5", "*.jpg", "*.mp4", "*.parquet", "*.png", "*.tar", "*.tfrecord", "*.webm",
    "*.zip",
)  # fmt: skip
"""Patterns of what a repository has besides a policy: weights of other tools, data, videos. All
else is fetched, because no list names every file that a policy may need. Python files are never run here,
but `config.json` names them for other loaders of a saved checkpoint."""

_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def download(hub_id: str, *, without: Sequence[str] = ()) -> Path:
    """Return the local folder of a repository; it is downloaded if necessary.

    Args:
        hub_id: id of the repository.
        without: patterns of files that are not fetched.

    Raises: CheckpointError if it is not here and cannot be downloaded.
    """
    import huggingface_hub  # only if something is downloaded

    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            ignore_patterns=[*NOT_FETCHED, *without],
        )
    except Exception as error:  # the hub's client and its transport raise many kinds
        raise CheckpointError(
            f"{hub_id} is not a local folder, and cannot be fetched from the hub: {error}"
        ) from error
    return Path(folder)


def locate(checkpoint: Path | str, without: Sequence[str] = ()) -> Path:
    """Return the folder of a checkpoint; a hub id is downloaded if necessary.

    Args:
        checkpoint: a folder, or a hub id such as `openvla/openvla-7b`.
        without: patterns of files that are not fetched.

    Raises: CheckpointError if it is neither, or cannot be downloaded; for a folder of training whose policies
    are below.
    """
    path = Path(os.path.expanduser(checkpoint))
    if str(checkpoint) and path.is_dir():
        refuse_training_folder(path)
        return path.resolve()
    if isinstance(checkpoint, str) and HUB_ID.fullmatch(checkpoint):
        return download(checkpoint, without=without)
    raise CheckpointError(
        f"{checkpoint} is neither a folder nor a hub id such as openvla/openvla-7b."
    )


_OF_TRAINING: Final = tuple(
    f"{above}{inner}/config.json"
    for above in ("", "*/", "checkpoints/*/")
    for inner in ("policy", "agents/*/policy", "pretrained_model")
)
"""Policies of a training checkpoint, of a folder of them, of a run: as this package and LeRobot save them."""


def refuse_training_folder(folder: Path) -> None:
    """Raise CheckpointError for a run, or a checkpoint of training, whose policies are in folders below."""
    if holds_weights(folder):
        return
    policies = sorted({path.parent for pattern in _OF_TRAINING for path in folder.glob(pattern)})
    if policies:
        number = "1 policy" if len(policies) == 1 else f"{len(policies)} policies"
        raise CheckpointError(
            f"{folder} is no policy: it is of a training run and has {number} below. Name "
            f"{'it' if len(policies) == 1 else 'one of them, such as'} {policies[-1]}"
        )


def verify_download(path: Path) -> None:
    """Check a file against its digest, if it is a link to a file named by its digest; other files
    are not checked.

    Raises: CheckpointError if it differs from what was published.
    """
    stored = path.resolve()
    # Only files in the hub's cache have their digest as their name.
    if not path.is_symlink() or _SHA256.fullmatch(stored.name) is None:
        return
    with stored.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != stored.name:
        raise CheckpointError(
            f"{path} differs from what was published (its SHA-256 is {digest}); remove {stored} "
            "and fetch it again."
        )


SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

NAMES_SHOWN: Final = 8

LFS_POINTER: Final = b"version https://git-lfs"
"""First bytes of the pointer file that replaces a large file in a repository cloned without Git
LFS."""


class IndexMetadata(msgspec.Struct):
    """Sizes in an index."""

    total_size: int | None = None


class Index(msgspec.Struct):
    """Index from each tensor to its file.

    Example:
        Index(weight_map={"lm_head.weight": "model-00003-of-00003.safetensors"},
              metadata=IndexMetadata(total_size=15_082_474_368))
    """

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
        files = _read_index(folder / INDEX_FILE).weight_map
        # An index is data from outside: a path in it could name any file of the machine.
        outside = sorted({name for name in files.values() if not _is_below(name)})
        if outside:
            raise CheckpointError(
                f"{folder / INDEX_FILE} names {list_some(outside)}, expected files of its own folder."
            )
        missing = sorted({name for name in files.values() if not (folder / name).is_file()})
        if missing:
            raise CheckpointError(
                f"{folder} lacks {list_some(missing)} of {len(set(files.values()))} shards that "
                f"{INDEX_FILE} lists; download them, because the others cannot be used alone."
            )
        return files
    path = folder / SINGLE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no weights; expected {SINGLE_FILE}, or {INDEX_FILE} and its shards."
        )
    with open_safetensors(path) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def stored_dtype(folder: Path, name: str) -> torch.dtype:
    """Return the dtype of one tensor in its file.

    Raises: CheckpointError if there is none of that name.
    """
    files = tensor_files(folder)
    if name not in files:
        raise CheckpointError(f"{folder} holds no {name} among its {len(files)} tensors.")
    (found,) = iterate_tensors(folder / files[name], [name])
    return found[1].dtype


def tensor_shapes(folder: Path, files: Mapping[str, str]) -> dict[str, list[int]]:
    """Read shapes by name, from the files' headers only.

    Args:
        folder: the checkpoint.
        files: the file of each tensor.

    Raises: CheckpointError if a file lacks a tensor that the index says it holds.
    """
    by_file: dict[str, list[str]] = {}
    for name, file in files.items():
        by_file.setdefault(file, []).append(name)
    shapes: dict[str, list[int]] = {}
    for file, names in by_file.items():
        with open_safetensors(folder / file) as found:
            lost = sorted(set(names) - set(found.keys()))
            if lost:
                raise CheckpointError(
                    f"{folder / file} lacks {list_some(lost)}, which {INDEX_FILE} says it holds."
                )
            shapes |= {name: found.get_slice(name).get_shape() for name in names}
    return shapes


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file. Raises: CheckpointError if it is damaged."""
    with open_safetensors(path) as file:
        names = list(file.keys())
    return dict(iterate_tensors(path, names))


def iterate_tensors(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Read some tensors of a safetensors file. Raises: CheckpointError if it is damaged."""
    with open_safetensors(path) as file:
        for name in names:
            try:
                yield name, file.get_tensor(name)
            except SafetensorError as error:
                raise CheckpointError(
                    f"{name} in {path} cannot be read: {error}; the file is damaged."
                ) from error


def refuse_pointer(path: Path) -> None:
    """Raise CheckpointError if a file is a pointer of Git LFS instead of what it is named for."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise CheckpointError(
                f"{path} is a Git LFS pointer, not the file itself; fetch it (git lfs pull)."
            )


def open_safetensors(path: Path) -> Any:
    """Open a safetensors file. Raises: CheckpointError if it is damaged, or not there whole."""
    try:
        refuse_pointer(path)
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file: {error}; download it again."
        ) from error


def list_some(names: list[str]) -> str:
    """Return names for an error, the first few of many."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _read_index(path: Path) -> Index:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Index)
    except (OSError, ValueError, RecursionError) as error:  # not text, or text that is no index
        raise CheckpointError(f"{path} cannot be read: {error}") from error


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
        # weights_only: anything but tensors could run code when it is unpickled.
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
    # The parts were saved from inside DDP, which puts `module.` before every name.
    return {name.removeprefix("module."): tensor for name, tensor in part.items()}


def find_part(folders: Sequence[Path], name: str) -> Path | None:
    """Return the one file `*<name>*checkpoint*` of the first folder that has any.

    Raises: CheckpointError for several.
    """
    for folder in folders:
        found = [
            path
            for path in find_files(folder, f"*{name}*")
            if "checkpoint" in path.name and path.is_file()
        ]
        if len(found) > 1:
            raise CheckpointError(
                f"{folder} holds {list_some([path.name for path in found])}; expected one file for "
                f"{name}."
            )
        if found:
            return found[0]
    return None
