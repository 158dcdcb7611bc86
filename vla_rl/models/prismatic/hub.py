"""Checkpoints of the Hugging Face hub: fetched by id, and verified against their published digests.

The hub's client stores a large file under its SHA-256 and links to it from the folder. Files are
checked against that name when they are read, so that a damaged disk or download raises an error
instead of loading wrong weights.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vla_rl.errors import CheckpointError

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


def downloaded(hub_id: str, *, without: Sequence[str] = ()) -> Path:
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


def verify_download(path: Path) -> None:
    """Check a file against its digest, if it is a link to a file named by its digest; other files
    are not checked.

    Raises: CheckpointError if it differs from what was published.
    """
    stored = path.resolve()
    if not path.is_symlink() or _SHA256.fullmatch(stored.name) is None:
        return
    with stored.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != stored.name:
        raise CheckpointError(
            f"{path} differs from what was published (its SHA-256 is {digest}); remove {stored} "
            "and fetch it again."
        )
