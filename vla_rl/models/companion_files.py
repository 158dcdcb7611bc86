"""Small files beside the weights of a checkpoint: all are carried from a loaded folder to a saved
one, whatever their names, so that a trained policy reads the prompts and pictures that it read
before.

Only weights are left out, and what is too large to be anything else; a line names the latter. Files
in subfolders, such as `additional_chat_templates/`, come along under their relative names, unless
the subfolder holds a model or an adapter of its own.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from vla_rl.models.prismatic.hub import OTHER_WEIGHTS
from vla_rl.models.weight_files import ADAPTER_CONFIG, some
from vla_rl.util.atomic_folder import MANIFEST

COMPANION_BYTES: Final = 64 << 20
"""Size of the largest file that is carried; the largest public tokenizer.json has 33 MB."""

SUBFOLDER_BYTES: Final = 16 << 20
"""Size of the largest subfolder that is carried."""

WEIGHTS: Final = (".safetensors", ".bin", ".pt", *OTHER_WEIGHTS)

INDEX: Final = ".index.json"
"""End of the name of an index of shards. A saved folder gets an index of its own."""

_MODEL_FILES: Final = ("config.json", ADAPTER_CONFIG)
"""Files that make a subfolder a model or an adapter of its own."""

_log = logging.getLogger(__name__)


def companion_files(folder: Path, without: frozenset[str] = frozenset()) -> dict[str, bytes]:
    """Read every small file of a checkpoint by relative name.

    Args:
        folder: the checkpoint.
        without: names of files that do not belong to the policy.
    """
    others = {MANIFEST, *without}
    found: dict[str, bytes] = {}
    left_behind: list[str] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            inner = _carried(path)
            if inner is None:
                left_behind.append(f"{path.name}/")
            else:
                found |= {each.relative_to(folder).as_posix(): each.read_bytes() for each in inner}
        elif path.is_file() and path.name not in others and not _is_weights(path):
            if path.stat().st_size <= COMPANION_BYTES:
                found[path.name] = path.read_bytes()
            else:
                left_behind.append(path.name)
    if left_behind:
        _log.warning(
            "%s of %s is too large to be saved with the policy; it stays behind",
            some(left_behind),
            folder,
        )
    return found


def _carried(folder: Path) -> list[Path] | None:
    """Return the files of a subfolder that come along; None if they are too large together."""
    if folder.name.startswith("."):
        return []
    size, files = 0, []
    for path in _files_below(folder):
        if _is_weights(path) or path.name in _MODEL_FILES:
            return []
        size += path.stat().st_size
        if size > SUBFOLDER_BYTES:
            return None
        files.append(path)
    return files


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _is_weights(path: Path) -> bool:
    return path.suffix in WEIGHTS or path.name.endswith(INDEX)
