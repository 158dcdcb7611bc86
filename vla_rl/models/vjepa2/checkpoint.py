"""V-JEPA 2 checkpoints as transformers writes them: checked first, then only the video encoder is
loaded.
"""

from pathlib import Path
from typing import Any, Final

from huggingface_hub import constants, try_to_load_from_cache
from torch import nn
from transformers import PreTrainedConfig, VJEPA2Config, VJEPA2Model

from vla_rl.algorithms import VJepa2Config
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.prismatic.hub import downloaded
from vla_rl.models.weight_files import (
    check_weights,
    refuse_adapter_beside,
    refuse_other_sources,
    tensor_files,
)
from vla_rl.util.arrays import torch_dtype
from vla_rl.util.finiteness import require_finite

WEIGHT_FILES: Final = ("model.safetensors", "model.safetensors.index.json")


def check_folder(folder: str) -> None:
    """Check that a folder is a V-JEPA 2 checkpoint, before its weights are loaded; for a hub name,
    its config is read.

    Raises: ConfigError naming what was found instead.
    """
    looks_local = folder.startswith(("/", ".", "~")) or folder.count("/") != 1
    if not Path(folder).is_dir() and looks_local:
        raise ConfigError(
            f"VJepa2Config.folder is {folder!r}, and there is no such folder; expected one with "
            "config.json and model.safetensors, or a name on the hub such as "
            "'facebook/vjepa2-vitg-fpc64-384'."
        )
    _read_config(folder)
    _require_weights(folder)
    if Path(folder).is_dir():
        try:
            refuse_adapter_beside(Path(folder))
            refuse_other_sources(Path(folder), tensor_files(Path(folder)))
        except CheckpointError as error:
            raise ConfigError(f"V-JEPA 2 in {folder!r} cannot be used: {error}") from error


def load_encoder(config: VJepa2Config) -> nn.Module:
    """Load the encoder on the CPU, in the configured precision, for videos of the configured size;
    the predictor is left out.

    Raises: ConfigError if the folder is not a V-JEPA 2 checkpoint, lacks weights, or cannot be
    fetched.
    """
    model_config = _read_config(config.folder)
    patch_size = model_config.patch_size
    if not isinstance(patch_size, int) or config.image_size % patch_size:
        raise ConfigError(
            f"VJepa2Config.image_size is {config.image_size}, expected a multiple of the patches "
            f"of {config.folder}, {patch_size} pixels."
        )
    # positions are rotary and computed from these two, so any size fits the weights
    model_config.crop_size, model_config.frames_per_clip = config.image_size, config.num_frames
    try:
        is_here = Path(config.folder).is_dir()
        folder = Path(config.folder) if is_here else downloaded(config.folder, without=("*.pt",))
        check_weights(folder)
        loaded: Any = VJEPA2Model.from_pretrained(
            folder,
            config=model_config,
            dtype=torch_dtype(config.precision),
            use_safetensors=True,
            output_loading_info=True,
        )
        require_finite(loaded[0].encoder.state_dict(), folder)
    except (OSError, ValueError, RuntimeError, CheckpointError) as error:
        raise ConfigError(f"V-JEPA 2 in {config.folder!r} cannot be loaded: {error}") from error
    model, report = loaded
    missing = sorted(name for name in report["missing_keys"] if "encoder." in name)
    if missing:
        raise ConfigError(
            f"V-JEPA 2 in {config.folder!r} lacks {len(missing)} tensors of its encoder, the "
            f"first is {missing[0]!r}."
        )
    encoder: nn.Module = model.encoder
    return encoder.eval().requires_grad_(False)


def _require_weights(folder: str) -> None:
    """Raise ConfigError unless the weights are in a local folder, in the hub's cache, or can be
    downloaded.
    """
    if Path(folder).is_dir():
        found = any((Path(folder) / name).is_file() for name in WEIGHT_FILES)
    else:
        found = any(isinstance(try_to_load_from_cache(folder, name), str) for name in WEIGHT_FILES)
        if not found and not constants.HF_HUB_OFFLINE:
            return  # downloaded when the first trajectory is embedded
    if not found:
        raise ConfigError(
            f"V-JEPA 2 in {folder!r} has none of {', '.join(WEIGHT_FILES)}; expected the weights "
            "beside config.json, in safetensors."
        )


def _read_config(folder: str) -> VJEPA2Config:
    try:
        found, _ = PreTrainedConfig.get_config_dict(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"VJepa2Config.folder is {folder!r}, whose config.json cannot be read: {error}"
        ) from error
    if not found:
        raise ConfigError(
            f"VJepa2Config.folder is {folder!r}, which holds no config.json; expected a V-JEPA 2 "
            "checkpoint."
        )
    if found.get("model_type") != "vjepa2":
        raise ConfigError(
            f"VJepa2Config.folder is {folder!r}, which holds a model of type "
            f"{found.get('model_type')!r}, expected 'vjepa2'."
        )
    return VJEPA2Config.from_dict(found)
