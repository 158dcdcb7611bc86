"""Embed trajectories with V-JEPA 2 during rollout and training: batches of a few videos take turns
on the device lane.

    trajectories ─► host thread: 64 frames each, uint8 ─► device lane: resize, encoder, mean over tokens ─► [N, T, D]

The weights are read at the first call, in the host thread. The caller decides what is embedded: the
calling node streams over the groups that are trained on, so groups that the graph's filter dropped
and evaluation are not embedded.
"""

from collections.abc import Sequence
from contextlib import aclosing

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vla_rl.algorithms import VJepa2Config
from vla_rl.algorithms.srpo.encoders import cannot_embed, stack_embeddings, video_frames
from vla_rl.engines import DeviceLane
from vla_rl.engines.device_lane import to_device
from vla_rl.models.vjepa2.checkpoint import check_folder, load_encoder
from vla_rl.models.vjepa2.video import preprocess, sample_frames
from vla_rl.types import Trajectory


class VJepa2Encoder:
    """A `TrajectoryEncoder` (Assran et al. 2025, arXiv:2506.09985): mean over the tokens of the
    last layer, after its norm.

    Args:
        config: checkpoint, size, precision, and number of videos in a batch.
        image_key: observation key of the video.
        lane: the device lane, shared with the policy and the learner.
        device: device of the encoder.

    Raises: ConfigError for a local folder that is not a V-JEPA 2 checkpoint.
    """

    def __init__(
        self, config: VJepa2Config, image_key: str, lane: DeviceLane, device: torch.device
    ) -> None:
        check_folder(config.folder)
        self._config, self._image_key = config, image_key
        self._lane, self._device = lane, device
        self._encoder: nn.Module | None = None

    async def embed(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
        """Embed trajectories, float32 [N, num_moments, D].

        Raises: ConfigError if the checkpoint cannot be loaded.
        """
        if not trajectories:
            return np.empty((0, 0, 0), np.float32)
        size = self._config.videos_per_batch
        batches = [
            trajectories[start : start + size] for start in range(0, len(trajectories), size)
        ]
        rows: list[NDArray[np.float32]] = []
        try:
            async with aclosing(self._lane.prepared_ahead(self._videos, batches)) as prepared:
                async for _, videos in prepared:
                    rows.extend(await self._lane.run(self._embed, videos, work="embed"))
        finally:
            if self._config.offload and self._encoder is not None:
                await self._lane.run(self._move, torch.device("cpu"), work="embed")
        return stack_embeddings(trajectories, rows)

    def _videos(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """Sample the videos, uint8 [num_frames, H, W, 3] each, and load the weights.

        Runs in the host thread.
        """
        if self._encoder is None:
            self._encoder = load_encoder(self._config)
        return [torch.from_numpy(self._video(trajectory)) for trajectory in trajectories]

    def _video(self, trajectory: Trajectory) -> NDArray[np.uint8]:
        frames = video_frames(trajectory, self._image_key)
        try:
            return sample_frames(frames, self._config.num_frames, self._config.short_videos)
        except ValueError as error:
            raise cannot_embed(trajectory, str(error)) from error

    @torch.inference_mode()
    def _embed(self, videos: list[Tensor]) -> list[NDArray[np.float32]]:
        """Embed videos, float32 [num_moments, D] each."""
        encoder = self._move(self._device)
        pixels = torch.stack(
            [
                preprocess(to_device(video, self._device), self._config.image_size)
                for video in videos
            ]
        )
        # [B, tokens, D], tokens in the order of time: all patches of one tubelet after those of the
        # one before
        tokens = encoder(pixel_values_videos=pixels).last_hidden_state
        moments = tokens.float().unflatten(1, (self._config.num_moments, -1)).mean(dim=2)
        return list(moments.cpu().numpy())

    def _move(self, device: torch.device) -> nn.Module:
        assert self._encoder is not None
        return self._encoder.to(device)
