"""Low-rank adapters on a policy network (Hu et al. 2021, arXiv:2106.09685), by peft, and merging them.

    W' = W + alpha / rank * B A         A: gaussian, B: zero, so that nothing changes at first

`LoraConfig.targets` says which layers have an adapter. Heads and proprio projectors beside the trunk are trained whole;
everything else is frozen.
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
"""Modules that are new in a fine-tuning and have no weights to stay near to."""


def add_adapters(network: nn.Module, config: LoraConfig) -> None:
    """Put adapters into `network`, freeze what they stand on, and leave the modules beside the trunk trainable."""
    from peft import LoraConfig as PeftLoraConfig  # takes seconds to import: only where there are adapters
    from peft import inject_adapter_in_model

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
    """Let adapters and the modules beside the trunk be trained, and nothing else."""
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(".lora_" in name or name.startswith(TRAINED_WHOLE))


def adapted_layers(network: nn.Module, targets: LoraTargets) -> list[str]:
    """Names of the layers of a network without adapters that `targets` means.

    Raises: ConfigError if it lists a layer that the network does not have.
    """
    layers = {name: module for name, module in network.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    if not isinstance(targets, str):
        missing = sorted(set(targets) - layers.keys())
        if missing:
            raise ConfigError(
                f"lora.targets names {missing[0]}, which is no linear layer or convolution of this policy"
            )
        return list(targets)
    old = {name: module for name, module in layers.items() if not name.startswith(TRAINED_WHOLE)}
    if targets == "all-linear":
        return list(old)
    return [name for name, module in old.items() if isinstance(module, nn.Linear) and name != OUTPUT_HEAD]


def targets_of(network: nn.Module, layers: Collection[str]) -> LoraTargets:
    """Describe a set of layers of a network without adapters, by a set's name if it has one."""
    if set(layers) == set(adapted_layers(network, "hidden")):
        return "hidden"
    if set(layers) == set(adapted_layers(network, "all-linear")):
        return "all-linear"
    return tuple(sorted(layers))


NetworkT = TypeVar("NetworkT", bound=nn.Module)


def with_weights(build: Callable[[], NetworkT], tensors: Mapping[str, Tensor], seed: int) -> NetworkT:
    """A network like another one but for its adapters, with copies of the weights that both have.

    Args:
        build: makes it.
        tensors: the other one's state; its names have no adapters where the new one's have, or the other way round.
        seed: of the new adapters.
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
    """[rank, in], or [rank, in, height, width] of a convolution."""

    up: Tensor
    """[out, rank], or [out, rank, 1, 1]."""

    scale: float

    @property
    def weight_shape(self) -> list[int]:
        """Shape of the weights that it can be added to."""
        return [self.up.shape[0], *self.down.shape[1:]]

    def merged(self, weight: Tensor) -> Tensor:
        """The weight with the adapter in it: added in float32, rounded to the weight's dtype."""
        with torch.no_grad():
            down, up = (half.to(weight.device, torch.float32).flatten(1) for half in (self.down, self.up))
            return (weight.float() + (self.scale * (up @ down)).view_as(weight)).to(weight.dtype)


def adapter_of(layer: nn.Module) -> Adapter | None:
    """The adapter that stands on a layer, if any."""
    wrapped: Any = layer
    if not hasattr(wrapped, "lora_A"):
        return None
    return Adapter(wrapped.lora_A[ADAPTER].weight, wrapped.lora_B[ADAPTER].weight, wrapped.scaling[ADAPTER])


def merged_tensors(network: nn.Module) -> dict[str, Tensor]:
    """The state of the same network without adapters: float32 products added, then cast back to the weight's dtype."""
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
        merged[f"{owner}.{leaf}"] = adapter.merged(tensor) if adapter is not None and leaf == "weight" else tensor
    return merged
