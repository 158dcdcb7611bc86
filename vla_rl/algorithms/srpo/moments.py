"""Frames and observations of one trajectory, moment by moment, and the choice of moments to embed.

A trajectory is embedded only from its own data; nothing is looked up by task or by name, so members
of one group cannot share an embedding by accident.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vla_rl.errors import ConfigError
from vla_rl.types import Trajectory


def observed(trajectory: Trajectory, key: str) -> list[NDArray[Any]]:
    """Return `key` of every observation, in order: before each decision, and the final one.

    Raises: ValueError naming the `episode_id` of an observation without the key.
    """
    observations = [*(step.observation for step in trajectory.steps), trajectory.final_observation]
    for observation in observations:
        if key not in observation:
            raise cannot_embed(
                trajectory,
                f"its observation has no {key!r}, only {sorted(observation)}; choose "
                "another encoder or key",
            )
    return [np.asarray(observation[key]) for observation in observations]


def frames_of(trajectory: Trajectory, image_key: str) -> list[NDArray[np.uint8]]:
    """Return the frames that the steps kept, if any, else the images of the observations.

    A kept video begins with the first observation's image, which no step has run before, and ends
    with the final one's.

    Returns: uint8 [H, W, 3] each, at least one, all of one size. Raises: ValueError naming the
    `episode_id` otherwise; ConfigError if kept frames are not known to be of `image_key`.
    """
    images = observed(trajectory, image_key)
    kept = []
    for step in trajectory.steps:
        if step.frames is not None:
            if step.frames_key != image_key:
                raise _of_another_camera(trajectory, step.frames_key, image_key)
            kept += list(step.frames)
    frames = [images[0], *kept, images[-1]] if kept else images
    for frame in frames:
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or frame.size == 0:
            raise cannot_embed(
                trajectory,
                f"{image_key!r} is {frame.dtype} {list(frame.shape)}, expected uint8 [H, W, 3]",
            )
        if frame.shape != frames[0].shape:
            raise cannot_embed(
                trajectory,
                f"its frames are {list(frames[0].shape)} and {list(frame.shape)}, expected one "
                "size in an episode",
            )
    return frames


def evenly_spaced(num: int, num_wanted: int) -> NDArray[np.int64]:
    """Return the indices round(j * (num - 1) / (num_wanted - 1)), int64 [num_wanted].

    A short video repeats some in place.

    A single wanted index is the last one.
    """
    if num_wanted == 1:
        return np.array([num - 1])
    return np.linspace(0, num - 1, num_wanted).round().astype(np.int64)


def stacked(
    trajectories: Sequence[Trajectory], embeddings: Sequence[NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Stack embeddings [T, D] to float32 [N, T, D]; [0, 0, 0] for none.

    Raises: ValueError naming the `episode_id` whose embedding differs in size from the first one,
    or is not finite.
    """
    for trajectory, embedding in zip(trajectories, embeddings, strict=True):
        if embedding.shape != embeddings[0].shape:
            raise ValueError(
                f"embedding of episode {trajectory.episode.episode_id} is {list(embedding.shape)}, "
                f"but that of episode {trajectories[0].episode.episode_id} is "
                f"{list(embeddings[0].shape)}; expected observations of one size."
            )
        if not np.isfinite(embedding).all():
            raise cannot_embed(trajectory, "its embedding is not finite")
    return np.stack(embeddings) if embeddings else np.empty((0, 0, 0), dtype=np.float32)


def _of_another_camera(
    trajectory: Trajectory, frames_key: str | None, image_key: str
) -> ConfigError:
    shown = (
        f"the frames that episode {trajectory.episode.episode_id} kept between its decisions show "
        f"{'what its environment renders, which may be anything' if frames_key is None else repr(frames_key)}"
    )
    return ConfigError(
        f"EmbeddingConfig.image_key is {image_key!r}, but {shown}; expected one camera in a video. "
        f"Make the environment with render_key={image_key!r}, which LIBERO's takes and one of your "
        "own has as an attribute, or let the agent keep no frames (frames_every=None)."
    )


def cannot_embed(trajectory: Trajectory, why: str) -> ValueError:
    """Return the error for a trajectory that cannot be embedded, naming its episode."""
    return ValueError(f"episode {trajectory.episode.episode_id} cannot be embedded: {why}.")
