"""Low-rank adapters on a policy network (Hu et al. 2021, arXiv:2106.09685), by peft, and merging them.

    W' = W + alpha / rank * B A         A: gaussian, B: zero, so that nothing changes at first

Adapters stand on every linear layer of towers, projector and trunk but the output head, of which only the action rows are
ever computed; heads and proprio projectors beside the trunk are trained whole. Everything else is frozen.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from vla_rl.models import torchvision_ops  # noqa: F401  # has to come before peft

# isort: split
import torch
from torch import Tensor, nn

from vla_rl.models.prismatic.config import LoraConfig

ADAPTER: Final = "default"

TRAINED_WHOLE: Final = ("action_head.", "proprio_projector.", "noisy_action_projector.", "film.")
"""Modules that are new in a fine-tuning and have no weights to stay near to."""


def add_adapters(network: nn.Module, config: LoraConfig) -> None:
    """Put adapters into `network`, freeze what they stand on, and leave the modules beside the trunk trainable."""
    from peft import LoraConfig as PeftLoraConfig  # takes seconds to import: only where there are adapters
    from peft import inject_adapter_in_model

    targets = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(TRAINED_WHOLE) and not name.endswith("lm_head")
    ]
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        init_lora_weights="gaussian",
        target_modules=targets,
    )
    inject_adapter_in_model(peft_config, network, ADAPTER)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(".lora_" in name or name.startswith(TRAINED_WHOLE))


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


def merged_tensors(network: nn.Module) -> dict[str, Tensor]:
    """The state of the same network without adapters: float32 products added, then cast back to the weight's dtype."""
    merged: dict[str, Tensor] = {}
    layers: dict[str, Any] = dict(network.named_modules())
    for name, tensor in network.state_dict().items():
        if ".lora_" in name:
            continue
        owner, base, leaf = name.rpartition(".base_layer.")
        if not base:
            merged[name] = tensor
            continue
        layer = layers[owner]
        if leaf == "weight":
            down, up = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            with torch.no_grad():
                change = layer.scaling[ADAPTER] * (up.float() @ down.float())
                tensor = (tensor.float() + change).to(tensor.dtype)
        merged[f"{owner}.{leaf}"] = tensor
    return merged
