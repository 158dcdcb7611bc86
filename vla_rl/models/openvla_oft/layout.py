"""The public OpenVLA checkpoint layout: `config.json`, `tokenizer.json`, `model.safetensors`, and its parameter names.

What the public `config.json` has a place for stands there, under its public name; the rest (tower overrides, cameras,
chunk size, gripper) stands in one section, `vla_rl`. Both directions are strict: no name is left over, none is made up.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vla_rl.engines.atomic_folder import writing_folder
from vla_rl.errors import CheckpointError
from vla_rl.models.openvla_oft.action_tokens import ActionBounds
from vla_rl.models.openvla_oft.config import LlmConfig, OpenVlaOftConfig, ProprioConfig, VisionTowerConfig

CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
TENSOR_FILE: Final = "model.safetensors"
ARCHITECTURE: Final = "no-align+fused-gelu-mlp"
NAMES_SHOWN: Final = 8


class _TextConfig(msgspec.Struct, kw_only=True):
    model_type: str = "llama"
    vocab_size: int = 32064
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    rms_norm_eps: float = 1e-6
    pad_token_id: int = 32000


class _Range(msgspec.Struct):
    q01: tuple[float, ...]
    q99: tuple[float, ...]
    mask: tuple[bool, ...] | None = None


class _Statistics(msgspec.Struct):
    action: _Range
    proprio: _Range | None = None


class _Section(msgspec.Struct, kw_only=True):
    """What the public layout has no place for. The defaults are what the public LIBERO checkpoints mean."""

    norm_key: str | None = None
    cameras: tuple[str, ...] = ("image",)
    proprio_key: str = "state"
    chunk_size: int = 8
    gripper: Literal["signed", "openvla"] = "openvla"
    featurizer_overrides: dict[str, int | float] = {}
    fused_featurizer_overrides: dict[str, int | float] = {}


class _PublicConfig(msgspec.Struct, kw_only=True):
    architectures: tuple[str, ...] = ("OpenVLAForActionPrediction",)
    model_type: str = "openvla"
    arch_specifier: str = ARCHITECTURE
    image_resize_strategy: str = "resize-naive"
    image_sizes: tuple[int, int]
    timm_model_ids: tuple[str, str]
    timm_override_act_layers: tuple[str | None, str | None] = (None, None)
    use_fused_vision_backbone: bool = True
    n_action_bins: int = 256
    pad_to_multiple_of: int = 64
    pad_token_id: int = 32000
    norm_stats: dict[str, _Statistics]
    use_proprio: bool = False
    proprio_dim: int | None = None
    text_config: _TextConfig
    vla_rl: _Section = msgspec.field(default_factory=_Section)


def public_name(name: str) -> str:
    """A parameter's name in public files: LayerScale's factor is called `scale_factor` there."""
    return name.replace(".ls1.gamma", ".ls1.scale_factor").replace(".ls2.gamma", ".ls2.scale_factor")


def timm_name(name: str) -> str:
    """The inverse of `public_name`."""
    return name.replace(".ls1.scale_factor", ".ls1.gamma").replace(".ls2.scale_factor", ".ls2.gamma")


def encode_config(config: OpenVlaOftConfig) -> bytes:
    """The text of `config.json`."""
    bounds, proprio, llm = config.action_bounds, config.proprio, config.llm
    statistics = _Statistics(
        action=_Range(bounds.low, bounds.high, bounds.is_scaled),
        proprio=None if proprio is None else _Range(proprio.low, proprio.high),
    )
    public = _PublicConfig(
        image_sizes=(config.image_size, config.image_size),
        timm_model_ids=(config.featurizer.timm_id, config.fused_featurizer.timm_id),
        n_action_bins=config.num_bins,
        pad_to_multiple_of=llm.pad_to_multiple_of,
        pad_token_id=llm.pad_token_id,
        norm_stats={config.norm_key: statistics},
        use_proprio=proprio is not None,
        proprio_dim=None if proprio is None else len(proprio.low),
        text_config=_TextConfig(
            vocab_size=llm.table_size,
            hidden_size=llm.hidden_size,
            intermediate_size=llm.intermediate_size,
            num_hidden_layers=llm.num_layers,
            num_attention_heads=llm.num_heads,
            rms_norm_eps=llm.rms_norm_eps,
            pad_token_id=llm.pad_token_id,
        ),
        vla_rl=_Section(
            norm_key=config.norm_key,
            cameras=config.cameras,
            proprio_key="state" if proprio is None else proprio.key,
            chunk_size=config.chunk_size,
            gripper=bounds.gripper,
            featurizer_overrides=config.featurizer.overrides,
            fused_featurizer_overrides=config.fused_featurizer.overrides,
        ),
    )
    return msgspec.json.format(msgspec.json.encode(public), indent=2)


def read_config(folder: Path) -> OpenVlaOftConfig:
    """The config of a checkpoint folder. Raises: CheckpointError where it is none, or another architecture."""
    path = folder / CONFIG_FILE
    try:
        public = msgspec.json.decode(path.read_bytes(), type=_PublicConfig)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); expected a folder with {CONFIG_FILE}, {TOKENIZER_FILE} and "
            f"{TENSOR_FILE}."
        ) from error
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is not an OpenVLA config: {error}") from error
    if public.arch_specifier != ARCHITECTURE:
        raise CheckpointError(f"{path}: arch_specifier is {public.arch_specifier!r}, expected {ARCHITECTURE!r}.")
    return _from_public(public, folder)


def _from_public(public: _PublicConfig, folder: Path) -> OpenVlaOftConfig:
    section, text = public.vla_rl, public.text_config
    norm_key = section.norm_key or next(iter(public.norm_stats), "")
    if norm_key not in public.norm_stats:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: norm_stats has no {norm_key!r}; it has {sorted(public.norm_stats)}."
        )
    statistics = public.norm_stats[norm_key]
    action, ranges = statistics.action, statistics.proprio
    if public.use_proprio and ranges is None:
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: use_proprio is set, but norm_stats[{norm_key!r}] has no proprio."
        )
    proprio = None
    if public.use_proprio and ranges is not None:
        proprio = ProprioConfig(key=section.proprio_key, low=ranges.q01, high=ranges.q99)
    featurizer, fused_featurizer = public.timm_model_ids
    return OpenVlaOftConfig(
        featurizer=VisionTowerConfig(timm_id=featurizer, overrides=section.featurizer_overrides),
        fused_featurizer=VisionTowerConfig(timm_id=fused_featurizer, overrides=section.fused_featurizer_overrides),
        image_size=public.image_sizes[0],
        cameras=section.cameras,
        proprio=proprio,
        llm=LlmConfig(
            hidden_size=text.hidden_size,
            intermediate_size=text.intermediate_size,
            num_layers=text.num_hidden_layers,
            num_heads=text.num_attention_heads,
            vocab_size=public.pad_token_id,  # the padding token is the first id after the vocabulary
            pad_to_multiple_of=public.pad_to_multiple_of,
            rms_norm_eps=text.rms_norm_eps,
        ),
        tokenizer_file=str(folder / TOKENIZER_FILE),
        chunk_size=section.chunk_size,
        num_bins=public.n_action_bins,
        action_bounds=ActionBounds(
            low=action.q01,
            high=action.q99,
            is_scaled=action.mask or (True,) * len(action.q01),
            gripper=section.gripper,
        ),
        norm_key=norm_key,
    )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, by public name."""
    path = folder / TENSOR_FILE
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def check_names(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless both have the same names with the same shapes."""
    missing = sorted(expected.keys() - found.keys())
    unknown = sorted(found.keys() - expected.keys())
    misshapen = [
        f"{name} {list(found[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    kinds = (("missing", missing), ("unknown", unknown), ("of another shape", misshapen))
    complaints = [f"{len(names)} {kind}: {_some(names)}" for kind, names in kinds if names]
    if complaints:
        raise CheckpointError(
            f"the checkpoint's tensors do not fit the network of its config ({len(expected)} expected): "
            + "; ".join(complaints)
        )


def write_folder(folder: Path, tensors: Mapping[str, Tensor], files: Mapping[str, bytes]) -> None:
    """Write a checkpoint folder, all of it or nothing."""
    num_bytes = sum(tensor.nbytes for tensor in tensors.values()) + sum(map(len, files.values()))
    with writing_folder(folder, num_bytes) as writer:
        writer.write_tensors(TENSOR_FILE, tensors)
        for name, data in files.items():
            writer.write_bytes(name, data)


def _some(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
