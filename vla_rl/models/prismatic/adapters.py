"""Low-rank adapters of a policy network (Hu et al. 2021, arXiv:2106.09685), by peft.

    W' = W + alpha / rank * B A         A: gaussian, B: zero, so that nothing changes at first

`LoraConfig.targets` selects the layers that get an adapter. Heads and proprio projectors beside the
trunk are trained in full; all else is frozen. Adapters that peft saved are read without executing
any of their code:

    adapter_config.json           rank, alpha, and the checkpoint that the adapter was trained on
    adapter_model.safetensors     base_model.model.<layer>.lora_{A,B}.weight; if the output head is adapted,
    (or adapter_model.bin)        a copy of its own weight, too

They are stored in a separate folder, or in `lora_adapter/` of a folder that OpenVLA-OFT's training
wrote.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.prismatic.config import LoraConfig, LoraTargets
from vla_rl.models.tensor_reading import load_part, read_tensors, verify_download
from vla_rl.models.weight_files import ADAPTER_CONFIG, require_same_tensors
from vla_rl.util.arrays import require_finite
from vla_rl.util.values import compare_sources, excerpt

ADAPTER_NAME: Final = "default"

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

    # Without dropout: the log-probs that acting reports have to be those that learning computes.
    peft_config = PeftLoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        init_lora_weights="gaussian",
        target_modules=adapted_layers(network, config.targets),
    )
    inject_adapter_in_model(peft_config, network, ADAPTER_NAME)
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


def describe_targets(network: nn.Module, layers: Collection[str]) -> LoraTargets:
    """Describe a set of layers of a network without adapters, by a named set if one matches."""
    if set(layers) == set(adapted_layers(network, "hidden")):
        return "hidden"
    if set(layers) == set(adapted_layers(network, "all-linear")):
        return "all-linear"
    return tuple(sorted(layers))


NetworkT = TypeVar("NetworkT", bound=nn.Module)


def build_with_weights(
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
    # Device and dtype follow the old weights, which may be in bfloat16 on a GPU.
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
    """A product that is added to one layer's weight: scale * up @ down.

    Example:
        Adapter(down=[32, 4096], up=[4096, 32], scale=0.5)  # rank 32, alpha 16
    """

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
            # In float32: a product in bfloat16 would round the adapter away where it is small
            # beside the weight.
            return (weight.float() + (self.scale * (up @ down)).view_as(weight)).to(weight.dtype)


def get_adapter(layer: nn.Module) -> Adapter | None:
    """Return a layer's adapter, if any."""
    wrapped: Any = layer
    if not hasattr(wrapped, "lora_A"):
        return None
    return Adapter(
        wrapped.lora_A[ADAPTER_NAME].weight,
        wrapped.lora_B[ADAPTER_NAME].weight,
        wrapped.scaling[ADAPTER_NAME],
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
        adapter = get_adapter(layers[owner])
        merged[f"{owner}.{leaf}"] = (
            adapter.merged(tensor) if adapter is not None and leaf == "weight" else tensor
        )
    return merged


ADAPTER_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")
LORA_FOLDER: Final = "lora_adapter"

PEFT_PREFIX: Final = "base_model.model."
"""Prefix of all names in peft's files; the rest is the name in the model that it wrapped."""

MAY_DIFFER: Final = frozenset({
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "peft_version", "r", "revision",
    "target_modules", "task_type",
})  # fmt: skip
"""Fields that an adapter may set to anything: how it was trained, for which layers and on what. The
tensors show the layers."""

HARMLESS_INITS: Final = ("eva", "gaussian", "mica", "orthogonal")
"""Values of `init_lora_weights`, besides true and false, that leave the base as it was. PiSSA, OLoRA,
CorDA, LoftQ and LoRA-GA change the base when training begins, so that their adapters belong to
another base than the one that is named."""

PEFT_DEFAULTS: Final[Mapping[str, Any]] = {
    "bias": "none", "megatron_core": "megatron.core", "peft_type": "LORA", "qalora_group_size": 16,
}  # fmt: skip
"""Defaults of peft that are neither null, false nor empty. Every other field has to be one of those:
it changes what an adapter computes, or is newer than this list."""

_ADAPTER_TENSOR = re.compile(r"(.+)\.lora_([AB])(?:\.([^.]+))?\.weight")


class _PeftConfig(msgspec.Struct, kw_only=True):
    """Fields of `adapter_config.json` that are read."""

    peft_type: str
    r: int
    lora_alpha: int
    bias: str = "none"
    base_model_name_or_path: str | None = None


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter on disk, read except for its tensors.

    Example:
        PeftAdapter(path=Path("adapters/goal"), rank=32, alpha=16, base="openvla/openvla-7b")
    """

    path: Path
    """Folder of its configuration and tensors."""

    rank: int
    alpha: int

    base: str | None
    """Checkpoint that it was trained on: a hub id, or a folder on the machine of its training."""

    @property
    def file(self) -> Path:
        """The file of its tensors. Raises: CheckpointError if there is none."""
        found = [self.path / name for name in ADAPTER_FILES if (self.path / name).is_file()]
        if not found:
            raise CheckpointError(
                f"{self.path} has {ADAPTER_CONFIG}, but no {' or '.join(ADAPTER_FILES)} beside it."
            )
        if len(found) > 1:
            require_same_tensors(
                found[0], found[1], "move the file away that is not of the adapter"
            )
        return found[0]

    def read_tensors(self) -> "AdapterTensors":
        """Read the tensors.

        Raises: CheckpointError if the file is damaged, or does not hold a plain adapter.
        """
        file = self.file
        verify_download(file)
        found = load_part(file) if file.suffix == ".bin" else read_tensors(file)
        require_finite(found, file)
        # Names of another model, such as an encoder's adapter, are refused before any is merged.
        strange = next((name for name in sorted(found) if not name.startswith(PEFT_PREFIX)), None)
        if strange is not None:
            raise CheckpointError(
                f"{file} holds {strange}; expected names that begin with {PEFT_PREFIX}"
            )
        tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in found.items()}
        layers = collect_adapters(tensors, file, lambda rank: self.alpha / rank)
        if any(adapter.down.shape[0] != self.rank for adapter in layers.values()) or not layers:
            raise CheckpointError(
                f"{file} has {len(layers)} adapters, expected some, all of rank {self.rank}."
            )
        whole = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in tensors.items()
            if ".lora_" not in name
        }
        return AdapterTensors(layers, whole)


@dataclass(frozen=True)
class AdapterTensors:
    """Tensors of an adapter's file."""

    layers: Mapping[str, Adapter]
    """Adapters by the public name of their layer."""

    whole: Mapping[str, Tensor]
    """Weights that were saved beside them, by public name. They replace the checkpoint's, as in
    peft."""


def find_adapter(folder: Path) -> PeftAdapter | None:
    """Return the adapter in `folder` or in its `lora_adapter/`, if any.

    Raises: CheckpointError if it is of another kind, or if there are two that differ.
    """
    paths = (folder / ADAPTER_CONFIG, folder / LORA_FOLDER / ADAPTER_CONFIG)
    found = [_read_peft_config(path) for path in paths if path.is_file()]
    if len(found) == 2:
        own, inner = found
        remedy = "move the adapter away that you do not want"
        compare_sources(
            f"the adapter of {folder}",
            (f"its own {ADAPTER_CONFIG}", (own.rank, own.alpha, own.base)),
            (f"{LORA_FOLDER}/{ADAPTER_CONFIG}", (inner.rank, inner.alpha, inner.base)),
            remedy=remedy,
        )
        require_same_tensors(own.file, inner.file, remedy)
    return found[0] if found else None


def _read_peft_config(path: Path) -> PeftAdapter:
    try:
        fields: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        config = msgspec.convert(fields, _PeftConfig)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as the configuration of an adapter: {error}"
        ) from error
    # A list of what may differ, not of what is refused: a kind of adapter that a later peft adds
    # is an error by its name instead of a wrong policy.
    others = [name for name, value in fields.items() if not _is_harmless(name, value)]
    if others:
        listed = ", ".join(f"{name} {excerpt(fields[name])}" for name in others)
        raise CheckpointError(
            f"{path} has {listed}; expected plain LoRA adapters of one rank and alpha, without "
            "biases, that were trained on their base as it is. Merge the adapter with peft "
            "(merge_and_unload) and load the merged checkpoint."
        )
    return PeftAdapter(path.parent, config.r, config.lora_alpha, config.base_model_name_or_path)


def _is_harmless(name: str, value: Any) -> bool:
    """Return whether a field of a configuration leaves an adapter as it is read here."""
    if name == "init_lora_weights" and isinstance(value, str):
        return value.lower() in HARMLESS_INITS
    if name == "eva_config":  # settings of an initialisation; new ranks are in rank_pattern
        return True
    return name in MAY_DIFFER or not value or value == PEFT_DEFAULTS.get(name)


def collect_adapters(
    tensors: Mapping[str, Tensor], path: Path, scale_of: Callable[[int], float]
) -> dict[str, Adapter]:
    """Return adapters by the name of their layer.

    Args:
        tensors: all tensors of one file.
        path: that file, for errors.
        scale_of: returns the adapter's scale for its rank.

    Raises: CheckpointError for adapters of another kind, with several names, or with a missing
    half.
    """
    halves: dict[str, dict[str, Tensor]] = {}
    kinds: set[str | None] = set()
    for name, tensor in tensors.items():
        # What stands beside adapters, such as a copy of the head, is read as a weight.
        if ".lora_" not in name:
            continue
        found = _ADAPTER_TENSOR.fullmatch(name)
        if found is None:
            raise CheckpointError(
                f"{path} holds {name}; expected adapters of the plain kind, lora_A and lora_B."
            )
        layer, half, kind = found.groups()
        halves.setdefault(layer, {})[half] = tensor
        kinds.add(kind)
    if len(kinds) > 1:
        raise CheckpointError(
            f"{path} has the adapters {', '.join(sorted(map(str, kinds)))}; expected one."
        )
    adapters: dict[str, Adapter] = {}
    for layer, pair in halves.items():
        if pair.keys() != {"A", "B"}:
            raise CheckpointError(f"{path} has half an adapter for {layer}.")
        down, up = pair["A"], pair["B"]
        if min(down.ndim, up.ndim) < 2 or up.shape[1] != down.shape[0]:
            raise CheckpointError(
                f"{path} has an adapter for {layer} whose halves do not fit each other."
            )
        adapters[layer] = Adapter(down, up, scale_of(down.shape[0]))
    return adapters
