"""Load a checkpoint's weights into a network.

Its adapter is merged into the weights, or kept for training.
"""

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
from vla_rl.models.prismatic.weights import NORM, load_weights
from vla_rl.models.weight_files import stored_dtype

ConfigT = TypeVar("ConfigT", bound=PrismaticConfig)


def with_adapter(
    config: ConfigT, folder: PublicFolder, use: AdapterUse, build: Callable[[ConfigT], nn.Module]
) -> ConfigT:
    """Return the configuration with the checkpoint's adapter if it is to be trained; else
    unchanged.

    Args:
        config: the checkpoint's configuration, without its adapter.
        folder: the checkpoint.
        use: whether the adapter is merged or trained.
        build: builds a network from the configuration.

    Raises: CheckpointError if there is no adapter to train.
    """
    if use == "merge" or config.lora is not None:
        return config
    if folder.adapter is None:
        raise CheckpointError(
            f"{folder.path} has no adapter to train (adapter_use 'train'); name one (adapter), or "
            "add new ones "
            "(lora_rank, or `adapted`)."
        )
    with torch.device("meta"):
        network = build(config)
    adapter = folder.adapter
    targets = targets_of(network, adapter.tensors().layers)
    return msgspec.structs.replace(
        config, lora=LoraConfig(rank=adapter.rank, alpha=adapter.alpha, targets=targets)
    )


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
        network: the network, with adapters if the checkpoint's are to be kept.
        folder: the checkpoint.
        beside: tensors of its parts, by public name.
        missing: prefixes of names that the checkpoint does not have; those tensors are left
            unchanged.
        without: prefixes of the adapter's layers that a part already holds merged.
        dtype: data type of the parameters; None keeps the files'.
        device: device of the parameters.

    Raises: CheckpointError.
    """
    adapters = {}
    wrapped = {
        name.replace(".base_layer.", "."): name
        for name in network.state_dict()
        if ".base_layer." in name
    }
    if folder.adapter is not None:
        held = folder.adapter.tensors()
        dtype_beside = dtype or stored_dtype(folder.path, NORM)
        beside = {**beside, **held.whole}
        adapters = {
            layer: adapter
            for layer, adapter in held.layers.items()
            if not layer.startswith(without)
        }
        if wrapped:
            for layer, adapter in adapters.items():
                halves = {"A": adapter.down, "B": adapter.up}
                beside |= {
                    f"{layer}.lora_{half}.{ADAPTER}.weight": x.to(dtype_beside)
                    for half, x in halves.items()
                }
            adapters = {}
    load_weights(
        network,
        folder.path,
        inner_name=(lambda name: wrapped.get(inner_name(name), inner_name(name)))
        if wrapped
        else inner_name,
        beside=beside,
        adapters=adapters,
        missing=missing,
        dtype=dtype,
        device=device,
    )
    materialise(network, device)
    if wrapped:
        freeze_all_but_adapters(network)
