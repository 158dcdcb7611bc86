"""Which parameters of a flow policy are trained: all, the expert alone, or adapters.

The prefix part reads images and prompt, the expert moves the actions. With adapters (LoRA, Hu et al.
2021, arXiv:2106.09685, by peft) every linear layer of the chosen part gets one; the small projections of
state, action and time are trained whole, because fine-tuning has to fit them to a robot.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn

from vla_rl.models.prismatic.adapters import ADAPTER_NAME, get_adapter
from vla_rl.models.prismatic.config import LoraConfig

TrainedPart: TypeAlias = Literal["all", "expert"]

PREFIX_PARTS: Final = (
    "paligemma_with_expert.paligemma.",
    "vlm_with_expert.vlm.",
    *("stem.", "patch_positions", "camera_names", "word_", "reader"),
)
"""Beginnings of the names of parameters that read images and prompt, in any of the networks."""

PROJECTIONS: Final = ("state_", "action_", "time_")
"""Beginnings of the names of the small layers between a robot and the network."""


def choose_trained(
    network: nn.Module,
    part: TrainedPart,
    lora: LoraConfig | None,
    seed: int,
    *,
    freezes_prefix: bool = False,
) -> None:
    """Let gradients reach the chosen parameters alone; add adapters if they are to be trained.

    Args:
        network: changed in place.
        part: all, or what does not read images and prompt.
        lora: rank and scale of adapters; None trains the weights themselves.
        seed: seed of the adapters.
        freezes_prefix: with the expert alone, freeze the projection of the state too if the state is a
            token of the prefix. Fine-tuning fits it to a robot; afterwards a frozen prefix is computed
            once for all epochs, and no gradient passes through it.
    """

    def is_chosen(name: str) -> bool:
        return part == "all" or not name.startswith(PREFIX_PARTS)

    prefix: set[nn.Parameter] = set()
    if part == "expert" and freezes_prefix:
        flow: Any = network
        prefix = set(flow.prefix_parameters())
    if lora is None:
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(is_chosen(name) and parameter not in prefix)
        return
    targets = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and is_chosen(name) and not name.startswith(PROJECTIONS)
    ]
    inject_adapters(network, targets, lora, seed)
    for name, parameter in network.named_parameters():
        is_trained = ".lora_" in name or name.startswith(PROJECTIONS)
        parameter.requires_grad_(is_trained and parameter not in prefix)


def inject_adapters(network: nn.Module, layers: Sequence[str], lora: LoraConfig, seed: int) -> None:
    """Give linear layers new adapters, in place; at first they change nothing.

    Args:
        network: changed in place.
        layers: full names.
        lora: rank and scale.
        seed: seed of the adapters.
    """
    # takes seconds to import, so only if there are adapters
    from peft import LoraConfig as PeftLoraConfig, inject_adapter_in_model

    config = PeftLoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        # without dropout: acting and learning have to compute the same
        lora_dropout=0.0,
        init_lora_weights="gaussian",
        target_modules=list(layers),
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, network, ADAPTER_NAME)


def merge_adapters(network: nn.Module) -> None:
    """Add adapters to their weights and take them out, in place; the names are the old ones again."""
    for name, module in list(network.named_modules()):
        adapter = get_adapter(module)
        if adapter is None:
            continue
        wrapped: Any = module
        base: nn.Linear = wrapped.base_layer
        with torch.no_grad():
            base.weight.copy_(adapter.merged(base.weight))
        owner, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(owner), leaf, base)
    # peft's note on the network, by which it would take new adapters for a second set
    vars(network).pop("peft_config", None)


def has_adapters(network: nn.Module) -> bool:
    """Return whether any layer has an adapter."""
    return any(get_adapter(module) is not None for module in network.modules())
