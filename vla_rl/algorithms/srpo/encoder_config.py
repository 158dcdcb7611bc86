"""How a trajectory becomes what SRPO compares: which encoder looks at it, and how much it sees."""

from typing import Final

from vla_rl.algorithms.choices import check_choice
from vla_rl.types import Config

ENCODERS: Final = ("pixels", "policy", "state", "vjepa2")
PRECISIONS: Final = ("bfloat16", "float16", "float32")
SHORT_VIDEOS: Final = ("cyclic", "stretched")


class VJepa2Config(Config, frozen=True, kw_only=True):
    """V-JEPA 2 (Assran et al. 2025, arXiv:2506.09985), any public size, as transformers has it."""

    folder: str = ""
    """Folder of the checkpoint, or its name on the Hugging Face hub, such as `facebook/vjepa2-vitg-fpc64-384`. Nothing but
    safetensors is read and no code of the checkpoint runs."""

    num_frames: int = 64
    """Frames the model sees of each trajectory, first and last included; a multiple of its tubelets of 2."""

    image_size: int = 384
    """Side in pixels that the model sees; the short side is resized to 256/224 of it, and the middle is cut out."""

    num_moments: int = 1
    """Vectors a trajectory is told in, in the order of time: 1 is the mean over all tokens, as in the paper. More of them,
    which the rule `aligned` needs, are means over equal stretches of time; a divisor of num_frames / 2."""

    short_videos: str = "cyclic"
    """What is done with fewer frames than `num_frames`. `cyclic`: the video starts over, as in the released code.
    `stretched`: frames are shown several times in place."""

    precision: str = "float16"
    """Of weights and activations. The mean over tokens is taken in float32."""

    videos_per_batch: int = 1
    """Videos embedded at the same time: bounds the memory. One of 64 frames at 384 px has 18432 tokens."""

    offload: bool = False
    """Keep the weights on the CPU, and on the device only while a group is embedded."""

    def __post_init__(self) -> None:
        check_choice(PRECISIONS, self.precision, "VJepa2Config.precision")
        check_choice(SHORT_VIDEOS, self.short_videos, "VJepa2Config.short_videos")
        self.require(self.num_frames >= 2 and self.num_frames % 2 == 0, "num_frames", "an even number of frames")
        self.require(self.image_size >= 16, "image_size", "at least one patch of 16 pixels")
        divides = self.num_moments >= 1 and (self.num_frames // 2) % self.num_moments == 0
        self.require(divides, "num_moments", f"a divisor of {self.num_frames // 2}, the tubelets of a video")
        in_order = self.num_moments == 1 or self.short_videos == "stretched"
        self.require(in_order, "short_videos", "'stretched' with several moments, which are in the order of time")
        self.require(self.videos_per_batch >= 1, "videos_per_batch", "at least one video")


class EmbeddingConfig(Config, frozen=True, kw_only=True):
    """Which observations of a trajectory are looked at, and how."""

    encoder: str = "pixels"
    """`pixels`: the image, averaged down to a small one. `state`: the state vector as it is. `policy`: the policy's own
    vision tower, as it was when the run began. `vjepa2`: V-JEPA 2."""

    num_frames: int = 16
    """Moments taken from each trajectory by `pixels`, `state` and `policy`, evenly spaced, the final one included; >= 1."""

    image_size: int = 16
    """Height and width that `pixels` averages the image down to; >= 1."""

    image_key: str = "image"
    """Observation key of the uint8 [H, W, 3] image. Frames that an agent kept between two decisions must be of it too:
    in LIBERO they are of the environment's `render_key`."""

    state_key: str = "state"
    """Observation key of the [D] vector for `state`."""

    vjepa2: VJepa2Config = VJepa2Config()

    def __post_init__(self) -> None:
        check_choice(ENCODERS, self.encoder, "EmbeddingConfig.encoder")
        self.require(self.num_frames >= 1, "num_frames", "at least one moment")
        self.require(self.image_size >= 1, "image_size", "at least one pixel")
        has_folder = self.encoder != "vjepa2" or bool(self.vjepa2.folder)
        self.require(has_folder, "encoder", "embedding.vjepa2.folder to name a V-JEPA 2 checkpoint as well")
