"""Checkpoints of the Hugging Face hub: fetched by their id, and read only as they were published.

The hub's client keeps a large file under its SHA-256 and links to it from the folder. What is read later is held against
that name, so that a damaged disk or a broken download is an error and not another policy.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vla_rl.errors import CheckpointError

HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


def downloaded(hub_id: str, *, without: Sequence[str] = ()) -> Path:
    """Return the local folder of a repository, which is fetched if it is not here yet.

    Args:
        hub_id: of the repository.
        without: patterns of files that are not fetched.

    Raises: CheckpointError if it is neither here nor to be had.
    """
    import huggingface_hub  # only if something is downloaded

    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            # Python files are never run here, but `config.json` names them for those who load what is saved
            allow_patterns=["*.json", "*.safetensors", "*.pt", "*.model", "*.py", "*adapter_model.bin"],
            ignore_patterns=list(without),
        )
    except Exception as error:  # the hub's client and its transport raise many kinds
        raise CheckpointError(f"{hub_id} is no folder here, and could not be taken from the hub: {error}") from error
    return Path(folder)


def verify_download(path: Path) -> None:
    """Check a file against the digest that it is kept under, where it is a link to one; no other file has any.

    Raises: CheckpointError where it is not what was published.
    """
    stored = path.resolve()
    if not path.is_symlink() or _SHA256.fullmatch(stored.name) is None:
        return
    with stored.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != stored.name:
        raise CheckpointError(
            f"{path} is not what was published (its SHA-256 is {digest}); remove {stored} and fetch it again."
        )
