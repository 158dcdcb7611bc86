"""One vector for one trajectory, from its own observations: what SRPO compares. NumPy only, no network.

    observations (one per decision, and the final one) ─► T evenly spaced ─► encoder ─► float32 [T * D]

A trajectory is embedded from what it carries itself; nothing is looked up by task or by name, so members of one group
cannot share an embedding by accident.
"""

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.choices import check_choice
from vla_rl.types import Config, Trajectory


class EmbeddingConfig(Config, frozen=True):
    """Which observations of a trajectory are looked at, and how."""

    encoder: str = "pixels"
    """`pixels`: the image, averaged down to a small one. `state`: the state vector as it is."""

    num_frames: int = 8
    """Observations taken from each trajectory, evenly spaced from the first to the final one; >= 1."""

    image_size: int = 16
    """Height and width that `pixels` averages the image down to; >= 1."""

    image_key: str = "image"
    """Observation key of the uint8 [H, W, 3] image for `pixels`."""

    state_key: str = "state"
    """Observation key of the [D] vector for `state`."""

    def __post_init__(self) -> None:
        check_choice(ENCODERS, self.encoder, "EmbeddingConfig.encoder")
        self.require(self.num_frames >= 1, "num_frames", "at least one frame")
        self.require(self.image_size >= 1, "image_size", "at least one pixel")


FrameEncoder: TypeAlias = Callable[[dict[str, Any], EmbeddingConfig], NDArray[np.float32]]
"""(observation, config) -> float32 [D]."""


def trajectory_embeddings(trajectories: Sequence[Trajectory], config: EmbeddingConfig) -> NDArray[np.float32]:
    """Embed a batch.

    Returns: float32 [N, T * D], in the order given; [0, 0] for no trajectory.
    Raises: ValueError naming the `episode_id` whose observation lacks the key, has another size, or is not finite.
    """
    if not trajectories:
        return np.empty((0, 0), dtype=np.float32)
    rows = [trajectory_embedding(trajectory, config) for trajectory in trajectories]
    for trajectory, row in zip(trajectories, rows, strict=True):
        if row.shape != rows[0].shape:
            raise ValueError(
                f"embedding of episode {trajectory.episode.episode_id} has {len(row)} numbers, but that of episode "
                f"{trajectories[0].episode.episode_id} has {len(rows[0])}; expected observations of one size."
            )
    return np.stack(rows)


def trajectory_embedding(trajectory: Trajectory, config: EmbeddingConfig) -> NDArray[np.float32]:
    """Embed one trajectory: float32 [T * D], frames in the order of time.

    Frame j of T is observation round(j * (n - 1) / (T - 1)) of the n there are, so a short trajectory repeats frames
    in place (the released SRPO code repeats the whole video instead). T = 1 takes the final observation.

    Raises: ValueError naming the `episode_id` whose observation lacks the key, has another size, or is not finite.
    """
    observations = [*(step.observation for step in trajectory.steps), trajectory.final_observation]
    last = len(observations) - 1
    chosen = np.linspace(0, last, config.num_frames).round().astype(int) if config.num_frames > 1 else [last]
    encode = ENCODERS[config.encoder]
    try:
        frames = {int(index): encode(observations[index], config) for index in set(chosen)}
        embedding = np.concatenate([frames[int(index)] for index in chosen])
        if len({len(frame) for frame in frames.values()}) > 1:
            raise ValueError(f"its {config.encoder} change size on the way")
    except ValueError as error:
        raise ValueError(f"episode {trajectory.episode.episode_id} cannot be embedded: {error}.") from error
    if not np.isfinite(embedding).all():
        raise ValueError(
            f"episode {trajectory.episode.episode_id} cannot be embedded: its {config.encoder} are not finite."
        )
    return embedding


def area_resize(image: NDArray[np.uint8], size: int) -> NDArray[np.float32]:
    """Average an image down to `size` x `size`; each output pixel is the mean of the area it covers, edges in part.

    Args:
        image: uint8 [H, W, C].
        size: height and width of the result; a smaller input is spread over it.

    Returns: float32 [size, size, C] in [0, 1].
    """
    rows, columns = _area_weights(image.shape[0], size), _area_weights(image.shape[1], size)
    averaged = np.einsum("ih,hwc->iwc", rows, image.astype(np.float32) / 255.0)
    return np.asarray(np.einsum("jw,iwc->ijc", columns, averaged), dtype=np.float32)


def _area_weights(length: int, size: int) -> NDArray[np.float32]:
    """[size, length]: the share of input pixel x in output pixel i; every row sums to 1."""
    edges = np.linspace(0.0, length, size + 1)
    pixels = np.arange(length)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    return np.asarray(overlap.clip(min=0.0) * (size / length), dtype=np.float32)


def _pixels(observation: dict[str, Any], config: EmbeddingConfig) -> NDArray[np.float32]:
    image = _value(observation, config.image_key)
    if image.dtype != np.uint8 or image.ndim != 3 or image.size == 0:
        raise ValueError(f"{config.image_key!r} is {image.dtype} {list(image.shape)}, expected uint8 [H, W, 3]")
    return area_resize(image, config.image_size).reshape(-1)


def _state(observation: dict[str, Any], config: EmbeddingConfig) -> NDArray[np.float32]:
    state = _value(observation, config.state_key)
    if state.ndim != 1 or state.size == 0:
        raise ValueError(f"{config.state_key!r} is {list(state.shape)}, expected [D]")
    return state.astype(np.float32)


def _value(observation: dict[str, Any], key: str) -> NDArray[Any]:
    if key not in observation:
        raise ValueError(f"its observation has no {key!r}, only {sorted(observation)}; choose another encoder or key")
    return np.asarray(observation[key])


ENCODERS: Final = MappingProxyType[str, FrameEncoder]({"pixels": _pixels, "state": _state})
"""Encoders by the name that a config uses."""
