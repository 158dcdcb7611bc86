"""Loads folders of flow policies with adapters beside the weights.

names of the folder's layout   weights, which are frozen
lora/<layer>.lora_{A,B}        adapters (Hu et al. 2021, arXiv:2106.09685), in the same file
vla_rl_lora.json               rank and scale
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor, nn

from vla_rl.errors import CheckpointError
from vla_rl.models.families import find_family
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.trained_parts import (
    ADAPTERS,
    LORA_FILE,
    PROJECTIONS,
    AdaptedLayout,
    LoraFile,
    inject_adapters,
    list_adapters,
)
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.models.small_files import save_folder
from vla_rl.models.tensor_reading import tensor_files
from vla_rl.models.weight_files import check_names, read_weights
from vla_rl.util.atomic_files import MANIFEST
from vla_rl.util.ownership import OwnedFolder

ROOM_PREFIX: Final = "vla_rl-adapted-"

FIRST_HALF: Final = ".lora_A.default.weight"


def load_adapted_flow(folder: Path, format: CheckpointFormat, device: torch.device) -> FlowPolicy:
    """Load a folder with adapters; they are trained, as they were.

    Raises: CheckpointError naming what is missing, unknown or damaged.
    """
    try:
        file = msgspec.json.decode((folder / LORA_FILE).read_bytes(), type=LoraFile)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{folder} has adapters ({ADAPTERS}...), but {LORA_FILE} cannot be read: {error}; copy the "
            "whole folder."
        ) from error
    tensors = read_weights(folder)
    adapters = {name: each for name, each in tensors.items() if name.startswith(ADAPTERS)}
    base = _load_base(
        folder,
        {name: each for name, each in tensors.items() if name not in adapters},
        format,
        device,
    )
    halves = [name for name in adapters if name.endswith(FIRST_HALF)]
    layers = [name.removeprefix(ADAPTERS).removesuffix(FIRST_HALF) for name in halves]
    known = {name for name, each in base.network.named_modules() if isinstance(each, nn.Linear)}
    if not known.issuperset(layers):
        raise CheckpointError(
            f"{folder} has an adapter of {sorted(set(layers) - known)[0]}, which is no linear layer of its "
            "policy."
        )
    inject_adapters(base.network, layers, LoraConfig(rank=file.rank, alpha=file.alpha), seed=0)
    for name, parameter in base.network.named_parameters():
        parameter.requires_grad_(".lora_" in name or name.startswith(PROJECTIONS))
    own = list_adapters(base.network)
    check_names(own, adapters)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(adapters[name])
    return base.with_layout(AdaptedLayout(base.layout, file))


def _load_base(
    folder: Path, tensors: Mapping[str, Tensor], format: CheckpointFormat, device: torch.device
) -> FlowPolicy:
    """Load the weights alone, as the family reads them that they belong to."""
    room = OwnedFolder(ROOM_PREFIX)
    try:
        plain = room.path / "policy"
        # all of them: LeRobot's statistics are files of tensors too
        others = {LORA_FILE, MANIFEST, *tensor_files(folder).values()}
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and str(path.relative_to(folder)) not in others
        }
        save_folder(plain, tensors, files)
        family = find_family(plain)
        policy = family and family.load_policy(plain, format, device)
    finally:
        room.remove_folder()
    if not isinstance(policy, FlowPolicy):
        raise CheckpointError(f"{folder} has adapters of a flow policy, but not its weights.")
    return policy
