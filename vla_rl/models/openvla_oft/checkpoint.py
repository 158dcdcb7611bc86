"""OpenVLA-OFT's checkpoints: the public folder, its parts beside the main weights, and what `vla_rl.json` adds.

    model*.safetensors                         towers, projector, trunk; proprio projector too in SimpleVLA-RL's
    action_head--*_checkpoint.pt               L1 or diffusion head
    proprio_projector--*_checkpoint.pt         unless it stands in the safetensors
    noisy_action_projector--*_checkpoint.pt    under diffusion

Saved here, all of it stands in the safetensors under the part's name, which is how the RL systems write theirs.
"""

from pathlib import Path
from typing import Final

import msgspec
import torch
from tokenizers import Tokenizer

from vla_rl.errors import CheckpointError
from vla_rl.models.openvla_oft.config import DIALECTS, Dialect, Head, OpenVlaOftConfig
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.prismatic.config import LlmConfig, Normalization
from vla_rl.models.prismatic.folder import PublicFolder
from vla_rl.models.prismatic.public_config import Extension, inner_name, require_family, shared_config
from vla_rl.models.prismatic.saving import checkpoint_files
from vla_rl.models.prismatic.statistics import bounds_of, choose_key, proprio_of
from vla_rl.models.prismatic.trunk import materialise
from vla_rl.models.prismatic.weights import find_part, load_part, load_weights, tensor_files

EPSILON: Final = 1e-8
"""What OpenVLA-OFT's code adds to the range of the statistics; OpenVLA's does not."""

PARTS: Final = ("action_head", "proprio_projector", "noisy_action_projector")
"""Modules that the authors save beside the main weights."""


def config_of(
    folder: PublicFolder,
    norm_key: str | None,
    normalization: Normalization,
    dialect: Dialect,
    cameras: tuple[str, ...] | None,
    head: Head,
) -> OpenVlaOftConfig:
    """The configuration of a checkpoint folder; what it says of itself comes before the arguments.

    Raises: CheckpointError where the folder holds another family or head, towers with FiLM, or lacks the statistics.
    """
    extension, conventions = folder.extension, DIALECTS[dialect]
    require_family(folder.path, extension, "openvla_oft")
    _require_readable(folder.path, head)
    key = choose_key(folder.statistics, norm_key or extension.norm_key, folder.path)
    statistics, scale = folder.statistics[key], extension.normalization or normalization
    has_proprio = folder.public.use_proprio or _has_proprio_weights(folder.path)
    proprio = proprio_of(statistics, scale, extension.proprio_key) if has_proprio else None
    if has_proprio and proprio is None:
        raise CheckpointError(f"{folder.path} has a proprio projector, but the statistics {key!r} have no proprio.")
    if extension.head is not None and extension.head != head:
        raise CheckpointError(f"{folder.path} has the head {extension.head!r}, not {head!r}.")
    shared = shared_config(folder.public, extension, folder.path)
    llm: LlmConfig = shared.pop("llm")
    rope = extension.rope_inv_freq_dtype if extension.images else conventions.rope_inv_freq_dtype
    return OpenVlaOftConfig(
        **shared,
        llm=msgspec.structs.replace(llm, rope_inv_freq_dtype=rope),
        images=extension.images or conventions.images,
        cameras=extension.cameras or cameras or ("image",),
        action_bounds=bounds_of(
            statistics, scale, gripper=extension.gripper, epsilon=EPSILON if extension.gripper == "openvla" else 0.0
        ),
        norm_key=key,
        normalization=scale,
        proprio=proprio,
        chunk_size=extension.chunk_size or 8,
        head=head,
        has_film=extension.has_film,
        has_stop_token=extension.has_stop_token if extension.images else conventions.has_stop_token,
    )


def load_network(
    config: OpenVlaOftConfig, folder: PublicFolder, dtype: torch.dtype | None, device: torch.device | str
) -> OpenVlaOftNetwork:
    """Build without memory, then read one tensor at a time. Raises: CheckpointError."""
    with torch.device("meta"):
        network = OpenVlaOftNetwork(config)
    beside = _parts_beside(folder.path)
    load_weights(
        network,
        folder.path,
        inner_name=inner_name,
        beside={
            f"{part}.{name}": tensor
            for part, path in beside.items()
            if getattr(network, part) is not None
            for name, tensor in load_part(path).items()
        },
        dtype=dtype,
        device=device,
    )
    materialise(network, device)
    return network


def files_of(config: OpenVlaOftConfig, tokenizer: Tokenizer, origin: PublicFolder | None) -> dict[str, bytes]:
    """The small files of a checkpoint."""
    extension = Extension(
        family="openvla_oft",
        norm_key=config.norm_key,
        normalization=config.normalization,
        cameras=config.cameras,
        images=config.images,
        proprio_key="state" if config.proprio is None else config.proprio.key,
        chunk_size=config.chunk_size,
        gripper=config.action_bounds.gripper,
        head=config.head,
        has_film=config.has_film,
        has_stop_token=config.has_stop_token,
        lora=config.lora,
        rope_inv_freq_dtype=config.llm.rope_inv_freq_dtype,
        featurizer_overrides=config.featurizer.overrides,
        fused_featurizer_overrides=config.fused_featurizer.overrides,
    )
    return checkpoint_files(config, extension, tokenizer, origin, config.proprio)


def _require_readable(folder: Path, head: Head) -> None:
    """Nothing that stands beside the weights is left out in silence."""
    action_head, towers = find_part(folder, "action_head"), find_part(folder, "vision_backbone")
    if head == "tokens" and action_head is not None:
        raise CheckpointError(
            f"{folder} has an action head, {action_head.name}, so its actions are no tokens; load it with "
            "ContinuousOpenVlaOft (policy_family continuous)."
        )
    if towers is not None:
        raise CheckpointError(
            f"{folder} has towers with FiLM in {towers.name}, which is not read: a checkpoint with FiLM can be loaded where "
            "vla_rl saved it, among its weights."
        )


def _parts_beside(folder: Path) -> dict[str, Path]:
    found = {part: find_part(folder, part) for part in PARTS}
    return {part: path for part, path in found.items() if path is not None}


def _has_proprio_weights(folder: Path) -> bool:
    names = tensor_files(folder)
    return any(name.startswith("proprio_projector.") for name in names) or "proprio_projector" in _parts_beside(folder)
