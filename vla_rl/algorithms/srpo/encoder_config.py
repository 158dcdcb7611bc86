"""Settings of the encoders with which SRPO compares trajectories."""

from collections.abc import Mapping
from typing import Final

from vla_rl.algorithms.choices import check_choice
from vla_rl.types import Config

ENCODERS: Final = ("pixels", "policy", "state", "vjepa2")
PRECISIONS: Final = ("bfloat16", "float16", "float32")
SHORT_VIDEOS: Final = ("cyclic", "stretched")


class VJepa2Config(Config, frozen=True, kw_only=True):
    """V-JEPA 2 of any public size, as implemented in transformers.

    Assran et al. 2025, arXiv:2506.09985.
    """

    folder: str = ""
    """Checkpoint folder, or name on the Hugging Face hub, such as `facebook/vjepa2-vitg-fpc64-384`.
    Only safetensors files are read, and no code of the checkpoint is run."""

    num_frames: int = 64
    """Number of frames that the model sees of each trajectory, first and last included; a multiple
    of its tubelet length of 2."""

    image_size: int = 384
    """Side of the square that the model sees, in pixels. The image's short side is resized to
    256/224 of it, then the centre is cropped."""

    num_moments: int = 1
    """Number of time segments embedded per trajectory, a divisor of num_frames / 2. 1 embeds the
    mean over all tokens, as in the paper; the rule `aligned` needs more, each the mean over an
    equal stretch of time."""

    short_videos: str = "cyclic"
    """Handling of videos with fewer than `num_frames` frames. `cyclic`: start over from the first
    frame, as in the released code. `stretched`: repeat frames in place, so that the order of time
    is kept."""

    precision: str = "float16"
    """Data type of weights and activations: bfloat16, float16 or float32. The mean over tokens is
    computed in float32."""

    videos_per_batch: int = 1
    """Videos embedded at the same time. Raise it for speed, lower it for memory; 64 frames at 384
    px are 18432 tokens."""

    offload: bool = False
    """Keep the weights on the CPU, and move them to the device only while a group is embedded.
    Saves GPU memory, costs time."""

    def __post_init__(self) -> None:
        check_choice(PRECISIONS, self.precision, "VJepa2Config.precision")
        check_choice(SHORT_VIDEOS, self.short_videos, "VJepa2Config.short_videos")
        self.require(
            self.num_frames >= 2 and self.num_frames % 2 == 0,
            "num_frames",
            "an even number of frames",
        )
        self.require(self.image_size >= 16, "image_size", "at least one patch of 16 pixels")
        divides = self.num_moments >= 1 and (self.num_frames // 2) % self.num_moments == 0
        self.require(
            divides, "num_moments", f"a divisor of {self.num_frames // 2}, the tubelets of a video"
        )
        in_order = self.num_moments == 1 or self.short_videos == "stretched"
        self.require(
            in_order,
            "short_videos",
            "'stretched' with several moments, which are in the order of time",
        )
        self.require(self.videos_per_batch >= 1, "videos_per_batch", "at least one video")


class EmbeddingConfig(Config, frozen=True, kw_only=True):
    """Settings of the observations that are embedded, and of their encoder."""

    encoder: str = "pixels"
    """Encoder of the trajectories. `pixels`: the image, averaged down to `image_size`. `state`: the
    state vector, unchanged. `policy`: the policy's own vision tower, as it was at the start of the
    run. `vjepa2`: V-JEPA 2."""

    num_frames: int = 16
    """Number of moments that `pixels`, `state` and `policy` take from each trajectory, evenly
    spaced, the last observation included; >= 1."""

    image_size: int = 16
    """Height and width to which `pixels` averages the image down; >= 1."""

    image_key: str = "image"
    """Observation key of the uint8 [H, W, 3] image. Frames kept between two decisions must come
    from the same
    camera: in LIBERO, the one that the environment's `render_key` names."""

    state_key: str = "state"
    """Observation key of the [D] vector that `state` embeds."""

    vjepa2: VJepa2Config = VJepa2Config()

    def __post_init__(self) -> None:
        check_choice(ENCODERS, self.encoder, "EmbeddingConfig.encoder")
        self.require(self.num_frames >= 1, "num_frames", "at least one moment")
        self.require(self.image_size >= 1, "image_size", "at least one pixel")
        has_folder = self.encoder != "vjepa2" or bool(self.vjepa2.folder)
        self.require(
            has_folder, "encoder", "embedding.vjepa2.folder to name a V-JEPA 2 checkpoint as well"
        )

    def unread(self) -> Mapping[str, str]:
        """Return the options of other encoders."""
        reads = {
            "pixels": ("num_frames", "image_size", "image_key"),
            "state": ("num_frames", "state_key"),
            "policy": ("num_frames",),
            "vjepa2": ("image_key", "vjepa2"),
        }[self.encoder]
        others = [name for name in self.__struct_fields__ if name not in ("encoder", *reads)]
        return dict.fromkeys(others, f"embedding.encoder is {self.encoder!r}")
