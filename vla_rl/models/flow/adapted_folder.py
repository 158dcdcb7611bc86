"""Adapters of a flow policy that reinforcement learning trains, and folders with them.

    names of the folder's layout   weights, which are frozen
    lora/<layer>.lora_{A,B}        adapters (Hu et al. 2021, arXiv:2106.09685), in the same file
    vla_rl_lora.json               rank and scale

Adapters are kept beside the weights and not merged: a run that goes on has to have the very numbers. For the
project that a folder came from, they are merged (`merge_flow`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
from torch import Tensor, nn

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.families import find_family
from vla_rl.models.flow.config import FlowSampling
from vla_rl.models.flow.network import FlowLayout
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.trained_parts import (
    PROJECTIONS,
    has_adapters,
    inject_adapters,
    merge_adapters,
)
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.models.prismatic.weights import check_names
from vla_rl.models.small_files import save_folder
from vla_rl.models.tensor_reading import tensor_files
from vla_rl.models.weight_files import read_weights
from vla_rl.types import Config, PositiveInt
from vla_rl.util.atomic_files import MANIFEST
from vla_rl.util.ownership import OwnedFolder

ADAPTERS: Final = "lora/"
"""Beginning of the names of adapters in a folder."""

LORA_FILE: Final = "vla_rl_lora.json"
ROOM_PREFIX: Final = "vla_rl-adapted-"

FIRST_HALF: Final = ".lora_A.default.weight"


class LoraFile(Config, frozen=True, kw_only=True):
    """Contents of `vla_rl_lora.json`."""

    rank: PositiveInt
    """Inner width of each adapter."""

    alpha: PositiveInt
    """Its product is multiplied by alpha / rank."""


@dataclass(frozen=True)
class AdaptedLayout:
    """A layout with adapters beside its tensors. It is a `FlowLayout`.

    Attributes:
        inner: the layout of the weights.
        file: rank and scale.
    """

    inner: FlowLayout
    file: LoraFile

    def write_tensors(self, network: nn.Module) -> dict[str, Tensor]:
        """Return weights and adapters by name; views, not copies."""
        return self.inner.write_tensors(_Unadapted(network)) | _list_adapters(network)

    def read_tensors(self, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into a network with the same adapters.

        Raises: CheckpointError listing missing, unknown and misshapen names.
        """
        own = _list_adapters(network)
        given = {name: each for name, each in tensors.items() if name.startswith(ADAPTERS)}
        check_names(own, given)
        self.inner.read_tensors(
            _Unadapted(network), {name: each for name, each in tensors.items() if name not in given}
        )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(given[name])

    def list_files(self, sampling: FlowSampling) -> Mapping[str, bytes]:
        """Return the small files of the weights, and that of the adapters."""
        text = msgspec.json.format(msgspec.json.encode(self.file), indent=1)
        return {**self.inner.list_files(sampling), LORA_FILE: text}


class _Unadapted(nn.Module):
    """A network's weights under the names that they have without adapters."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._network = network

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        tensors = self._network.state_dict()
        return {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in tensors.items()
            if ".lora_" not in name
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        own = self.state_dict()
        with torch.no_grad():
            for name, tensor in state_dict.items():
                own[name].copy_(tensor)


def adapt_flow(policy: FlowPolicy, lora: LoraConfig, seed: int) -> FlowPolicy:
    """Return a policy on the same network with new adapters, which are trained instead of the weights; at first
    it acts as before.

    Every linear layer that is trained gets one; projections of state, action and time that are
    trained stay so. Adapters that it has are merged first.

    Raises: ConfigError if nothing is trained, or layers are chosen by name.
    """
    if lora.targets != "hidden":
        raise ConfigError(
            f"lora_targets is {lora.targets!r}, expected 'hidden' for a flow policy, whose trained linear "
            "layers all get an adapter; choose the part with train"
        )
    policy = merge_flow(policy) if has_adapters(policy.network) else policy
    network = policy.network
    layers = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear)
        and module.weight.requires_grad
        and not name.startswith(PROJECTIONS)
    ]
    if not layers:
        raise ConfigError(
            "no linear layer of the policy is trained, expected some that get adapters"
        )
    trained = {
        name
        for name, parameter in network.named_parameters()
        if parameter.requires_grad and name.startswith(PROJECTIONS)
    }
    inject_adapters(network, layers, lora, seed)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(".lora_" in name or name in trained)
    return policy.with_layout(
        AdaptedLayout(policy.layout, LoraFile(rank=lora.rank, alpha=lora.alpha))
    )


def merge_flow(policy: FlowPolicy) -> FlowPolicy:
    """Return a copy of a policy with its adapters merged into the weights, for software without adapters."""
    merged = policy.copy()
    merge_adapters(merged.network)
    layout = merged.layout
    return merged.with_layout(layout.inner) if isinstance(layout, AdaptedLayout) else merged


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
    own = _list_adapters(base.network)
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


def _list_adapters(network: nn.Module) -> dict[str, Tensor]:
    return {
        ADAPTERS + name: tensor for name, tensor in network.state_dict().items() if ".lora_" in name
    }
