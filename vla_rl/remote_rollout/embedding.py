"""Embeddings of episodes on the host that has their pixels, for SRPO.

    kept group ─► take(key) ─► the episode's arrays here ─► encoder ─► they travel with its embedding
    filtered group ─► drop: nothing is embedded

All hosts compute with the same encoder: the copy of a policy's vision tower that the run began with
is sent beside the policies' files. It computes on the device of the run, also if engines of vLLM act
in processes of their own and the policy here is on the CPU.
"""

from pathlib import Path
from typing import Final

import numpy as np
import torch

from vla_rl.algorithms import EmbeddingConfig, TrajectoryEncoder
from vla_rl.engines import DeviceLane
from vla_rl.models.policy_tower import PolicyTowerEncoder
from vla_rl.models.trajectory_encoders import trajectory_encoder
from vla_rl.rollout.depot import EMBEDDING, Depot
from vla_rl.team.members import RunModel

TOWER_FILE: Final = "encoder.safetensors"
"""File beside the policies' folders."""


def save_encoder(encoder: TrajectoryEncoder, folder: Path) -> None:
    """Write what hosts cannot make of the policy's files, on the device lane."""
    if isinstance(encoder, PolicyTowerEncoder):
        encoder.save(folder / TOWER_FILE)


def load_encoder(
    config: EmbeddingConfig, model: RunModel, lane: DeviceLane, folder: Path, device: torch.device
) -> TrajectoryEncoder:
    """Return the run's encoder.

    Args:
        config: selects the encoder.
        model: the policy.
        lane: computes with the encoder.
        folder: folder with the policies' files.
        device: device on which the encoder computes.

    Raises: ConfigError, CheckpointError if it cannot be made here.
    """
    assert not hasattr(model, "render"), "an encoder is of a policy that sees images"
    encoder = trajectory_encoder(config, model, lane, device)
    if isinstance(encoder, PolicyTowerEncoder):
        encoder.load(folder / TOWER_FILE)
    return encoder


async def embedded_arrays(
    depot: Depot, key: int, encoder: TrajectoryEncoder
) -> dict[str, np.ndarray] | None:
    """Take the arrays of an episode out of a depot, with its embedding; None if they are not there.

    Raises: ValueError naming the episode that cannot be embedded.
    """
    trajectory = depot.trajectory(key)
    if trajectory is None:
        return None
    (embedding,) = await encoder.embed([trajectory])
    arrays = depot.take(key)
    return None if arrays is None else {**arrays, EMBEDDING: embedding}
