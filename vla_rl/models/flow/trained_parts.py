"""Which parameters of a flow policy are trained: all, the expert alone, or adapters.

The prefix part reads images and prompt, the expert moves the actions. With adapters (LoRA, Hu et al.
2021, arXiv:2106.09685, by peft) every linear layer of the chosen part gets one; the small projections of
state, action and time are trained whole, because fine-tuning has to fit them to a robot.

What is tuned for another project has its adapters merged. A run of reinforcement learning keeps them beside
the weights, so that it goes on with the very numbers (`AdaptedLayout`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from vla_rl.errors import ConfigError
from vla_rl.models.flow.config import FlowSampling
from vla_rl.models.flow.network import FlowLayout
from vla_rl.models.prismatic.adapters import ADAPTER_NAME, get_adapter
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.models.weight_files import check_names
from vla_rl.types import Config, PositiveInt

TrainedPart: TypeAlias = Literal["all", "expert"]

PREFIX_PARTS: Final = (
    "paligemma_with_expert.paligemma.",
    "vlm_with_expert.vlm.",
    *("stem.", "patch_positions", "camera_names", "word_", "reader"),
)
"""Beginnings of the names of parameters that read images and prompt, in any of the networks."""

PROJECTIONS: Final = ("state_", "action_", "time_")
"""Beginnings of the names of the small layers between a robot and the network."""

ADAPTERS: Final = "lora/"
"""Beginning of the names of adapters in a folder."""

LORA_FILE: Final = "vla_rl_lora.json"


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
        # a run goes on with the adapters that the policy came with, and not with the weights below them
        keeps_adapters = freezes_prefix and has_adapters(network)
        for name, parameter in network.named_parameters():
            is_trained = is_chosen(name) and parameter not in prefix
            was_trained = parameter.requires_grad or not keeps_adapters
            parameter.requires_grad_(is_trained and was_trained)
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
        is_trained = any(each.requires_grad for each in wrapped.parameters())
        with torch.no_grad():
            base.weight.copy_(adapter.merged(base.weight))
        base.weight.requires_grad_(is_trained)
        owner, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(owner), leaf, base)
    # peft's note on the network, by which it would take new adapters for a second set
    vars(network).pop("peft_config", None)


def has_adapters(network: nn.Module) -> bool:
    """Return whether any layer has an adapter."""
    return any(get_adapter(module) is not None for module in network.modules())


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
        return self.inner.write_tensors(_Unadapted(network)) | list_adapters(network)

    def read_tensors(self, network: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into a network with the same adapters.

        Raises: CheckpointError listing missing, unknown and misshapen names.
        """
        own = list_adapters(network)
        given = {name: each for name, each in tensors.items() if name.startswith(ADAPTERS)}
        check_names(own, given)
        self.inner.read_tensors(
            _Unadapted(network), {name: each for name, each in tensors.items() if name not in given}
        )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(given[name])

    def encode_files(self, sampling: FlowSampling) -> Mapping[str, bytes]:
        """Return the small files of the weights, and that of the adapters."""
        text = msgspec.json.format(msgspec.json.encode(self.file), indent=1)
        return {**self.inner.encode_files(sampling), LORA_FILE: text}


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


def adapt_trained_layers(
    network: nn.Module, layout: FlowLayout, lora: LoraConfig, seed: int
) -> AdaptedLayout:
    """Give every linear layer that is trained a new adapter, which is trained instead; return the layout then.

    Projections of state, action and time that are trained stay so. At first the network computes
    what it did.

    Raises: ConfigError if nothing is trained, or layers are chosen by name.
    """
    if lora.targets != "hidden":
        raise ConfigError(
            f"lora_targets is {lora.targets!r}, expected 'hidden' for a flow policy, whose trained linear "
            "layers all get an adapter; choose the part with train"
        )
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
    return AdaptedLayout(layout, LoraFile(rank=lora.rank, alpha=lora.alpha))


def without_adapters(layout: FlowLayout) -> FlowLayout:
    """Return the layout of the weights alone."""
    return layout.inner if isinstance(layout, AdaptedLayout) else layout


def list_adapters(network: nn.Module) -> dict[str, Tensor]:
    return {
        ADAPTERS + name: tensor for name, tensor in network.state_dict().items() if ".lora_" in name
    }
