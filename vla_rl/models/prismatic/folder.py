"""A checkpoint folder in the public layout: found, read, and later written back with everything that was in it.

Nothing of it is executed: Python files beside the weights are carried along as bytes and never imported. Nothing is
written into it either; a policy that was trained is saved to a folder of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vla_rl.engines.atomic_folder import MANIFEST
from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.hub import HUB_ID, downloaded
from vla_rl.models.prismatic.public_config import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    Extension,
    PublicConfig,
    read_extension,
    read_public_config,
)
from vla_rl.models.prismatic.statistics import Statistics, read_statistics
from vla_rl.models.prismatic.weights import INDEX_FILE

COMPANION_BYTES: Final = 16 << 20
"""Files up to this size that are not weights are carried from a loaded folder to a saved one."""

_WEIGHTS: Final = (".safetensors", ".pt", ".bin", ".pth")


@dataclass(frozen=True)
class PublicFolder:
    """A checkpoint on disk, read but for its weights."""

    path: Path
    public: PublicConfig
    extension: Extension
    statistics: Mapping[str, Statistics]
    """Action statistics by key."""

    files: Mapping[str, bytes]
    """Every small file beside the weights, as it was; `config.json` and the tokenizer among them."""

    index: bytes | None
    """Which shard holds which tensor; None where the weights are one file."""


def open_folder(checkpoint: Path | str | PublicFolder) -> PublicFolder:
    """Read a local folder, or a repository of the Hugging Face hub by its id; one that is read already stays as it is.

    Raises: CheckpointError where it is neither, or is not a checkpoint of OpenVLA's architecture.
    """
    if isinstance(checkpoint, PublicFolder):
        return checkpoint
    path = _locate(checkpoint)
    public = read_public_config(path)
    files = {
        file.name: file.read_bytes()
        for file in sorted(path.iterdir())
        if file.is_file()
        and file.suffix not in _WEIGHTS
        and file.name not in (MANIFEST, INDEX_FILE)
        and file.stat().st_size <= COMPANION_BYTES
    }
    if TOKENIZER_FILE not in files:
        raise CheckpointError(f"{path} has no {TOKENIZER_FILE}; expected one beside {CONFIG_FILE}.")
    index = (path / INDEX_FILE).read_bytes() if (path / INDEX_FILE).is_file() else None
    return PublicFolder(path, public, read_extension(path), read_statistics(path, public.norm_stats), files, index)


def _locate(checkpoint: Path | str) -> Path:
    path = Path(checkpoint).expanduser()
    if path.is_dir():
        return path.resolve()
    if isinstance(checkpoint, str) and HUB_ID.fullmatch(checkpoint):
        return downloaded(checkpoint)
    raise CheckpointError(f"{checkpoint} is neither a folder nor a hub id such as openvla/openvla-7b.")
