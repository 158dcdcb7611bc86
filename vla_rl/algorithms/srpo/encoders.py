"""Embedding of trajectories for SRPO: T vectors each, in the order of time.

    video or states of one trajectory ─► T moments ─► encoder ─► float32 [T, D]

This module has two encoders in plain NumPy: downscaled images, and the simulator's state vector.
Encoders with a network are in `vla_rl.models.trajectory_encoders`, behind the same protocol.

A trajectory is embedded only from its own data; nothing is looked up by task or by name, so members
of one group cannot share an embedding by accident.
"""

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from vla_rl.errors import ConfigError
from vla_rl.types import Config, PositiveInt, ReadIf, Trajectory

Encoder: TypeAlias = Literal["pixels", "policy", "state", "vjepa2"]
ShortVideos: TypeAlias = Literal["cyclic", "stretched"]


class VJepa2Config(Config, frozen=True, kw_only=True):
    """V-JEPA 2 of any public size, as implemented in transformers.

    Assran et al. 2025, arXiv:2506.09985.
    """

    folder: str = ""
    """Checkpoint folder, or name on the Hugging Face hub, such as `facebook/vjepa2-vitg-fpc64-384`.
    Only safetensors files are read, and no code of the checkpoint is run."""

    num_frames: Annotated[int, msgspec.Meta(ge=2, multiple_of=2)] = 64
    """Number of frames that the model sees of each trajectory, first and last included; a multiple
    of its tubelet length of 2."""

    image_size: Annotated[int, msgspec.Meta(ge=16)] = 384
    """Side of the square that the model sees, in pixels. The image's short side is resized to
    256/224 of it, then the centre is cropped."""

    num_moments: PositiveInt = 1
    """Number of time segments embedded per trajectory, a divisor of num_frames / 2. 1 embeds the
    mean over all tokens, as in the paper; the rule `aligned` needs more, each the mean over an
    equal stretch of time."""

    short_videos: ShortVideos = "cyclic"
    """Handling of videos with fewer than `num_frames` frames. `cyclic`: start over from the first
    frame, as in the released code. `stretched`: repeat frames in place, so that the order of time
    is kept."""

    precision: Literal["bfloat16", "float16", "float32"] = "float16"
    """Data type of weights and activations. The mean over tokens is
    computed in float32."""

    videos_per_batch: PositiveInt = 1
    """Videos embedded at the same time. Raise it for speed, lower it for memory; 64 frames at 384
    px are 18432 tokens."""

    offload: bool = False
    """Keep the weights on the CPU, and move them to the device only while a group is embedded.
    Saves GPU memory, costs time."""

    def __post_init__(self) -> None:
        divides = (self.num_frames // 2) % self.num_moments == 0
        self.require(
            divides, "num_moments", f"a divisor of {self.num_frames // 2}, the tubelets of a video"
        )
        # a cyclic video shows its beginning again at the end, so that its last moments would be
        # those of its first frames
        in_order = self.num_moments == 1 or self.short_videos == "stretched"
        self.require(
            in_order,
            "short_videos",
            "'stretched' with several moments, which are in the order of time",
        )


class EmbeddingConfig(Config, frozen=True, kw_only=True):
    """Settings of the observations that are embedded, and of their encoder."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("num_frames",), "encoder", ("pixels", "state", "policy")),
        ReadIf(("image_size",), "encoder", ("pixels",)),
        ReadIf(("image_key",), "encoder", ("pixels", "vjepa2")),
        ReadIf(("state_key",), "encoder", ("state",)),
        ReadIf(("vjepa2",), "encoder", ("vjepa2",)),
    )

    encoder: Encoder = "pixels"
    """Encoder of the trajectories. `pixels`: the image, averaged down to `image_size`. `state`: the
    state vector, unchanged. `policy`: the policy's own vision tower, as it was at the start of the
    run. `vjepa2`: V-JEPA 2."""

    num_frames: PositiveInt = 16
    """Number of moments that `pixels`, `state` and `policy` take from each trajectory, evenly
    spaced, the last observation included."""

    image_size: PositiveInt = 16
    """Height and width to which `pixels` averages the image down."""

    image_key: str = "image"
    """Observation key of the uint8 [H, W, 3] image. Frames kept between two decisions must come
    from the same
    camera: in LIBERO, the one that the environment's `render_key` names."""

    state_key: str = "state"
    """Observation key of the [D] vector that `state` embeds."""

    vjepa2: VJepa2Config = VJepa2Config()

    def __post_init__(self) -> None:
        has_folder = self.encoder != "vjepa2" or bool(self.vjepa2.folder)
        self.require(
            has_folder, "encoder", "embedding.vjepa2.folder to name a V-JEPA 2 checkpoint as well"
        )


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
        # in a thread: groups are embedded as they complete, while the loop serves episodes that
        # still run
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
    return stack_embeddings(
        trajectories, [trajectory_embedding(trajectory, config) for trajectory in trajectories]
    )


def trajectory_embedding(trajectory: Trajectory, config: EmbeddingConfig) -> NDArray[np.float32]:
    """Embed one trajectory: float32 [T, D], moments in the order of time.

    Moment j is observation round(j * (n - 1) / (T - 1)) of all n, so a short trajectory repeats
    some in place. T = 1 takes the final observation.

    Raises: ValueError naming the `episode_id` whose observation lacks the key or has another size.
    """
    observed = (
        observed_values(trajectory, config.state_key)
        if config.encoder == "state"
        else video_frames(trajectory, config.image_key)
    )
    chosen = evenly_spaced(len(observed), config.num_frames)
    # each chosen moment once, because a short episode repeats some of them
    vectors = {
        int(index): _vector(trajectory, observed[index], config) for index in set(chosen.tolist())
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
    # areas and not samples of pixels: something that is two pixels wide would appear and vanish as
    # it moves
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
    trajectory: Trajectory, observed: NDArray[np.generic], config: EmbeddingConfig
) -> NDArray[np.float32]:
    if config.encoder == "pixels":
        return area_resize(np.asarray(observed, np.uint8), config.image_size).reshape(-1)
    if observed.ndim != 1 or observed.size == 0:
        raise cannot_embed(
            trajectory, f"{config.state_key!r} is {list(observed.shape)}, expected [D]"
        )
    return np.asarray(observed, np.float32)


def _require_numpy(config: EmbeddingConfig) -> None:
    if config.encoder not in ("pixels", "state"):
        raise ConfigError(
            f"EmbeddingConfig.encoder is {config.encoder!r}, expected 'pixels' or 'state' here; "
            "vla_rl.models.trajectory_encoders makes the encoders that have a network."
        )


def observed_values(trajectory: Trajectory, key: str) -> list[NDArray[Any]]:
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


def video_frames(trajectory: Trajectory, image_key: str) -> list[NDArray[np.uint8]]:
    """Return the frames that the steps kept, if any, else the images of the observations.

    A kept video begins with the first observation's image, which no step has run before, and ends
    with the final one's.

    Returns: uint8 [H, W, 3] each, at least one, all of one size. Raises: ValueError naming the
    `episode_id` otherwise; ConfigError if kept frames are not known to be of `image_key`.
    """
    images = observed_values(trajectory, image_key)
    # frames between decisions exist only if an agent kept them: a chunk renders once, because
    # nobody looks at the frames in between
    kept = []
    for step in trajectory.steps:
        if step.frames is not None:
            if step.frames_key != image_key:
                raise _wrong_camera_error(trajectory, step.frames_key, image_key)
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


def stack_embeddings(
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


def _wrong_camera_error(
    trajectory: Trajectory, frames_key: str | None, image_key: str
) -> ConfigError:
    kept = (
        f"the frames that episode {trajectory.episode.episode_id} kept between its decisions show "
        f"{'what its environment renders, which may be anything' if frames_key is None else repr(frames_key)}"
    )
    return ConfigError(
        f"EmbeddingConfig.image_key is {image_key!r}, but {kept}; expected one camera in a video. "
        f"Make the environment with render_key={image_key!r}, which LIBERO's takes and one of your "
        "own has as an attribute, or let the agent keep no frames (frames_every=None)."
    )


def cannot_embed(trajectory: Trajectory, why: str) -> ValueError:
    """Return the error for a trajectory that cannot be embedded, naming its episode."""
    return ValueError(f"episode {trajectory.episode.episode_id} cannot be embedded: {why}.")
