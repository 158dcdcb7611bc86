"""Policies to fine-tune from: a small new OpenVLA-OFT, or a checkpoint with the statistics of other data."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import msgspec

from vla_rl.models.openvla_oft.checkpoint import EPSILON
from vla_rl.models.openvla_oft.policy import ContinuousOpenVlaOft, OpenVlaOft
from vla_rl.models.prismatic.config import tiny
from vla_rl.models.prismatic.folder import PublicFolder
from vla_rl.models.prismatic.public_config import Extension
from vla_rl.models.prismatic.statistics import (
    STATISTICS_FILE,
    Statistics,
    get_action_bounds,
    get_gripper,
    get_proprio,
)


def tiny_policy(
    head: Literal["tokens", "l1", "diffusion"], statistics: Mapping[str, Any] | None, seed: int
) -> OpenVlaOft | ContinuousOpenVlaOft:
    """Create a small OpenVLA-OFT with random weights.

    `statistics` as of `compute_statistics`, None for a range of -1 to 1.
    """
    config = tiny(head=head)
    if statistics is not None:
        found = msgspec.convert(dict(statistics), Statistics)
        config = msgspec.structs.replace(
            config,
            action_bounds=get_action_bounds(
                found, "bounds_q99", gripper=get_gripper(found, Extension()), epsilon=EPSILON
            ),
            proprio=get_proprio(found, "bounds_q99", "state", "zero"),
        )
    return (
        OpenVlaOft.create(config, seed)
        if head == "tokens"
        else ContinuousOpenVlaOft.create(config, seed)
    )


def with_statistics(folder: PublicFolder, statistics: Mapping[str, Any], key: str) -> PublicFolder:
    """Return a checkpoint folder with added action statistics.

    A policy loaded from it uses and saves them.

    Args:
        folder: the checkpoint's folder.
        statistics: statistics as `compute_statistics` returns them.
        key: their name in `dataset_statistics.json`, beside the old ones.
    """
    named = {**msgspec.json.decode(folder.files.get(STATISTICS_FILE, b"{}")), key: dict(statistics)}
    files = {
        **folder.files,
        STATISTICS_FILE: msgspec.json.format(msgspec.json.encode(named), indent=2),
    }
    found = msgspec.convert(dict(statistics), Statistics)
    extension = msgspec.structs.replace(
        folder.extension, norm_key=key, gripper=get_gripper(found, Extension()), epsilon=EPSILON
    )
    return replace(
        folder, files=files, extension=extension, statistics=folder.statistics.with_set(key, found)
    )
