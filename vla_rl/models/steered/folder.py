"""Folders of steered policies: the head, and which base it belongs to.

config.json          settings and sizes of the head, where its base is, the base's digest
model.safetensors    the head's parameters

The base is loaded from its own folder and compared by its digest, so a head is never put over another base:
its features would mean something else, and no number would tell.
"""

from pathlib import Path
from typing import Any

import msgspec
import torch

from vla_rl.errors import CheckpointError
from vla_rl.models.families import find_family
from vla_rl.models.loading import choose_device, load_policy
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.models.robot_policy import RobotPolicy
from vla_rl.models.small_files import companion_files
from vla_rl.models.steered.bases import FrozenBase, freeze_base
from vla_rl.models.steered.config import BaseSource
from vla_rl.models.steered.file import (
    MODEL_TYPE,
    SteeredFile,
    explain_missing_base,
    read_steered_file,
    require_base_source,
)
from vla_rl.models.steered.policy import SteeredPolicy
from vla_rl.models.tensor_reading import holds_weights, locate
from vla_rl.models.weight_files import read_weights


def load_base(
    path: str, format: CheckpointFormat, device: torch.device, has_feature_rows: bool = False
) -> FrozenBase[Any, Any, Any]:
    """Load and freeze a policy that heads can be put over.

    Args:
        path: folder or hub id.
        format: settings that its files leave out.
        device: device of its parameters.
        has_feature_rows: as `SteeringConfig.features` "rows".

    Raises: CheckpointError if there is no such policy, or it is itself a head; ConfigError for a family that
    cannot be a base.
    """
    found = locate(path)
    if holds_weights(found):
        family = find_family(found)
        if family is not None and MODEL_TYPE in family.config_types:
            raise CheckpointError(
                f"{path} holds a head over a frozen base, expected a policy that can be the base itself; give the "
                "folder of the base that it names"
            )
    # without what a recipe's format has beyond a checkpoint's: it is written beside the head
    plain = CheckpointFormat(
        **{name: getattr(format, name) for name in CheckpointFormat.__struct_fields__}
    )
    plain = msgspec.structs.replace(plain, base_policy=None)
    policy = load_policy(path, plain, "cuda" if device.type == "cuda" else "cpu")
    stored = str(found.resolve()) if found.is_dir() else path
    return freeze_base(policy, has_feature_rows, BaseSource(path=stored, format=plain))


def load_steered(
    folder: Path,
    base: str | RobotPolicy | FrozenBase[Any, Any, Any] | None = None,
    device: torch.device | None = None,
) -> SteeredPolicy:
    """Read a folder that `SteeredPolicy.save` wrote.

    Args:
        folder: the head.
        base: folder or hub id of its base, or the base itself; None: where the folder says.
        device: device of both; None: the CPU.

    Raises: CheckpointError naming what is missing, unknown or damaged, or if the base is another one.
    """
    file = read_steered_file(folder)
    try:
        tensors, files = read_weights(folder), companion_files(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the head {folder} cannot be read: {error}; choose another one."
        ) from error
    device = device or choose_device("cpu")
    frozen = _open_base(folder, file, base, device)
    if frozen.digest != file.base_digest:
        raise CheckpointError(
            f"{folder} is a head over the base {file.base_digest[:12]}, but {_name_given(base, file)} is "
            f"{frozen.digest[:12]}: its weights, statistics or settings are others. Give the base that the "
            "head was trained over (--base-policy)."
        )
    policy = SteeredPolicy.create(frozen, file.steering, seed=0, files=files)
    if policy.network.sizes != file.sizes:
        raise CheckpointError(
            f"{folder} says that its head has {file.sizes}, but over its base it has {policy.network.sizes}; "
            "config.json was changed."
        )
    policy.load_checkpoint_tensors(tensors)
    policy.network.to(device)
    return policy


def load_steered_family(
    folder: Path, format: CheckpointFormat, device: torch.device
) -> SteeredPolicy:
    """Load a folder for `vla_rl.models.families`. Raises: as `load_steered`."""
    return load_steered(folder, format.base_policy, device)


def _open_base(
    folder: Path,
    file: SteeredFile,
    base: str | RobotPolicy | FrozenBase[Any, Any, Any] | None,
    device: torch.device,
) -> FrozenBase[Any, Any, Any]:
    has_rows = file.steering.features == "rows"
    if isinstance(base, FrozenBase):
        return base
    if base is not None and not isinstance(base, str):
        return freeze_base(base, has_rows, file.base)
    source = require_base_source(folder, file, base)
    try:
        return load_base(source.path, source.format, device, has_rows)
    except CheckpointError as error:
        raise explain_missing_base(folder, source, error) from error


def _name_given(base: object, file: SteeredFile) -> str:
    if isinstance(base, str):
        return base
    return "the given base" if base is not None or file.base is None else file.base.path
