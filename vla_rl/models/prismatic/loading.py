"""Weights of a checkpoint into a network, with what an adapter adds: merged into the weights, or kept to be trained."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import msgspec
import torch
from torch import Tensor, nn

from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.config import AdapterUse, LoraConfig, PrismaticConfig
from vla_rl.models.prismatic.folder import PublicFolder
from vla_rl.models.prismatic.lora import ADAPTER, freeze_all_but_adapters, targets_of
from vla_rl.models.prismatic.public_config import inner_name
from vla_rl.models.prismatic.trunk import materialise
from vla_rl.models.prismatic.weights import NORM, load_weights, stored_dtype

ConfigT = TypeVar("ConfigT", bound=PrismaticConfig)


def with_adapter(
    config: ConfigT, folder: PublicFolder, use: AdapterUse, build: Callable[[ConfigT], nn.Module]
) -> ConfigT:
    """The configuration of a policy that keeps its checkpoint's adapter if it is to be trained; else as it is.

    Args:
        config: of the checkpoint, without its adapter.
        folder: of the checkpoint.
        use: what happens to the adapter.
        build: makes a network of the configuration.

    Raises: CheckpointError if there is none to be trained.
    """
    if use == "merge" or config.lora is not None:
        return config
    if folder.adapter is None:
        raise CheckpointError(
            f"{folder.path} has no adapter to train (adapter_use 'train'); name one (adapter), or begin new ones "
            "(lora_rank, or `adapted`)."
        )
    with torch.device("meta"):
        network = build(config)
    adapter = folder.adapter
    targets = targets_of(network, adapter.tensors().layers)
    return msgspec.structs.replace(config, lora=LoraConfig(rank=adapter.rank, alpha=adapter.alpha, targets=targets))


def load_folder(
    network: nn.Module,
    folder: PublicFolder,
    *,
    beside: Mapping[str, Tensor] = MappingProxyType({}),
    missing: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> None:
    """Fill a network that was built on the meta device.

    Args:
        network: with adapters, if the checkpoint's are to be kept.
        folder: of the checkpoint.
        beside: tensors of its parts, by public name.
        missing: beginnings of names that the checkpoint does not have; they stay as they are.
        without: beginnings of names of the adapter's layers that a part holds merged in already.
        dtype: of the parameters; None takes the files'.
        device: where the parameters go.

    Raises: CheckpointError.
    """
    adapters = {}
    wrapped = {name.replace(".base_layer.", "."): name for name in network.state_dict() if ".base_layer." in name}
    if folder.adapter is not None:
        held = folder.adapter.tensors()
        dtype_beside = dtype or stored_dtype(folder.path, NORM)
        beside = {**beside, **held.whole}
        adapters = {layer: adapter for layer, adapter in held.layers.items() if not layer.startswith(without)}
        if wrapped:
            for layer, adapter in adapters.items():
                halves = {"A": adapter.down, "B": adapter.up}
                beside |= {f"{layer}.lora_{half}.{ADAPTER}.weight": x.to(dtype_beside) for half, x in halves.items()}
            adapters = {}
    load_weights(
        network,
        folder.path,
        inner_name=(lambda name: wrapped.get(inner_name(name), inner_name(name))) if wrapped else inner_name,
        beside=beside,
        adapters=adapters,
        missing=missing,
        dtype=dtype,
        device=device,
    )
    materialise(network, device)
    if wrapped:
        freeze_all_but_adapters(network)
