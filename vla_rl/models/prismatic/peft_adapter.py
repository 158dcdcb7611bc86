"""Adapters that peft saved, read without executing any of their code.

    adapter_config.json           rank, alpha, and the checkpoint that the adapter was trained on
    adapter_model.safetensors     base_model.model.<layer>.lora_{A,B}.weight; if the output head is adapted,
    (or adapter_model.bin)        a copy of its own weight, too

They are stored in a separate folder, or in `lora_adapter/` of a folder that OpenVLA-OFT's training
wrote.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from torch import Tensor

from vla_rl.errors import CheckpointError
from vla_rl.models.prismatic.hub import verify_download
from vla_rl.models.prismatic.lora import Adapter
from vla_rl.models.prismatic.weights import load_part
from vla_rl.models.weight_files import ADAPTER_CONFIG, read_tensors, require_same_tensors
from vla_rl.util.finiteness import require_finite
from vla_rl.util.values import compare_sources, excerpt

ADAPTER_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")
LORA_FOLDER: Final = "lora_adapter"

PREFIX: Final = "base_model.model."
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

DEFAULTS: Final[Mapping[str, Any]] = {
    "bias": "none", "megatron_core": "megatron.core", "peft_type": "LORA", "qalora_group_size": 16,
}  # fmt: skip
"""Defaults of peft that are neither null, false nor empty. Every other field has to be one of those:
it changes what an adapter computes, or is newer than this list."""

_ADAPTER = re.compile(r"(.+)\.lora_([AB])(?:\.([^.]+))?\.weight")


class _PeftConfig(msgspec.Struct, kw_only=True):
    """Fields of `adapter_config.json` that are read."""

    peft_type: str
    r: int
    lora_alpha: int
    bias: str = "none"
    base_model_name_or_path: str | None = None


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter on disk, read except for its tensors."""

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

    def tensors(self) -> "AdapterTensors":
        """Read the tensors.

        Raises: CheckpointError if the file is damaged, or does not hold a plain adapter.
        """
        file = self.file
        verify_download(file)
        found = load_part(file) if file.suffix == ".bin" else read_tensors(file)
        require_finite(found, file)
        strange = next((name for name in sorted(found) if not name.startswith(PREFIX)), None)
        if strange is not None:
            raise CheckpointError(
                f"{file} holds {strange}; expected names that begin with {PREFIX}"
            )
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
        layers = adapters_of(tensors, file, lambda rank: self.alpha / rank)
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
    found = [_read(path) for path in paths if path.is_file()]
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


def _read(path: Path) -> PeftAdapter:
    try:
        fields: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        config = msgspec.convert(fields, _PeftConfig)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as the configuration of an adapter: {error}"
        ) from error
    others = [name for name, value in fields.items() if not _is_plain(name, value)]
    if others:
        shown = ", ".join(f"{name} {excerpt(fields[name])}" for name in others)
        raise CheckpointError(
            f"{path} has {shown}; expected plain LoRA adapters of one rank and alpha, without "
            "biases, that were trained on their base as it is. Merge the adapter with peft "
            "(merge_and_unload) and load the merged checkpoint."
        )
    return PeftAdapter(path.parent, config.r, config.lora_alpha, config.base_model_name_or_path)


def _is_plain(name: str, value: Any) -> bool:
    """Return whether a field of a configuration leaves an adapter as it is read here."""
    if name == "init_lora_weights" and isinstance(value, str):
        return value.lower() in HARMLESS_INITS
    if name == "eva_config":  # settings of an initialisation; new ranks are in rank_pattern
        return True
    return name in MAY_DIFFER or not value or value == DEFAULTS.get(name)


def adapters_of(
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
        if ".lora_" not in name:
            continue
        found = _ADAPTER.fullmatch(name)
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
