"""Files of weights in a checkpoint folder: whether they may be used, and fit their network.

    folder ─► manifest ─► no adapter beside ─► one source of each tensor ─► digests of the hub

Every policy family opens its folder here (`check_weights`), so a folder that one family refuses, no
other takes. Nothing is unpickled but tensors, and no code of a folder is run.
"""

import logging
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from vla_rl.errors import CheckpointError
from vla_rl.learner.checkpoint.folders import HEADER
from vla_rl.models.tensor_reading import (
    INDEX_FILE,
    SINGLE_FILE,
    holds_weights,
    iterate_tensors,
    list_some,
    open_safetensors,
    tensor_files,
    tensor_shapes,
    verify_download,
)
from vla_rl.util.arrays import require_finite
from vla_rl.util.atomic_files import MANIFEST, verify_folder
from vla_rl.util.foreign_data import find_files
from vla_rl.util.values import make_disagreement

MAIN_WEIGHTS: Final = "model*.safetensors"
"""Pattern of the main weights' files; an adapter's files have other names."""

ADAPTER_CONFIG: Final = "adapter_config.json"

SOURCE: Final = re.compile(
    r"model\.safetensors|model-\d+-of-\d+\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin"
)
"""Names under which tools save main weights; a file of such a name is a source of them, whether or
not it is read."""

READ_KINDS: Final = frozenset({".safetensors", ".bin", ".pt", ".json", ".jinja", ".model", ".txt"})
"""Kinds of files that a policy may be made of; one that a manifest does not list is refused."""

QUANTISED: Final = frozenset(
    {
        "I8",
        "U8",
        "F8_E4M3",
        "F8_E5M2",
        "F8_E4M3FNUZ",
        "F8_E5M2FNUZ",
        "F8_E8M0",
        "F4",
        "F6_E2M3",
        "F6_E3M2",
    }
)
"""Types of numbers of eight bits or less, by safetensors' names."""

_log = logging.getLogger(__name__)


def check_weights(folder: Path) -> None:
    """Check all that can be checked before the weights are read into a network.

    Raises: CheckpointError for a file that differs from its manifest or from what the hub
    published, an adapter beside whole weights, missing shards, and two sources of a tensor that
    differ.
    """
    # From cheap to dear: the digests of the hub read every byte, the others only headers and
    # small files.
    verify_origin(folder)
    refuse_extra_adapter(folder)
    files = tensor_files(folder)
    refuse_quantised(folder, files)
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
        for name, tensor in iterate_tensors(folder / file, names)
    }
    require_finite(found, folder)
    return found


def verify_origin(folder: Path) -> None:
    """Check a folder that vla_rl saved against its manifest, also the `policy` folder of a run's
    checkpoint, whose manifest is above it. Other folders have none and are not checked.

    Raises: CheckpointError naming a file that differs from the manifest, or is not listed.
    """
    # A run's checkpoint has one manifest for all of its folders, three levels up at most
    # (agents/NAME/policy).
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
            f"{folder} has {list_some(unlisted)}, which {root / MANIFEST} does not list, so nothing "
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


def refuse_extra_adapter(folder: Path) -> None:
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
    stray = [path.name for path in find_files(folder, "adapter_model.*") if path.is_file()]
    if stray:
        _log.warning(
            "%s in %s is not used: it has no %s, so only the whole weights are read",
            list_some(stray),
            folder,
            ADAPTER_CONFIG,
        )


def refuse_quantised(folder: Path, files: Mapping[str, str]) -> None:
    """Raise CheckpointError for weights in eight bits or less, or a configuration that says so.

    Their numbers mean nothing without their scales, and cannot be trained; a saved policy would keep the
    configuration beside whole numbers.
    """
    remedy = "take the checkpoint before it was quantised, or convert it back (dequantize) first"
    found = sorted(
        name
        for file in set(files.values())
        for name, kind in _kinds_of_numbers(folder / file).items()
        if kind in QUANTISED
    )
    if found:
        raise CheckpointError(
            f"{folder} holds quantised weights, {list_some(found)}, expected float32, float16 or bfloat16; "
            f"{remedy}."
        )
    path = folder / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
    except (ValueError, RecursionError):
        return  # the family that reads it says what is wrong
    if isinstance(config, dict) and config.get("quantization_config"):
        raise CheckpointError(
            f"{path} has a quantization_config, expected none: quantised policies are not trained here; "
            f"{remedy}, and remove the field."
        )


def _kinds_of_numbers(path: Path) -> dict[str, str]:
    with open_safetensors(path) as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


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
        names, read = _open_source(folder / name)
        unlisted = sorted(set(names) - files.keys())
        if unlisted and name in shards and name.endswith(".safetensors"):
            raise CheckpointError(
                f"{folder / name} holds {list_some(unlisted)}, which {_listing(folder)} does not list; "
                "it is a shard of another save, or the index is: move the wrong one away."
            )
        for tensor in names:
            kept = files.get(tensor, name)
            if kept != name and not (folder / kept).samefile(folder / name):
                ((_, first),) = iterate_tensors(folder / kept, [tensor])
                _compare(tensor, folder, (kept, first), (name, read(tensor)))
    if (folder / INDEX_FILE).is_file():
        tensor_shapes(folder, files)


def require_same_tensors(first: Path, second: Path, remedy: str) -> None:
    """Compare two files of tensors, safetensors or PyTorch's.

    Raises: CheckpointError naming the tensor that differs, or that one of them lacks.
    """
    (names, read), (others, read_other) = _open_source(first), _open_source(second)
    alone = sorted(set(names) ^ set(others))
    if alone and names and others:
        raise make_disagreement(
            "the same tensors",
            (str(first), f"{len(names)} tensors"),
            (str(second), f"{len(others)} tensors, {list_some(alone)} are in one of them"),
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
            # A file in half precision beside the one it was rounded from is no contradiction.
            coarser = max(one.dtype, other.dtype, key=lambda dtype: torch.finfo(dtype).eps)
            one, other = one.to(coarser), other.to(coarser)
        if torch.equal(one, other):
            return
    raise make_disagreement(
        f"the tensor {name} of {folder}",
        (first_file, _describe(one, other)),
        (second_file, _describe(other, one)),
        remedy=remedy,
    )


def _describe(tensor: Tensor, other: Tensor) -> str:
    size = f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
    if tensor.shape != other.shape or tensor.numel() == 0:
        return size
    index = int((tensor != other).flatten().nonzero()[0])
    return f"{size}, number {index} is {tensor.flatten()[index].item():.9g}"


def _open_source(path: Path) -> tuple[list[str], Callable[[str], Tensor]]:
    """Return the names of a file's tensors, and a function that reads one of them."""
    if path.suffix == ".safetensors":
        with open_safetensors(path) as file:
            names = list(file.keys())
        return names, lambda name: next(iterate_tensors(path, [name]))[1]
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


def require_loaded(report: Mapping[str, Any], source: object) -> None:
    """Raise CheckpointError if transformers' report of loading names tensors that do not match.

    transformers fills missing tensors with random numbers and only logs that, which would train a
    broken policy.
    """
    unfit = {key: sorted(names) for key, names in report.items() if names and key != "error_msgs"}
    if unfit:
        raise CheckpointError(f"the tensors of {source} do not match its configuration: {unfit}")


def check_names(
    expected: Mapping[str, Tensor], found: Mapping[str, Tensor], folder: Path | None = None
) -> None:
    """Check tensors as `check_shapes` checks their shapes."""
    check_shapes(list_shapes(expected), list_shapes(found), folder)


def list_shapes(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Return the shape of each tensor."""
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def check_shapes(
    expected: Mapping[str, list[int]], found: Mapping[str, list[int]], folder: Path | None
) -> None:
    """Raise CheckpointError unless both have the same names with the same shapes.

    Args:
        expected: shapes by the network's names.
        found: those of a checkpoint.
        folder: the checkpoint, for the error; None if there is none.
    """
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
    complaints = [f"{len(names)} {kind}: {list_some(names)}" for kind, names in kinds if names]
    if complaints:
        raise CheckpointError(
            f"the tensors of {folder or 'the checkpoint'} do not fit the network of its config "
            f"({len(expected)} expected): {'; '.join(complaints)}. Take the checkpoint as it was saved, whole "
            "and with nothing added: a loader that skips names leaves weights random."
        )
