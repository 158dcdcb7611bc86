"""Image pipelines by name: every step between a camera's frame and the vision towers.

Systems that share weights differ in these steps; `ImagePipelineName` lists which system uses which.
Frames are already rotated by 180 degrees: `LiberoEnv` does that.

TensorFlow's and Pillow's resampling are computed in torch, on any device: the public checkpoints'
images were made by them.

Training adds the random steps of OpenVLA's fine-tuning (dlimp's `augment_image`):

    random crop of 0.9 of the area, scaled back ─► brightness ─► contrast ─► saturation ─► hue

Each frame of each camera has its own random draws. The crop's two edges are drawn separately; dlimp
reportedly draws both from one seed, which moves its box along the diagonal only. Values are clipped
to [0, 1] after each step. In rollout and evaluation, the pipelines `exact` and `crop` take the middle
of the frame instead of a random part. Policies that see whole frames are augmented in colour only: a
crop would train them on another scale than they act on.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Final, TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device
from vla_rl.models.images import CROPPING, AugmentationConfig, ImagePipelineName
from vla_rl.models.images.jpeg import jpeg_round_trip

LANCZOS_RADIUS: Final = 3.0
BICUBIC_RADIUS: Final = 2.0
PILLOW_BITS: Final = 22
"""Fraction bits of Pillow's weights for 8-bit images."""

CENTRE_CROP_AREA: Final = 0.9
"""Share of the image's AREA that the centre crop of training and evaluation keeps; each side keeps
the square root of it."""


def lanczos3(images: Tensor, size: int) -> Tensor:
    """Resize uint8 [B, 3, H, W] to uint8 [B, 3, size, size], antialiased.

    Samples stand at half pixels and the kernel widens with the scale. At the border, taps outside
    the image are dropped and the rest is renormalised. Rows first, then columns, in float32;
    rounded half to even.
    """
    height, width = images.shape[-2:]
    down = to_device(torch.from_numpy(_lanczos_matrix(height, size)), images.device)
    along = to_device(torch.from_numpy(_lanczos_matrix(width, size)), images.device)
    resized = down @ (images.float() @ along.T)
    return resized.round().clamp(0.0, 255.0).to(torch.uint8)


# Evaluation crops the centre because training cropped at random: without it every object is
# smaller than the policy has seen it.
def centre_crop(images: Tensor, size: int | None = None, area: float = CENTRE_CROP_AREA) -> Tensor:
    """Cut the central box of `area` (a share) out of uint8 [B, 3, H, W] and scale it to a square of
    `size`, bilinearly.

    Without a size it is scaled back to [H, W]. Corner-aligned: the first and last sample stand on
    the box's edges. uint8 is converted to float and back as TensorFlow does it: times 1/255, then
    floor(255.5 x).
    """
    height, width = images.shape[2:] if size is None else (size, size)
    images = images.float() * float(np.float32(1.0 / 255.0))
    return to_uint8(_lerp(_lerp(images, 3, width, area), 2, height, area))


def to_uint8(images: Tensor) -> Tensor:
    """Convert float [0, 1] to uint8 as `tf.image.convert_image_dtype(saturate=True)`: floor(255.5
    x), not round(255 x).
    """
    return (images.clamp(0.0, 1.0) * 255.5).floor().clamp(max=255.0).to(torch.uint8)


def pillow_bicubic(images: Tensor, size: int) -> Tensor:
    """Resize uint8 [B, 3, H, W] to uint8 [B, 3, size, size] as `Image.resize(..., BICUBIC)`, byte
    for byte.
    """
    return _fixed_point_bicubic(images, size, _pillow_weights)


def torch_bicubic(images: Tensor, size: int) -> Tensor:
    """Resize uint8 [B, 3, H, W] to uint8 [B, 3, size, size] as torch's antialiased bicubic does on
    a CPU, byte for byte: on a GPU, torch has none for bytes.
    """
    return _fixed_point_bicubic(images, size, _torch_weights)


def _fixed_point_bicubic(
    images: Tensor, size: int, weights_of: Callable[[int, int], tuple[np.ndarray, int]]
) -> Tensor:
    """Resize along rows, then along columns, each with whole numbers as weights and rounded to a
    byte.

    Args:
        weights_of: from (num_in, num_out) to whole numbers [num_out, num_in] and their fraction
            bits.
    """
    resized = images.double()
    for num_in, is_along_rows in ((images.shape[-1], True), (images.shape[-2], False)):
        matrix, bits = weights_of(num_in, size)
        weights = to_device(torch.from_numpy(matrix), images.device)
        # integers up to 2**31 are exact in float64, in whatever order they are summed
        sums = resized @ weights.T if is_along_rows else weights @ resized
        resized = ((sums + 2.0 ** (bits - 1)) / 2.0**bits).floor().clamp(0.0, 255.0)
    return resized.to(torch.uint8)


def _lerp(images: Tensor, dim: int, num_out: int, area: float) -> Tensor:
    num_in = images.shape[dim]
    side = np.float32(np.sqrt(np.float32(area)))
    start = (np.float32(1.0) - side) / np.float32(2.0)
    step = (
        side * np.float32(num_in - 1) / np.float32(num_out - 1) if num_out > 1 else np.float32(0.0)
    )
    position = start * np.float32(num_in - 1) + np.arange(num_out, dtype=np.float32) * step
    low = np.floor(position).astype(np.int64)
    fraction, below, above = (
        to_device(torch.from_numpy(each), images.device)
        for each in (position - low.astype(np.float32), low, np.minimum(low + 1, num_in - 1))
    )
    first, second = images.index_select(dim, below), images.index_select(dim, above)
    return first + (second - first) * fraction.view(
        [-1 if axis == dim else 1 for axis in range(images.ndim)]
    )


@lru_cache(maxsize=64)
def _pillow_weights(num_in: int, num_out: int) -> tuple[np.ndarray, int]:
    return _to_integers(_bicubic_matrix(num_in, num_out), PILLOW_BITS), PILLOW_BITS


@lru_cache(maxsize=64)
def _torch_weights(num_in: int, num_out: int) -> tuple[np.ndarray, int]:
    """Return weights with as many fraction bits, at most 22, as keep each of them in 16 bits."""
    matrix = _bicubic_matrix(num_in, num_out)
    largest = float(matrix.max())
    bits = next((bits for bits in range(22) if int(0.5 + largest * 2.0 ** (bits + 1)) >= 2**15), 22)
    return _to_integers(matrix, bits), bits


def _to_integers(matrix: np.ndarray, bits: int) -> np.ndarray:
    """Return weights times 2**bits, rounded half away from zero."""
    scaled = matrix * 2.0**bits
    return np.asarray(np.trunc(scaled + np.copysign(0.5, scaled)))


def _bicubic_matrix(num_in: int, num_out: int) -> np.ndarray:
    """Return the weights of the antialiased bicubic kernel, float64 [num_out, num_in]; every row
    sums to 1.
    """
    step = num_in / num_out
    widening = max(step, 1.0)
    reach = BICUBIC_RADIUS * widening
    matrix = np.zeros((num_out, num_in))
    for row in range(num_out):
        centre = (row + 0.5) * step
        first, last = max(int(centre - reach + 0.5), 0), min(int(centre + reach + 0.5), num_in)
        weights = [_cubic((tap - centre + 0.5) * (1.0 / widening)) for tap in range(first, last)]
        matrix[row, first:last] = np.array(weights) * (1.0 / sum(weights))
    return matrix


def _cubic(x: float) -> float:
    """Keys' kernel with a = -1/2."""
    x = abs(x)
    if x < 1.0:
        return (1.5 * x - 2.5) * x * x + 1.0
    return ((2.5 - 0.5 * x) * x - 4.0) * x + 2.0 if x < 2.0 else 0.0


@lru_cache(maxsize=64)
def _lanczos_matrix(num_in: int, num_out: int) -> np.ndarray:
    """Return the weights, float32 [num_out, num_in]; every row sums to 1.

    Rounds to float32 where TensorFlow rounds.
    """
    one, half = np.float32(1.0), np.float32(0.5)
    step = one / (np.float32(num_out) / np.float32(num_in))
    widening = max(step, one)
    centres = (np.arange(num_out, dtype=np.float32) + half) * step
    distance = (np.arange(num_in, dtype=np.float32) + half - centres[:, None]) * (one / widening)
    kernel = np.sinc(distance.astype(np.float64)) * np.sinc(
        distance.astype(np.float64) / LANCZOS_RADIUS
    )
    weights = np.where(np.abs(distance) <= LANCZOS_RADIUS, kernel, 0.0).astype(np.float32)
    sums = np.cumsum(weights, axis=1, dtype=np.float32)[:, -1:]  # tap by tap
    return np.asarray(weights * (one / sums), np.float32)


ImagePipeline: TypeAlias = Callable[[Tensor, int], Tensor]
"""(uint8 [B, 3, H, W], size) -> uint8 [B, 3, size, size], on the device of its input."""


def image_pipeline(name: ImagePipelineName) -> ImagePipeline:
    """Return the pipeline of that name."""
    stages = image_stages(name)

    def pipeline(images: Tensor, size: int) -> Tensor:
        for stage in stages.values():
            images = stage(images, size)
        return images

    return pipeline


def image_stages(name: ImagePipelineName) -> dict[str, ImagePipeline]:
    """Return the steps of a pipeline in their order, by name: jpeg, resize and crop, or some of
    them.
    """
    return _STAGES[name]


def _bicubic(images: Tensor, size: int) -> Tensor:
    # the same bytes on every device; torch's own kernel, the faster one, exists on CPUs alone
    on_cpu = images.device.type == "cpu"
    return _unless_sized(images, size, _interpolated if on_cpu else torch_bicubic)


def _bicubic_float(images: Tensor, size: int) -> Tensor:
    return _interpolated(images.float(), size).clamp(0, 255).round()


def _unless_sized(images: Tensor, size: int, resize: ImagePipeline) -> Tensor:
    """Resize images unless they have the wanted size already."""
    resized = images if images.shape[-2:] == (size, size) else resize(images, size)
    return resized.to(torch.uint8).contiguous()


def _interpolated(images: Tensor, size: int) -> Tensor:
    return torch.nn.functional.interpolate(
        images, size=(size, size), mode="bicubic", antialias=True, align_corners=False
    )


_STAGES: Final[dict[ImagePipelineName, dict[str, ImagePipeline]]] = {
    "exact": {
        "jpeg": lambda images, _: jpeg_round_trip(images),
        "resize": lanczos3,
        "crop": centre_crop,
    },
    "crop": {"crop": centre_crop},
    "bicubic": {"resize": _bicubic},
    "bicubic_float": {"resize": partial(_unless_sized, resize=_bicubic_float)},
    "bicubic_pillow": {"resize": partial(_unless_sized, resize=pillow_bicubic)},
}


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
