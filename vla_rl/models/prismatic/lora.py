"""Low-rank adapters on a policy network (Hu et al. 2021, arXiv:2106.09685), by peft, and merging
them.

    W' = W + alpha / rank * B A         A: gaussian, B: zero, so that nothing changes at first

`LoraConfig.targets` selects the layers that get an adapter. Heads and proprio projectors beside the
trunk are trained in full; all else is frozen.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vla_rl.errors import ConfigError
from vla_rl.models.prismatic.config import LoraConfig, LoraTargets

ADAPTER: Final = "default"

OUTPUT_HEAD: Final = "language_model.lm_head"

TRAINED_WHOLE: Final = ("action_head.", "proprio_projector.", "noisy_action_projector.", "film.")
"""Modules that are trained in full: fine-tuning adds them, so they have no pretrained weights to
stay near."""


def add_adapters(network: nn.Module, config: LoraConfig) -> None:
    """Add adapters to `network`, freeze their layers, and leave the modules beside the trunk
    trainable.
    """
    # takes seconds to import, so only if there are adapters
    from peft import LoraConfig as PeftLoraConfig, inject_adapter_in_model

    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        init_lora_weights="gaussian",
        target_modules=adapted_layers(network, config.targets),
    )
    inject_adapter_in_model(peft_config, network, ADAPTER)
    freeze_all_but_adapters(network)


def freeze_all_but_adapters(network: nn.Module) -> None:
    """Make adapters and the modules beside the trunk trainable, and freeze all else."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(".lora_" in name or name.startswith(TRAINED_WHOLE))


def adapted_layers(network: nn.Module, targets: LoraTargets) -> list[str]:
    """Return the names of the layers that `targets` selects in a network without adapters.

    Raises: ConfigError if it lists a layer that the network does not have.
    """
    layers = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }
    if not isinstance(targets, str):
        missing = sorted(set(targets) - layers.keys())
        if missing:
            raise ConfigError(
                f"lora.targets names {missing[0]}, which is not a linear layer or convolution of "
                "this policy"
            )
        return list(targets)
    old = {name: module for name, module in layers.items() if not name.startswith(TRAINED_WHOLE)}
    if targets == "all-linear":
        return list(old)
    return [
        name
        for name, module in old.items()
        if isinstance(module, nn.Linear) and name != OUTPUT_HEAD
    ]


def targets_of(network: nn.Module, layers: Collection[str]) -> LoraTargets:
    """Describe a set of layers of a network without adapters, by a named set if one matches."""
    if set(layers) == set(adapted_layers(network, "hidden")):
        return "hidden"
    if set(layers) == set(adapted_layers(network, "all-linear")):
        return "all-linear"
    return tuple(sorted(layers))


NetworkT = TypeVar("NetworkT", bound=nn.Module)


def with_weights(
    build: Callable[[], NetworkT], tensors: Mapping[str, Tensor], seed: int
) -> NetworkT:
    """Build a network that differs from another one in its adapters only, with copies of the
    weights that both have.

    Args:
        build: builds the new network.
        tensors: the other network's state, with adapters on other layers than the new one, or on
            none.
        seed: seed of the new adapters.
    """
    first = next(iter(tensors.values()))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build().to(device=first.device, dtype=first.dtype)
    own = network.state_dict()
    for name, tensor in own.items():
        plain = name.replace(".base_layer.", ".")
        if name in tensors or plain in tensors:
            tensor.copy_(tensors.get(name, tensors.get(plain, tensor)))
    return network


class Adapter(NamedTuple):
    """A product that is added to one layer's weight: scale * up @ down."""

    down: Tensor
    """[rank, in]; for a convolution [rank, in, height, width]."""

    up: Tensor
    """[out, rank]; for a convolution [out, rank, 1, 1]."""

    scale: float

    @property
    def weight_shape(self) -> list[int]:
        """Shape of the weights that it can be added to."""
        return [self.up.shape[0], *self.down.shape[1:]]

    def merged(self, weight: Tensor) -> Tensor:
        """Return the weight plus the adapter: added in float32, rounded to the weight's dtype."""
        with torch.no_grad():
            down, up = (
                half.to(weight.device, torch.float32).flatten(1) for half in (self.down, self.up)
            )
            return (weight.float() + (self.scale * (up @ down)).view_as(weight)).to(weight.dtype)


def adapter_of(layer: nn.Module) -> Adapter | None:
    """Return a layer's adapter, if any."""
    wrapped: Any = layer
    if not hasattr(wrapped, "lora_A"):
        return None
    return Adapter(
        wrapped.lora_A[ADAPTER].weight, wrapped.lora_B[ADAPTER].weight, wrapped.scaling[ADAPTER]
    )


def merged_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the state of the same network without adapters: added in float32, then cast to the
    weight's dtype.
    """
    merged: dict[str, Tensor] = {}
    layers = dict(network.named_modules())
    for name, tensor in network.state_dict().items():
        if ".lora_" in name:
            continue
        owner, base, leaf = name.rpartition(".base_layer.")
        if not base:
            merged[name] = tensor
            continue
        adapter = adapter_of(layers[owner])
        merged[f"{owner}.{leaf}"] = (
            adapter.merged(tensor) if adapter is not None and leaf == "weight" else tensor
        )
    return merged
