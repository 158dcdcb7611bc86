"""Embedding of trajectories for SRPO: T vectors each, in the order of time.

    video or states of one trajectory ─► T moments ─► encoder ─► float32 [T, D]

This module has two encoders in plain NumPy: downscaled images, and the simulator's state vector.
Encoders with a network are in `vla_rl.models.trajectory_encoders`, behind the same protocol.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.srpo.encoder_config import EmbeddingConfig
from vla_rl.algorithms.srpo.moments import cannot_embed, evenly_spaced, frames_of, observed, stacked
from vla_rl.errors import ConfigError
from vla_rl.types import Trajectory


class TrajectoryEncoder(Protocol):
    """Embeds trajectories.

    It is called once per group, as groups complete, for groups that pass the filter.
    """

    async def embed(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
        """Embed trajectories, each from its own frames or states: float32 [N, T, D].

        T and D are the same in every call.

        Raises: ValueError naming the `episode_id` that cannot be embedded.
        """
        ...


class ObservationEncoder:
    """The encoders `pixels` and `state`, which need only the trajectory; computed in a thread.

    Args:
        config: settings with one of these two encoders. Raises: ConfigError for another encoder.
    """

    def __init__(self, config: EmbeddingConfig) -> None:
        _require_numpy(config)
        self._config = config

    async def embed(self, trajectories: Sequence[Trajectory]) -> NDArray[np.float32]:
        """Embed trajectories: float32 [N, T, D]."""
        return await asyncio.to_thread(trajectory_embeddings, trajectories, self._config)


def trajectory_embeddings(
    trajectories: Sequence[Trajectory], config: EmbeddingConfig
) -> NDArray[np.float32]:
    """Embed a batch with `pixels` or `state`.

    Returns: float32 [N, T, D] in the order given, T = num_frames; shape [0, 0, 0] without
    trajectories.
    Raises: ValueError naming the `episode_id` whose observation lacks the key, has another size, or
    is not finite.
    """
    _require_numpy(config)
    return stacked(
        trajectories, [trajectory_embedding(trajectory, config) for trajectory in trajectories]
    )


def trajectory_embedding(trajectory: Trajectory, config: EmbeddingConfig) -> NDArray[np.float32]:
    """Embed one trajectory: float32 [T, D], moments in the order of time.

    Moment j is observation round(j * (n - 1) / (T - 1)) of all n, so a short trajectory repeats
    some in place. T = 1 takes the final observation.

    Raises: ValueError naming the `episode_id` whose observation lacks the key or has another size.
    """
    seen = (
        observed(trajectory, config.state_key)
        if config.encoder == "state"
        else frames_of(trajectory, config.image_key)
    )
    chosen = evenly_spaced(len(seen), config.num_frames)
    vectors = {
        int(index): _vector(trajectory, seen[index], config) for index in set(chosen.tolist())
    }
    if len({len(vector) for vector in vectors.values()}) > 1:
        raise cannot_embed(trajectory, f"its {config.encoder} changes size on the way")
    return np.stack([vectors[int(index)] for index in chosen])


def area_resize(image: NDArray[np.uint8], size: int) -> NDArray[np.float32]:
    """Average an image down to `size` x `size`.

    Each output pixel is the mean of the area it covers, edges in part.

    Args:
        image: uint8 [H, W, C].
        size: height and width of the result; a smaller input is enlarged.

    Returns: float32 [size, size, C] in [0, 1].
    """
    rows, columns = _area_weights(image.shape[0], size), _area_weights(image.shape[1], size)
    averaged = np.einsum("ih,hwc->iwc", rows, image.astype(np.float32) / 255.0)
    return np.asarray(np.einsum("jw,iwc->ijc", columns, averaged), dtype=np.float32)


def _area_weights(length: int, size: int) -> NDArray[np.float32]:
    """Return [size, length]: the share of input pixel x in output pixel i; every row sums to 1."""
    edges = np.linspace(0.0, length, size + 1)
    pixels = np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.asarray(overlap.clip(min=0.0) * (size / length), dtype=np.float32)


def _vector(
    trajectory: Trajectory, seen: NDArray[np.generic], config: EmbeddingConfig
) -> NDArray[np.float32]:
    if config.encoder == "pixels":
        return area_resize(np.asarray(seen, np.uint8), config.image_size).reshape(-1)
    if seen.ndim != 1 or seen.size == 0:
        raise cannot_embed(trajectory, f"{config.state_key!r} is {list(seen.shape)}, expected [D]")
    return np.asarray(seen, np.float32)


def _require_numpy(config: EmbeddingConfig) -> None:
    if config.encoder not in ("pixels", "state"):
        raise ConfigError(
            f"EmbeddingConfig.encoder is {config.encoder!r}, expected 'pixels' or 'state' here; "
            "vla_rl.models.trajectory_encoders makes the encoders that have a network."
        )
