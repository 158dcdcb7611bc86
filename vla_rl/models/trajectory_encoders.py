"""SRPO's trajectory encoders, by the name in a configuration.

`policy` is the policy's own vision tower: a frozen copy from the start of the run.
"""

import copy
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

from vla_rl.algorithms import EmbeddingConfig, ObservationEncoder, TrajectoryEncoder
from vla_rl.algorithms.srpo.encoders import cannot_embed, evenly_spaced, stack_embeddings
from vla_rl.engines import DeviceLane, PolicyModel
from vla_rl.engines.device_lane import to_device
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.tensor_reading import read_tensors
from vla_rl.types import Trajectory
from vla_rl.util.arrays import require_finite

FRAMES_PER_BATCH: Final = 32


class PolicyTowerEncoder:
    """A `TrajectoryEncoder`: patch features of all cameras, averaged over the patches, for each
    moment.

    It copies the tower on construction and freezes the copy, so that embeddings stay comparable
    while the policy is trained.

    Args:
        config: `num_frames` is the number of moments.
        model: the policy, whose network has a `vision_backbone` and whose batches have `images`.
        lane: the device lane, shared with the policy and the learner.
        device: device of the copy. None: that of the policy.

    Raises: ConfigError for a policy without a vision tower.
    """

    def __init__(
        self,
        config: EmbeddingConfig,
        model: PolicyModel[Any],
        lane: DeviceLane,
        device: torch.device | None = None,
    ) -> None:
        tower = getattr(model.network, "vision_backbone", None)
        if not isinstance(tower, nn.Module):
            raise ConfigError(
                f"EmbeddingConfig.encoder is 'policy', but {type(model).__name__} has no vision "
                "tower; expected 'pixels', 'state' or 'vjepa2'."
            )
        # A copy, because embeddings of successes are kept over updates and compared with later
        # ones.
        self._tower = copy.deepcopy(tower).eval().requires_grad_(False).to(device)
        self._model, self._lane, self._num_frames = model, lane, config.num_frames

    async def embed(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
        """Embed the observations of the decisions, float32 [N, num_frames, D]."""
        rows = []
        async with aclosing(self._lane.prepare_ahead(self._images, trajectories)) as prepared:
            async for _, images in prepared:
                vectors = [
                    await self._lane.run(self._run_tower, part, work="embed")
                    for part in torch.split(images, FRAMES_PER_BATCH)
                ]
                rows.append(np.concatenate(vectors))
        return stack_embeddings(trajectories, rows)

    def save_tower(self, file: Path) -> None:
        """Write the copy of the tower, as safetensors, on the device lane."""
        tower = {name: each.contiguous() for name, each in self._tower.state_dict().items()}
        save_file(tower, file)

    def load_tower(self, file: Path) -> None:
        """Compute with the tower that another process has saved.

        Raises: CheckpointError if it is not of this policy.
        """
        tensors = read_tensors(file)
        require_finite(tensors, file)
        try:
            self._tower.load_state_dict(tensors)
        except RuntimeError as error:
            raise CheckpointError(
                f"{file} is not the vision tower of this policy: {error}"
            ) from error

    def _images(self, trajectory: Trajectory) -> torch.Tensor:
        """Return the images as the policy's own processor makes them, uint8 [T, cameras,
        3, S, S].
        """
        observations = [
            *(step.observation for step in trajectory.steps),
            trajectory.final_observation,
        ]
        chosen = [
            observations[int(index)] for index in evenly_spaced(len(observations), self._num_frames)
        ]
        try:
            batch = self._model.prepare(chosen)
        except ValueError as error:
            raise cannot_embed(trajectory, str(error)) from error
        # Equal frames are one row of a batch; an embedding is needed for each moment.
        images: torch.Tensor = batch.per_decision(batch.images)
        return images

    @torch.inference_mode()
    def _run_tower(self, images: torch.Tensor) -> NDArray[np.float32]:
        device = next(self._tower.parameters()).device
        patches: torch.Tensor = self._tower(to_device(images, device))
        features: NDArray[np.float32] = patches.float().mean(dim=1).cpu().numpy()
        return features


def trajectory_encoder(
    config: EmbeddingConfig,
    model: "PolicyModel[Any]",
    lane: "DeviceLane",
    device: "torch.device | None" = None,
) -> TrajectoryEncoder:
    """Make SRPO's encoder. Call it before the policy is trained or restored, because the encoder
    `policy` copies its tower.

    Args:
        config: selects the encoder.
        model: the policy.
        lane: the device lane of the run.
        device: device on which the encoder computes. None: that of the policy.

    Raises: ConfigError for a policy without a vision tower, or a folder that is not a V-JEPA 2
    checkpoint.
    """
    if config.encoder == "policy":
        return PolicyTowerEncoder(config, model, lane, device)
    if config.encoder == "vjepa2":
        from vla_rl.models.vjepa2 import VJepa2Encoder  # imports transformers, which takes seconds

        own = next(model.network.parameters()).device
        return VJepa2Encoder(config.vjepa2, config.image_key, lane, device or own)
    return ObservationEncoder(config)
