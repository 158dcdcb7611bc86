"""Settings of SRPO's rewards: the rule, its clusters, the encoder of trajectories."""

from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec

from vla_rl.types import FINITE, Config, NonNegativeInt, PositiveInt, ReadIf, Share

Rule: TypeAlias = Literal["aligned", "paper", "released"]
Clustering: TypeAlias = Literal["hdbscan", "k_distance"]


class SrpoConfig(Config, frozen=True, kw_only=True):
    """Settings of the rewards that distances to the references become."""

    # options that the chosen rule does not read are reported: a sweep over them would show a
    # difference that is noise
    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("alpha",), "rule", ("paper", "aligned")),
        ReadIf(("clusters", "radius_scale"), "rule", ("paper",)),
        ReadIf(("radius_scale",), "clusters", ("k_distance",)),
        ReadIf(("carry_over",), "references", ("task",)),
    )

    rule: Rule = "aligned"
    """Reward rule of failures. `aligned`: the share of the nearest success that the failure
    retraced (ours). `paper`: distances between whole trajectories, z-score, sigmoid, alpha.
    `released`: the authors' code with its fixed constants."""

    references: Literal["group", "task"] = "task"
    """Successes that a failure is compared with. `task`: those of its task, from all groups of the
    update, as in the paper. `group`: those of its own group, for tasks whose starts show different
    places; a group without a success gets rewards of 0."""

    alpha: Share = 0.8
    """Weight of a failure's progress for `paper` and `aligned`; 0 gives the plain
    success reward."""

    clusters: Clustering = "k_distance"
    """Clustering of successes into references, for `paper`. `k_distance`: DBSCAN with a radius
    computed from the data. `hdbscan`: clusters of any density; needs dozens of successes per
    task."""

    radius_scale: Annotated[float, msgspec.Meta(gt=0, le=FINITE)] = 1.5
    """Radius of `k_distance`, in multiples of the median distance between neighbouring
    successes."""

    carry_over: NonNegativeInt = 16
    """Number of the newest successes kept per task as references for updates in which the task is
    not solved; 0 keeps none."""


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
