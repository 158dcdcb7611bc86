"""OpenVLA-OFT's checkpoints: the public folder, with parts beside its main weights.

`vla_rl.json` adds what the public layout lacks.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.openvla_oft.parts import (
    FILM_TOWERS,
    FILMED_TOWERS,
    TOWER_PREFIX,
    find_parts,
    initialize_new_parts,
    read_parts,
    require_known_parts,
    require_new_parts,
    require_whole_towers,
)
from vla_rl.models.prismatic.config import (
    AdapterUse,
    Head,
    NewPart,
    Normalization,
    OpenVlaOftConfig,
    ProprioConfig,
)
from vla_rl.models.prismatic.conventions import (
    CheckpointFormat,
    Family,
    refuse_unused,
)
from vla_rl.models.prismatic.folder import PublicFolder, resolve_fields
from vla_rl.models.prismatic.policy import checkpoint_files
from vla_rl.models.prismatic.public_config import (
    Extension,
    public_name,
    require_family,
    resolve_setting,
)
from vla_rl.models.prismatic.statistics import (
    get_action_bounds,
    get_constant_proprio,
    get_gripper,
    get_proprio,
)
from vla_rl.models.prismatic.weights import NORM, load_folder, with_adapter
from vla_rl.models.tensor_reading import stored_dtype, tensor_files

EPSILON: Final = 1e-8
"""Value that OpenVLA-OFT's code adds to the range of the statistics; OpenVLA's does not."""

LIBERO_ACTION_DIM: Final = 7
LIBERO_CHUNK: Final = 8


def read_config(
    folder: PublicFolder,
    head: Head | None,
    format: CheckpointFormat,
    new_parts: Collection[NewPart] = (),
) -> OpenVlaOftConfig:
    """Read the configuration of a checkpoint; `format` fills in what its files leave out.

    `head` None accepts either continuous head.

    Raises: CheckpointError if the folder holds another family, head or chunk, or lacks the
    statistics; ConfigError for a setting that OpenVLA-OFT does not have.
    """
    family: Family = "openvla_oft" if head == "tokens" else "continuous"
    refuse_unused(family, vocabulary=format.vocabulary)
    extension = folder.extension
    require_family(folder.path, extension, "openvla_oft")
    require_known_parts(new_parts)
    # Parts are found before weights are read: a missing head is reported before 15 GB are read.
    part_files = find_parts(folder.folders)
    kind = _resolve_head(folder, head, part_files, new_parts)
    fields, conventions = resolve_fields(folder, format, without=("vocabulary", "epsilon"))
    key, scale = fields["norm_key"], fields["normalization"]
    has_proprio = folder.public.use_proprio or _has_part(
        folder.path, "proprio_projector", part_files, new_parts
    )
    bounds = get_action_bounds(
        folder.statistics[key],
        scale,
        gripper=get_gripper(folder.statistics[key], extension),
        epsilon=_resolve_epsilon(extension),
    )
    config = OpenVlaOftConfig(
        **fields,
        cameras=_resolve_cameras(
            folder, format.cameras, ("image",) if kind == "tokens" else ("image", "wrist_image")
        ),
        action_bounds=bounds,
        proprio=_read_proprio(folder, key, scale) if has_proprio else None,
        chunk_size=_resolve_chunk_size(folder, bounds.action_dim, format.chunk_size),
        head=kind,
        has_film=extension.has_film or FILM_TOWERS in part_files or "film" in new_parts,
        has_stop_token=conventions.has_stop_token,
    )
    return _adapt(config, folder, format.adapter_use or "merge")


def _adapt(config: OpenVlaOftConfig, folder: PublicFolder, use: AdapterUse) -> OpenVlaOftConfig:
    if use == "train" and config.has_film and folder.adapter is not None:
        raise CheckpointError(
            f"{folder.path} has FiLM, whose part holds the towers' adapters merged in; merge its "
            "adapter too, and add new ones (lora_rank, or `adapted`)."
        )
    return with_adapter(config, folder, use, OpenVlaOftNetwork)


def load_network(
    config: OpenVlaOftConfig,
    folder: PublicFolder,
    dtype: torch.dtype | None,
    device: torch.device | str,
    new_parts: Collection[NewPart] = (),
    seed: int = 0,
) -> OpenVlaOftNetwork:
    """Build the network on the meta device, then read one tensor at a time.

    Raises: CheckpointError.
    """
    with torch.device("meta"):
        network = OpenVlaOftNetwork(config)
    # SimpleVLA-RL's checkpoints have the proprio projector among the main weights, OpenVLA-OFT's
    # in a file of its own.
    main = tensor_files(folder.path)
    parts_dtype = dtype or stored_dtype(folder.path, NORM)
    part_tensors = read_parts(folder.folders, parts_dtype)
    require_new_parts(new_parts, network, [*main, *part_tensors], folder.path)
    initialize_new_parts(new_parts, network, seed, parts_dtype, device)
    require_whole_towers(
        part_tensors, {public_name(name) for name in network.state_dict()}, folder.path
    )
    twice = sorted(
        name for name in main.keys() & part_tensors.keys() if not name.startswith(TOWER_PREFIX)
    )
    if twice:
        raise CheckpointError(
            f"{folder.path} has {twice[0]} twice: among its weights, and in a part beside them."
        )
    load_folder(
        network,
        folder,
        extra=part_tensors,
        missing=tuple(f"{part}." for part in new_parts),
        without=(FILMED_TOWERS,) if config.has_film else (),
        dtype=dtype,
        device=device,
    )
    return network


def list_files(
    config: OpenVlaOftConfig, tokenizer: Tokenizer, origin: PublicFolder | None
) -> dict[str, bytes]:
    """Return the small files of a checkpoint."""
    extension = Extension(
        family="openvla_oft",
        norm_key=config.norm_key,
        normalization=config.normalization,
        cameras=config.cameras,
        images=config.images,
        proprio_key="state" if config.proprio is None else config.proprio.key,
        proprio_constant=None if config.proprio is None else config.proprio.constant,
        chunk_size=config.chunk_size,
        gripper=config.action_bounds.gripper,
        epsilon=config.action_bounds.epsilon,
        head=config.head,
        has_film=config.has_film,
        has_stop_token=config.has_stop_token,
        lora=config.lora,
        training_images=config.training_images,
        rope_inv_freq_dtype=config.llm.rope_inv_freq_dtype,
        featurizer_overrides=config.featurizer.overrides,
        fused_featurizer_overrides=config.fused_featurizer.overrides,
    )
    return checkpoint_files(config, extension, tokenizer, origin, config.proprio)


def _resolve_head(
    folder: PublicFolder,
    asked: Head | None,
    part_files: Mapping[str, Path],
    new_parts: Collection[NewPart],
) -> Head:
    """Return the head of a checkpoint, which is the requested one; None accepts both continuous
    ones.
    """
    known = folder.extension.head
    if asked == "tokens" and "action_head" in part_files:
        raise CheckpointError(
            f"{folder.path} has an action head, {part_files['action_head'].name}, so its actions are "
            "not tokens; load it with ContinuousOpenVlaOft (policy_family continuous)."
        )
    if asked is None and known == "tokens":
        raise CheckpointError(
            f"{folder.path} has the head 'tokens'; load it with OpenVlaOft (policy_family "
            "openvla_oft)."
        )
    head: Head = resolve_setting(folder.path, "head", known, asked, "l1")
    if head != "tokens" and not _has_part(folder.path, "action_head", part_files, new_parts):
        raise CheckpointError(
            f"{folder.path} has no action head, neither action_head--*_checkpoint.pt nor one "
            "among its weights; load it with OpenVlaOft (policy_family openvla_oft), or add a new "
            "one by fine-tuning (new_parts: action_head)."
        )
    return head


def _read_proprio(folder: PublicFolder, key: str, scale: Normalization) -> ProprioConfig:
    """Return how the state is normalised for a policy that reads it."""
    extension = folder.extension
    constant = get_constant_proprio(extension)
    proprio = get_proprio(folder.statistics[key], scale, extension.proprio_key, constant)
    if proprio is None:
        raise CheckpointError(
            f"{folder.path} has a proprio projector, but the statistics {key!r} have no proprio."
        )
    return proprio


def _resolve_chunk_size(folder: PublicFolder, action_dim: int, asked: int | None) -> int:
    """Return the control steps in a chunk: 8 for public LIBERO folders.

    Any other has to be given.
    """
    if (
        folder.extension.chunk_size is not None
        or asked is not None
        # 8 control steps are LIBERO's; Bridge has 7 numbers too and 5 steps, which nothing in a
        # folder tells apart.
        or action_dim == LIBERO_ACTION_DIM
    ):
        return resolve_setting(
            folder.path, "chunk_size", folder.extension.chunk_size, asked, LIBERO_CHUNK
        )
    raise CheckpointError(
        f"{folder.path} does not say how many control steps a chunk has, and its actions of "
        f"{action_dim} numbers are not LIBERO's; set chunk_size (25 for ALOHA's)."
    )


def _resolve_cameras(
    folder: PublicFolder, asked: tuple[str, ...] | None, default: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the observation keys: an environment may name the same cameras differently, but their
    number has to match.
    """
    known = folder.extension.cameras
    if len(set(asked or ())) < len(asked or ()):
        raise ConfigError(
            f"cameras is {asked!r}, expected a tuple of observation keys, each of them once"
        )
    if known is not None and asked is not None and len(asked) != len(known):
        raise CheckpointError(
            f"{folder.path} was trained on {len(known)} cameras {known}; cameras is {asked}, "
            f"which names {len(asked)}."
        )
    return asked or known or default


def _resolve_epsilon(extension: Extension) -> float:
    """Return the stored epsilon; for folders saved before it was stored, 0 if the policy was made
    here (`signed`).
    """
    if extension.epsilon is not None:
        return extension.epsilon
    # Policies that were made here before the setting existed did not add it.
    return 0.0 if extension.gripper == "signed" else EPSILON


def _has_part(
    folder: Path, part: str, part_files: Collection[str], new_parts: Collection[str]
) -> bool:
    return part in (*part_files, *new_parts) or any(
        name.startswith(f"{part}.") for name in tensor_files(folder)
    )
