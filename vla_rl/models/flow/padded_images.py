"""Images for flow policies: resized with their proportions kept, padded, scaled to [-1, 1].

    LeRobot    bilinear in float32, without antialiasing
    openpi     Pillow's bilinear filter on bytes: antialiased, rounded

Both pad evenly on two sides with black, which is -1 (openpi's `image_tools.resize_with_pad`); LeRobot's
SmolVLA pads on the left and above alone (its `resize_with_pad`).
"""

from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from vla_rl.models.flow.normalization import Project

BLACK = -1.0

Padding: TypeAlias = Literal["even", "left_top"]
"""Sides on which black pixels are added: two of them evenly, or the left and the upper one."""


def resize_padded(images: Tensor, size: int, project: Project, padding: Padding = "even") -> Tensor:
    """Resize images into a square.

    Args:
        images: uint8 [B, 3, H, W].
        size: S, pixels along a side.
        project: whose resampling.
        padding: where the square is filled up.

    Returns: float32 [B, 3, S, S] in [-1, 1].
    """
    height, width = images.shape[-2:]
    scaled = images
    if (height, width) != (size, size):
        ratio = max(width / size, height / size)
        inner = (max(1, int(height / ratio)), max(1, int(width / ratio)))
        scaled = (
            _resize_bytes(images, inner) if project == "openpi" else _resize_plain(images, inner)
        )
    numbers = scaled.float() / 255.0 * 2.0 - 1.0
    missing = [size - length for length in numbers.shape[-2:]]
    top, left = missing if padding == "left_top" else [length // 2 for length in missing]
    below, right = size - numbers.shape[-2] - top, size - numbers.shape[-1] - left
    return functional.pad(numbers, (left, right, top, below), value=BLACK)


def _resize_plain(images: Tensor, inner: tuple[int, int]) -> Tensor:
    return functional.interpolate(images.float(), size=inner, mode="bilinear", align_corners=False)


def _resize_bytes(images: Tensor, inner: tuple[int, int]) -> Tensor:
    floats = functional.interpolate(
        images.float(), size=inner, mode="bilinear", align_corners=False, antialias=True
    )
    return floats.round().clamp(0.0, 255.0).to(torch.uint8)
