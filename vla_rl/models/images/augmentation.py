"""Training augmentation of OpenVLA's fine-tuning, batched in torch (dlimp's `augment_image`).

    random crop of 0.9 of the area, scaled back ─► brightness ─► contrast ─► saturation ─► hue

Each frame of each camera has its own random draws. The crop's two edges are drawn separately; dlimp
reportedly draws both from one seed, which moves its box along the diagonal only. Values are clipped
to [0, 1] after each step, on the device of the input. In rollout and evaluation, the pipelines
`exact` and `crop` take the middle of the frame instead of a random part. Policies that see whole
frames are augmented in colour only: a crop would train them on another scale than they act on.
"""

import msgspec
import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device
from vla_rl.models.images import CROPPING, AugmentationConfig, ImagePipelineName
from vla_rl.models.images.jpeg import jpeg_round_trip
from vla_rl.models.images.pipeline import ImagePipeline, image_pipeline, lanczos3, to_uint8


class AugmentationDraws(msgspec.Struct, frozen=True):
    """Random draws for B frames, float32 [B] each.

    Example:
        AugmentationDraws(top=[0.3], left=[0.8], brightness=[-0.1], contrast=[1.05], saturation=[0.9],
            hue=[0.02])  # one frame
    """

    top: Tensor
    """Upper edge of the crop, as a share of the margin that is cut off: 0 to 1."""

    left: Tensor
    brightness: Tensor
    contrast: Tensor
    saturation: Tensor
    hue: Tensor


def draw_augmentation(
    config: AugmentationConfig, num_frames: int, generator: torch.Generator
) -> AugmentationDraws:
    """Draw independently for each frame, from a generator on the CPU."""

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(num_frames, generator=generator)

    return AugmentationDraws(
        top=uniform(0.0, 1.0),
        left=uniform(0.0, 1.0),
        brightness=uniform(-config.brightness, config.brightness),
        contrast=uniform(*config.contrast),
        saturation=uniform(*config.saturation),
        hue=uniform(-config.hue, config.hue),
    )


def augment(images: Tensor, draws: AugmentationDraws, crop_area: float | None) -> Tensor:
    """Augment uint8 [B, 3, S, S] with these draws; return uint8 of the same shape.

    `crop_area` None leaves the crop out.
    """
    # The order of the steps and the clipping after each are dlimp's: a policy that is fine-tuned
    # here has to see what it saw before.
    values = images.float() / 255.0
    if crop_area is not None:
        values = _cropped(values, draws, crop_area).clamp(0.0, 1.0)
    values = (values + _per_frame(draws.brightness, values)).clamp(0.0, 1.0)
    # Contrast is about the mean of each channel, as in TensorFlow, and not about the mean of the
    # frame's grey as in torchvision.
    mean = values.mean(dim=(2, 3), keepdim=True)
    values = ((values - mean) * _per_frame(draws.contrast, values) + mean).clamp(0.0, 1.0)
    hue, saturation, value = _to_hsv(values)
    saturation = (saturation * to_device(draws.saturation, values.device)[:, None, None]).clamp(
        0.0, 1.0
    )
    values = _from_hsv(
        (hue + to_device(draws.hue, values.device)[:, None, None]) % 1.0, saturation, value
    )
    return to_uint8(values)


def training_pipeline(
    name: ImagePipelineName, config: AugmentationConfig, generator: torch.Generator
) -> ImagePipeline:
    """Return the named pipeline for training: with augmentation, and with a random crop if the
    pipeline has a centre crop.

    Not thread-safe: threads would share `generator`.
    """

    def cropped(images: Tensor, size: int) -> Tensor:
        # The random crop takes the place of the centre crop, after the resize as in RLDS.
        resized = lanczos3(jpeg_round_trip(images) if name == "exact" else images, size)
        return augment(
            resized, draw_augmentation(config, len(resized), generator), config.crop_area
        )

    def uncropped(images: Tensor, size: int) -> Tensor:
        resized = image_pipeline(name)(images, size)
        return augment(resized, draw_augmentation(config, len(resized), generator), None)

    return cropped if name in CROPPING else uncropped


def _per_frame(draws: Tensor, values: Tensor) -> Tensor:
    return to_device(draws, values.device)[:, None, None, None]


def _cropped(values: Tensor, draws: AugmentationDraws, area: float) -> Tensor:
    """Crop boxes of `area` and scale them back bilinearly.

    Corner-aligned, as `tf.image.crop_and_resize`.
    """
    # 0.9 is a share of the area: a crop of 0.9 of the side would zoom in twice as far.
    size, side = values.shape[-1], area**0.5
    steps: Tensor = torch.arange(size, device=values.device) * side
    margin = (size - 1) * (1.0 - side)

    def grid(start: Tensor) -> Tensor:
        points: Tensor = to_device(start, values.device)[:, None] * margin + steps
        return points * (2.0 / (size - 1)) - 1.0

    rows, columns = grid(draws.top), grid(draws.left)
    points = torch.stack(
        [columns[:, None, :].expand(-1, size, -1), rows[:, :, None].expand(-1, -1, size)], dim=-1
    )
    return torch.nn.functional.grid_sample(
        values, points, mode="bilinear", align_corners=True, padding_mode="border"
    )


def _to_hsv(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert [B, 3, H, W] in [0, 1] to hue, saturation and value [B, H, W], all in [0, 1]."""
    value, greatest = rgb.max(dim=1)
    spread = value - rgb.min(dim=1).values
    red, green, blue = rgb.unbind(1)
    divisor = torch.where(spread > 0, spread, 1.0)
    sixths = torch.stack(
        [(green - blue) / divisor, (blue - red) / divisor + 2.0, (red - green) / divisor + 4.0]
    )
    hue = sixths.gather(0, greatest[None])[0] / 6.0 % 1.0
    saturation = torch.where(value > 0, spread / torch.where(value > 0, value, 1.0), 0.0)
    return torch.where(spread > 0, hue, 0.0), saturation, value


def _from_hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """Invert `_to_hsv`; returns [B, 3, H, W]."""

    def channel(offset: float) -> Tensor:
        sixths = (offset + hue * 6.0) % 6.0
        return value - value * saturation * torch.minimum(sixths, 4.0 - sixths).clamp(0.0, 1.0)

    return torch.stack([channel(5.0), channel(3.0), channel(1.0)], dim=1)
