"""Files of weights in a checkpoint folder: which there are, and whether they may be used.

    folder ─► manifest ─► no adapter beside ─► one source of each tensor ─► digests of the hub ─► file of each tensor

Every policy family opens its folder here (`check_weights`), so a folder that one family refuses, no
other takes. Nothing is unpickled but tensors, and no code of a folder is run.
"""

import logging
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vla_rl.errors import CheckpointError
from vla_rl.learner.checkpoint.folders import HEADER
from vla_rl.models.prismatic.hub import verify_download
from vla_rl.util.atomic_folder import MANIFEST, verify_folder
from vla_rl.util.finiteness import require_finite
from vla_rl.util.values import make_disagreement

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
MAIN_WEIGHTS: Final = "model*.safetensors"
"""Pattern of the main weights' files; an adapter's files have other names."""

ADAPTER_CONFIG: Final = "adapter_config.json"

NAMES_SHOWN: Final = 8

LFS_POINTER: Final = b"version https://git-lfs"
"""First bytes of the pointer file that replaces a large file in a repository cloned without Git
LFS."""

SOURCE: Final = re.compile(
    r"model\.safetensors|model-\d+-of-\d+\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin"
)
"""Names under which tools save main weights; a file of such a name is a source of them, whether or
not it is read."""

READ_KINDS: Final = frozenset({".safetensors", ".bin", ".pt", ".json", ".jinja", ".model", ".txt"})
"""Kinds of files that a policy may be made of; one that a manifest does not list is refused."""

_log = logging.getLogger(__name__)


class IndexMetadata(msgspec.Struct):
    """Sizes in an index."""

    total_size: int | None = None


class Index(msgspec.Struct):
    """Index from each tensor to its file."""

    weight_map: dict[str, str]
    metadata: IndexMetadata | None = None


def holds_weights(folder: Path) -> bool:
    """Return whether a folder has main weights, whole or in shards."""
    return (folder / INDEX_FILE).is_file() or (folder / SINGLE_FILE).is_file()


def check_weights(folder: Path) -> None:
    """Check all that can be checked before the weights are read into a network.

    Raises: CheckpointError for a file that differs from its manifest or from what the hub
    published, an adapter beside whole weights, missing shards, and two sources of a tensor that
    differ.
    """
    verify_origin(folder)
    refuse_adapter_beside(folder)
    files = tensor_files(folder)
    refuse_other_sources(folder, files)
    for name in sorted(set(files.values())):
        verify_download(folder / name)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Check a folder and read all its tensors, for policies that are small.

    Raises: CheckpointError as `check_weights`, or for numbers that are not finite.
    """
    check_weights(folder)
    by_file: dict[str, list[str]] = {}
    for name, file in tensor_files(folder).items():
        by_file.setdefault(file, []).append(name)
    found = {
        name: tensor
        for file, names in by_file.items()
        for name, tensor in tensors_of(folder / file, names)
    }
    require_finite(found, folder)
    return found


def verify_origin(folder: Path) -> None:
    """Check a folder that vla_rl saved against its manifest, also the `policy` folder of a run's
    checkpoint, whose manifest is above it. Other folders have none and are not checked.

    Raises: CheckpointError naming a file that differs from the manifest, or is not listed.
    """
    root, below = folder, ""
    if not _has_manifest(folder):
        above = (path for path in folder.absolute().parents[:3] if (path / HEADER).is_file())
        root = next((path for path in above if (path / MANIFEST).exists()), folder)
        if root == folder:
            return
        below = f"{folder.absolute().relative_to(root).as_posix()}/"
    entries = verify_folder(root, below)
    if not entries:
        return  # a folder that was put into a checkpoint later
    unlisted = sorted(
        path.name
        for path in folder.iterdir()
        if path.suffix in READ_KINDS
        and path.name != MANIFEST
        and not path.name.startswith(".")
        and path.is_file()
        and f"{below}{path.name}" not in entries
    )
    if unlisted:
        raise CheckpointError(
            f"{folder} has {some(unlisted)}, which {root / MANIFEST} does not list, so nothing "
            "tells whether it belongs to the policy; move it away, or remove the manifest if you "
            "changed the folder on purpose."
        )


def _has_manifest(folder: Path) -> bool:
    """Return whether a folder has a manifest of ours; JSON of another kind is another tool's."""
    path = folder / MANIFEST
    if not path.is_file():
        return path.exists()
    data = path.read_bytes()
    try:
        msgspec.json.decode(data)
    except (ValueError, RecursionError):
        return True  # damaged, which reading it reports
    return b'"blake2b"' in data or data.strip() == b"{}"


def refuse_adapter_beside(folder: Path) -> None:
    """Raise CheckpointError if a folder holds an adapter beside whole weights."""
    if not holds_weights(folder):
        return
    if (folder / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{folder} holds whole weights and an adapter ({ADAPTER_CONFIG}), and nothing says "
            "whether the weights contain the adapter already; move the adapter's files away to "
            "use the weights as they are, or merge the adapter into the checkpoint that it was "
            "trained on."
        )
    stray = [path.name for path in folder.glob("adapter_model.*") if path.is_file()]
    if stray:
        _log.warning(
            "%s in %s is not used: it has no %s, so only the whole weights are read",
            some(stray),
            folder,
            ADAPTER_CONFIG,
        )


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor in `folder`.

    Raises: CheckpointError if the folder has no weights or lacks shards.
    """
    if (folder / INDEX_FILE).is_file():
        files = _read_index(folder / INDEX_FILE).weight_map
        outside = sorted({name for name in files.values() if not _is_below(name)})
        if outside:
            raise CheckpointError(
                f"{folder / INDEX_FILE} names {some(outside)}, expected files of its own folder."
            )
        missing = sorted({name for name in files.values() if not (folder / name).is_file()})
        if missing:
            raise CheckpointError(
                f"{folder} lacks {some(missing)} of {len(set(files.values()))} shards that "
                f"{INDEX_FILE} lists; download them, because the others cannot be used alone."
            )
        return files
    path = folder / SINGLE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no weights; expected {SINGLE_FILE}, or {INDEX_FILE} and its shards."
        )
    with opened(path) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def _is_below(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def refuse_other_sources(folder: Path, files: Mapping[str, str]) -> None:
    """Compare every other file that has tensors of the same names: shards beside a whole file, a
    shard of an earlier save, PyTorch's files beside safetensors.

    Args:
        folder: the checkpoint.
        files: the file that each tensor is read from.

    Raises: CheckpointError naming both files and the tensor if a number differs, or a shard with
    tensors that no index lists.
    """
    used = set(files.values())
    present = sorted(
        path.name
        for path in folder.iterdir()
        if path.name in used or (SOURCE.fullmatch(path.name) and path.is_file())
    )
    shards = [name for name in present if name in used or "-of-" in name]
    for name in present:
        names, read = _source(folder / name)
        unlisted = sorted(set(names) - files.keys())
        if unlisted and name in shards and name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / name} holds {some(unlisted)}, which {_listing(folder)} does not list; "
                "it is a shard of another save, or the index is: move the wrong one away."
            )
        for tensor in names:
            kept = files.get(tensor, name)
            if kept != name and not (folder / kept).samefile(folder / name):
                ((_, first),) = tensors_of(folder / kept, [tensor])
                _compare(tensor, folder, (kept, first), (name, read(tensor)))
    if (folder / INDEX_FILE).is_file():
        tensor_shapes(folder, files)


def require_same_tensors(first: Path, second: Path, remedy: str) -> None:
    """Compare two files of tensors, safetensors or PyTorch's.

    Raises: CheckpointError naming the tensor that differs, or that one of them lacks.
    """
    (names, read), (others, read_other) = _source(first), _source(second)
    alone = sorted(set(names) ^ set(others))
    if alone and names and others:
        raise make_disagreement(
            "the same tensors",
            (str(first), f"{len(names)} tensors"),
            (str(second), f"{len(others)} tensors, {some(alone)} are in one of them"),
            remedy=remedy,
        )
    for name in set(names) & set(others):
        _compare(
            name, first.parent, (str(first), read(name)), (str(second), read_other(name)), remedy
        )


def _compare(
    name: str,
    folder: Path,
    first: tuple[str, Tensor],
    second: tuple[str, Tensor],
    remedy: str = "move the file away that is not of the policy you want, because readers differ in "
    "which one they take",
) -> None:
    (first_file, one), (second_file, other) = first, second
    if one.shape == other.shape:
        if one.dtype != other.dtype and one.is_floating_point() and other.is_floating_point():
            coarser = max(one.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            one, other = one.to(coarser), other.to(coarser)
        if torch.equal(one, other):
            return
    raise make_disagreement(
        f"the tensor {name} of {folder}",
        (first_file, _described(one, other)),
        (second_file, _described(other, one)),
        remedy=remedy,
    )


def _described(tensor: Tensor, other: Tensor) -> str:
    size = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
    if tensor.shape != other.shape or tensor.numel() == 0:
        return size
    place = int((tensor != other).flatten().nonzero()[0])
    return f"{size}, number {place} is {tensor.flatten()[place].item():.9g}"


def _source(path: Path) -> tuple[list[str], Callable[[str], Tensor]]:
    """Return the names of a file's tensors, and a function that reads one of them."""
    if path.suffix == ".safetensors":
        with opened(path) as file:
            names = list(file.keys())
        return names, lambda name: next(tensors_of(path, [name]))[1]
    try:
        held = torch.load(
            path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
        )
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        # such as the pointer of a clone without Git LFS; no reader here takes it
        _log.warning("%s is not compared with the weights that are read: %s", path, error)
        return [], lambda name: torch.empty(0)
    tensors = {
        name: tensor
        for name, tensor in (held.items() if isinstance(held, dict) else ())
        if isinstance(tensor, Tensor)
    }
    return list(tensors), tensors.__getitem__


def _listing(folder: Path) -> str:
    return INDEX_FILE if (folder / INDEX_FILE).is_file() else SINGLE_FILE


def stored_dtype(folder: Path, name: str) -> torch.dtype:
    """Return the dtype of one tensor in its file.

    Raises: CheckpointError if there is none of that name.
    """
    files = tensor_files(folder)
    if name not in files:
        raise CheckpointError(f"{folder} holds no {name} among its {len(files)} tensors.")
    (found,) = tensors_of(folder / files[name], [name])
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
        with opened(folder / file) as found:
            lost = sorted(set(names) - set(found.keys()))
            if lost:
                raise CheckpointError(
                    f"{folder / file} lacks {some(lost)}, which {INDEX_FILE} says it holds."
                )
            shapes |= {name: found.get_slice(name).get_shape() for name in names}
    return shapes


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file. Raises: CheckpointError if it is damaged."""
    with opened(path) as file:
        names = list(file.keys())
    return dict(tensors_of(path, names))


def tensors_of(path: Path, names: list[str]) -> Iterator[tuple[str, Tensor]]:
    """Read some tensors of a safetensors file. Raises: CheckpointError if it is damaged."""
    with opened(path) as file:
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


def opened(path: Path) -> Any:
    """Open a safetensors file. Raises: CheckpointError if it is damaged, or not there whole."""
    try:
        refuse_pointer(path)
        return safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file: {error}; download it again."
        ) from error


def some(names: list[str]) -> str:
    """Return names for an error, the first few of many."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _read_index(path: Path) -> Index:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Index)
    except (OSError, ValueError, RecursionError) as error:  # not text, or text that is no index
        raise CheckpointError(f"{path} cannot be read: {error}") from error
