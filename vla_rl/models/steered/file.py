"""Contents of a head's `config.json`: its settings and sizes, and which base it belongs to.

Importing this module does not import torch.
"""

from pathlib import Path
from typing import Final

import msgspec

from vla_rl.errors import CheckpointError
from vla_rl.models.families import CONFIG_FILE
from vla_rl.models.shipped import BASE_POLICY, PLACEHOLDER_BASE_POLICY, resolve_name
from vla_rl.models.steered.config import BaseSource, HeadSizes, SteeringConfig
from vla_rl.types import Config

MODEL_TYPE: Final = "vla_rl_steered"


class SteeredFile(Config, frozen=True, kw_only=True):
    """Contents of `config.json`."""

    steering: SteeringConfig
    """Settings of the head."""

    sizes: HeadSizes
    """Numbers that it reads and chooses."""

    base_digest: str
    """SHA-256 of the base, as `compute_base_digest` returns it."""

    base: BaseSource | None = None
    """Folder of the base; none if it was made in the process that saved the head."""

    model_type: str = MODEL_TYPE
    """Name of the format."""

    def __post_init__(self) -> None:
        self.require(self.model_type == MODEL_TYPE, "model_type", repr(MODEL_TYPE))

    def encode(self) -> bytes:
        """Return the file's text."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


def read_steered_file(folder: Path) -> SteeredFile:
    """Read `config.json` of a head's folder. Raises: CheckpointError."""
    try:
        return msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=SteeredFile)
    except (OSError, ValueError, RecursionError) as error:
        # ValueError: not JSON, or not text
        raise CheckpointError(
            f"{folder} is not a steered policy's checkpoint: {CONFIG_FILE} cannot be read: {error}; choose "
            "another one."
        ) from error


def require_base_source(folder: Path, file: SteeredFile, base_policy: str | None) -> BaseSource:
    """Return where the base is: the folder that is given, else the one that the head names.

    Of the policies that `shipped` may stand for, it is the one that the head was trained over.

    Raises: CheckpointError if neither is.
    """
    if base_policy is None and file.base is None:
        raise CheckpointError(
            f"{folder} does not say where its base is, because the base was made by a program and not loaded; "
            "give its folder (--base-policy)."
        )
    stored = file.base or BaseSource(path="")
    if base_policy is None:
        return stored
    # by the name of the folder, because that of another machine stands elsewhere; a wrong guess is refused by
    # the base's digest
    has_placeholders = Path(stored.path).name == PLACEHOLDER_BASE_POLICY.name
    shipped = PLACEHOLDER_BASE_POLICY if has_placeholders else BASE_POLICY
    return msgspec.structs.replace(stored, path=resolve_name(base_policy, shipped))


def explain_missing_base(
    folder: Path, source: BaseSource, error: CheckpointError
) -> CheckpointError:
    """Return an error that names the head whose base cannot be read, and the option that helps."""
    return CheckpointError(
        f"the base of the head {folder} cannot be loaded from {source.path}: {error} Give the folder where it "
        "is now (--base-policy)."
    )
