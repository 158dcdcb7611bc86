"""Settings that a flow policy's folder states beside its weights, whichever project wrote it.

    openpi     `config.json` with five fields, `assets/<id>/norm_stats.json`       openpi_folder
    LeRobot    `config.json`, two processors with their statistics                 lerobot_folder

Both are read into `FolderSettings`; the small files are kept byte by byte and written back.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vla_rl.errors import CheckpointError
from vla_rl.models.flow.normalization import Normalizer, Project
from vla_rl.util.foreign_data import reading
from vla_rl.util.values import excerpt

logger = logging.getLogger(__name__)

CONFIG_FILE: Final = "config.json"


@dataclass(frozen=True)
class FolderSettings:
    """Statements of a folder about its policy, checked as far as the folder alone allows.

    Attributes:
        project: who wrote it, which decides arithmetic, prompts and the resampling of images.
        model: name of the model in the configuration; None if it names none.
        horizon: rows of a chunk, H.
        num_executed: rows of a chunk that are executed before the next decision.
        num_steps: steps of the chain from noise to actions.
        action_dim: numbers of the robot's action, D.
        state_dim: numbers of the robot's state.
        padded_dim: width to which both are padded, as configured.
        cameras: names of the images, in the order in which the network reads them.
        sources: observation key that each camera was renamed from, where the folder says.
        state: normalisation of the state.
        action: normalisation of the action.
        prompt_length: most tokens of a prompt; None if the folder does not say.
        tokenizer: name or folder of the tokenizer; None if the folder does not say.
        num_vision_heads: attention heads of the image tower; None if the folder does not say.
        files: small files by relative name.
    """

    project: Project
    model: str | None
    horizon: int
    num_executed: int
    num_steps: int
    action_dim: int
    state_dim: int
    padded_dim: int
    cameras: tuple[str, ...]
    sources: Mapping[str, str]
    state: Normalizer
    action: Normalizer
    prompt_length: int | None
    tokenizer: str | None
    num_vision_heads: int | None
    files: Mapping[str, bytes]


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises: CheckpointError naming the file."""
    with reading(path, "a whole JSON object", "download it again", error=CheckpointError):
        # not msgspec: both projects write NaN and Infinity as well
        held = json.loads(path.read_bytes())
        if not isinstance(held, dict):
            raise ValueError(f"it holds a {type(held).__name__}")
    return held


def get_count(fields: Mapping[str, Any], name: str, path: Path, default: int | None = None) -> int:
    """Return a whole number of at least 1.

    Raises: CheckpointError if it is something else, or is missing without a default.
    """
    value = fields.get(name, default)
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{path}: {name} is {value!r}, expected a whole number from 1 on.")
    return value


def require_horizon(num_executed: int, horizon: int, source: object) -> None:
    """Raise CheckpointError if more rows are to be executed than a chunk has."""
    if num_executed > horizon:
        raise CheckpointError(
            f"{source}: {num_executed} rows of each chunk are to be executed, but a chunk has "
            f"{horizon}; execute {horizon} rows at most (n_action_steps in LeRobot's config.json), or "
            "train the policy on longer chunks."
        )


def require_widths(action_dim: int, state_dim: int, padded_dim: int, source: object) -> None:
    """Raise CheckpointError if an action or state is wider than the network's padded width."""
    for name, width in (("action", action_dim), ("state", state_dim)):
        if width > padded_dim:
            raise CheckpointError(
                f"{source}: the {name} has {width} numbers, expected at most {padded_dim}, the width "
                "to which the network pads it; the folder belongs to another robot."
            )


FIXED: Final[Mapping[str, Any]] = {
    "n_obs_steps": 1,
    "use_relative_actions": False,
    "adapt_to_pi_aloha": False,
    "use_delta_joint_actions_aloha": False,
    "use_visual_memory": False,
    "use_proprioceptive_memory": False,
}
"""Fields of `config.json` that change states, actions or images, with the one value that is read here."""

KNOWN: Final = frozenset(
    {
        *FIXED,
        # read here, or by the loader of one of the policies
        *("type", "input_features", "output_features", "normalization_mapping", "vision_config"),
        *("chunk_size", "n_action_steps", "num_inference_steps", "num_steps"),
        *("max_state_dim", "max_action_dim", "min_period", "max_period", "tokenizer_max_length"),
        *("image_resolution", "resize_imgs_with_padding", "vlm_model_name", "attention_mode"),
        *("num_vlm_layers", "num_expert_layers", "self_attn_every_n_layers", "prefix_length"),
        *("expert_width_multiplier", "add_image_special_tokens"),
        # the tensors tell, or the same actions come of any value
        *("paligemma_variant", "action_expert_variant", "dtype", "empty_cameras", "use_cache"),
        *("pad_language_to", "load_vlm_weights", "rtc_config", "action_feature_names"),
        *("relative_exclude_joints", "memory_frames", "memory_stride"),
        *("memory_temporal_attention_every", "gradient_checkpointing", "device", "use_amp"),
        *("use_peft", "push_to_hub", "repo_id", "private", "tags", "license", "pretrained_path"),
        *("pretrained_revision", "train_state_proj", "rtc_training_max_delay"),
    }
)
"""Fields of `config.json` of LeRobot's pi0, pi0.5 and SmolVLA (August 2026)."""

OF_TRAINING: Final = ("optimizer_", "scheduler_", "compile_", "freeze_", "train_", "time_sampling_")
"""Beginnings of fields that change no action of a trained policy."""

FIXED_STEPS: Final[Mapping[str, Any]] = {"enabled": False, "include_state_in_prompt": True}
"""The same of a step's settings: `enabled` turns actions into offsets from the state, or back."""


def require_fixed(fields: Mapping[str, Any], fixed: Mapping[str, Any], source: str) -> None:
    """Raise CheckpointError if a field that changes what a policy computes is not as it is read here."""
    for name, value in fixed.items():
        given = fields.get(name)
        if given is not None and given != value:
            raise CheckpointError(
                f"{source}: {name} is {'on' if given is True else excerpt(given)}, which is not read here, "
                f"expected {'off' if value is False else value}; read as it is, the policy would move another "
                "way than in LeRobot. Train one without it."
            )


def name_unknown(config: Mapping[str, Any], path: Path) -> None:
    """Say which fields that are set are not read, because what they change is not known here."""
    unknown = [
        name
        for name, value in config.items()
        if name not in KNOWN
        and not name.startswith(OF_TRAINING)
        and value not in (None, False, [], {})
    ]
    if unknown:
        shown = ", ".join(f"{name} = {excerpt(config[name])}" for name in sorted(unknown))
        logger.warning(
            "%s has fields that are not known here and not read: %s. If one changes what the policy computes, "
            "it acts otherwise than in LeRobot.",
            path,
            shown,
        )
