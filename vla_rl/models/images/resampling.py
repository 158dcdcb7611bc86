"""TensorFlow's resampling in torch: what the public checkpoints' images were made with, without TensorFlow.

`tf.image.resize(..., "lanczos3", antialias=True)` and `tf.image.crop_and_resize` differ from torch's own functions in where
they sample and in what they do at the border; these follow TensorFlow, on any device.
"""

from functools import lru_cache
from typing import Final

import numpy as np
import torch
from torch import Tensor

LANCZOS_RADIUS: Final = 3.0
CENTRE_CROP_AREA: Final = 0.9
"""Share of the image's AREA that the centre crop of training and evaluation keeps; a side keeps its square root."""


def lanczos3(images: Tensor, size: int) -> Tensor:
    """Resize uint8 [B, 3, H, W] to uint8 [B, 3, size, size], antialiased.

    Samples stand at half pixels, the kernel widens with the scale, and at the border taps outside the image are dropped
    and the rest is renormalised. Rows first, then columns, in float32; rounded half to even.
    """
    height, width = images.shape[-2:]
    down = torch.from_numpy(_lanczos_matrix(height, size)).to(images.device)
    along = torch.from_numpy(_lanczos_matrix(width, size)).to(images.device)
    resized = down @ (images.float() @ along.T)
    return resized.round().clamp(0.0, 255.0).to(torch.uint8)


def centre_crop(images: Tensor, area: float = CENTRE_CROP_AREA) -> Tensor:
    """Cut the central square of `area` (a share) out of uint8 [B, 3, S, S] and scale it to S again, bilinearly.

    Corner-aligned: the first and last sample stand on the box's edges. uint8 to float and back as TensorFlow does it: times
    1/255, then floor(255.5 x).
    """
    images = images.float() * float(np.float32(1.0 / 255.0))
    for dim in (3, 2):
        images = _lerp(images, dim, area)
    return to_uint8(images)


def to_uint8(images: Tensor) -> Tensor:
    """float [0, 1] to uint8 as `tf.image.convert_image_dtype(saturate=True)`: floor(255.5 x), not round(255 x)."""
    return (images.clamp(0.0, 1.0) * 255.5).floor().clamp(max=255.0).to(torch.uint8)


def _lerp(images: Tensor, dim: int, area: float) -> Tensor:
    size = images.shape[dim]
    side = np.float32(np.sqrt(np.float32(area)))
    start = (np.float32(1.0) - side) / np.float32(2.0)
    step = side * np.float32(size - 1) / np.float32(size - 1) if size > 1 else np.float32(0.0)
    place = start * np.float32(size - 1) + np.arange(size, dtype=np.float32) * step
    low = np.floor(place).astype(np.int64)
    share = torch.from_numpy(place - low.astype(np.float32)).to(images.device)
    first = images.index_select(dim, torch.from_numpy(low).to(images.device))
    second = images.index_select(dim, torch.from_numpy(np.minimum(low + 1, size - 1)).to(images.device))
    return first + (second - first) * share.view([-1 if axis == dim else 1 for axis in range(images.ndim)])


@lru_cache(maxsize=64)
def _lanczos_matrix(num_in: int, num_out: int) -> np.ndarray:
    """float32 [num_out, num_in]; every row sums to 1. Rounded to float32 where TensorFlow rounds."""
    one, half = np.float32(1.0), np.float32(0.5)
    step = one / (np.float32(num_out) / np.float32(num_in))
    widening = max(step, one)
    centres = (np.arange(num_out, dtype=np.float32) + half) * step
    distance = (np.arange(num_in, dtype=np.float32) + half - centres[:, None]) * (one / widening)
    kernel = np.sinc(distance.astype(np.float64)) * np.sinc(distance.astype(np.float64) / LANCZOS_RADIUS)
    weights = np.where(np.abs(distance) <= LANCZOS_RADIUS, kernel, 0.0).astype(np.float32)
    sums = np.cumsum(weights, axis=1, dtype=np.float32)[:, -1:]  # tap after tap
    return np.asarray(weights * (one / sums), np.float32)
