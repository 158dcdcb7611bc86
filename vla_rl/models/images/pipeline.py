"""Image pipelines by name: every step between a camera's frame and the vision towers.

Systems that share weights differ in these steps; `ImagePipelineName` lists which system uses which.
Frames are already rotated by 180 degrees: `LiberoEnv` does that.

TensorFlow's and Pillow's resampling are computed in torch, on any device: the public checkpoints'
images were made by them.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device
from vla_rl.models.images import ImagePipelineName
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


def _jpeg(images: Tensor, size: int) -> Tensor:
    return jpeg_round_trip(images)


def _bicubic(images: Tensor, size: int) -> Tensor:
    # the same bytes on every device; torch's own kernel, the faster one, exists on CPUs alone
    on_cpu = images.device.type == "cpu"
    return _unless_sized(images, size, _interpolated if on_cpu else torch_bicubic)


def _bicubic_float(images: Tensor, size: int) -> Tensor:
    return _unless_sized(
        images, size, lambda frames, to: _interpolated(frames.float(), to).clamp(0, 255).round()
    )


def _bicubic_pillow(images: Tensor, size: int) -> Tensor:
    return _unless_sized(images, size, pillow_bicubic)


def _unless_sized(images: Tensor, size: int, resize: ImagePipeline) -> Tensor:
    """Resize images unless they have the wanted size already."""
    resized = images if images.shape[-2:] == (size, size) else resize(images, size)
    return resized.to(torch.uint8).contiguous()


def _interpolated(images: Tensor, size: int) -> Tensor:
    return torch.nn.functional.interpolate(
        images, size=(size, size), mode="bicubic", antialias=True, align_corners=False
    )


_STAGES: Final[dict[ImagePipelineName, dict[str, ImagePipeline]]] = {
    "exact": {"jpeg": _jpeg, "resize": lanczos3, "crop": centre_crop},
    "crop": {"crop": centre_crop},
    "bicubic": {"resize": _bicubic},
    "bicubic_float": {"resize": _bicubic_float},
    "bicubic_pillow": {"resize": _bicubic_pillow},
}
