"""Fields of LeRobot's `config.json` and processors: which are read, which change nothing, which are refused."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vla_rl.errors import CheckpointError
from vla_rl.util.values import excerpt

logger = logging.getLogger(__name__)

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
