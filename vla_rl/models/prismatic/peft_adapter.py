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
from vla_rl.models.prismatic.weights import load_part, read_tensors

ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin")
LORA_FOLDER: Final = "lora_adapter"

PREFIX: Final = "base_model.model."
"""Prefix of all names in peft's files; the rest is the name in the model that it wrapped."""

OTHER_KINDS: Final = (
    "alpha_pattern", "fan_in_fan_out", "layer_replication", "lora_bias", "modules_to_save", "rank_pattern",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora", "use_rslora",
)  # fmt: skip
"""Fields that change what an adapter computes; each has to be absent, empty or false."""

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
        for name in ADAPTER_FILES:
            if (self.path / name).is_file():
                return self.path / name
        raise CheckpointError(
            f"{self.path} has {ADAPTER_CONFIG}, but no {' or '.join(ADAPTER_FILES)} beside it."
        )

    def tensors(self) -> "AdapterTensors":
        """Read the tensors.

        Raises: CheckpointError if the file is damaged, or does not hold a plain adapter.
        """
        verify_download(self.file)
        found = load_part(self.file) if self.file.suffix == ".bin" else read_tensors(self.file)
        strange = next((name for name in sorted(found) if not name.startswith(PREFIX)), None)
        if strange is not None:
            raise CheckpointError(
                f"{self.file} holds {strange}; expected names that begin with {PREFIX}"
            )
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}
        layers = adapters_of(tensors, self.file, lambda rank: self.alpha / rank)
        if any(adapter.down.shape[0] != self.rank for adapter in layers.values()) or not layers:
            raise CheckpointError(
                f"{self.file} has {len(layers)} adapters, expected some, all of rank {self.rank}."
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

    Raises: CheckpointError if it is of another kind.
    """
    for path in (folder / ADAPTER_CONFIG, folder / LORA_FOLDER / ADAPTER_CONFIG):
        if path.is_file():
            return _read(path)
    return None


def _read(path: Path) -> PeftAdapter:
    try:
        fields: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        config = msgspec.convert(fields, _PeftConfig)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read as the configuration of an adapter: {error}"
        ) from error
    others = [name for name in OTHER_KINDS if fields.get(name)]
    if config.peft_type != "LORA" or config.bias != "none" or others:
        shown = ", ".join(
            f"{name} {fields[name]!r}" for name in ("peft_type", "bias", *others) if name in fields
        )
        raise CheckpointError(
            f"{path} has {shown}; expected plain LoRA adapters of one rank and alpha, without "
            "biases."
        )
    return PeftAdapter(path.parent, config.r, config.lora_alpha, config.base_model_name_or_path)


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
