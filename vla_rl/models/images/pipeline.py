"""What happens to a frame before the vision towers, as one named setting: systems that share weights differ here.

`vla_rl.models.images.names` says which is whose. Frames come turned by 180 degrees already: `LiberoEnv` shows them so.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor

from vla_rl.models.images.jpeg import jpeg_round_trip
from vla_rl.models.images.names import ImagePipelineName
from vla_rl.models.images.resampling import centre_crop, lanczos3

ImagePipeline: TypeAlias = Callable[[Tensor, int], Tensor]
"""(uint8 [B, 3, H, W], size) -> uint8 [B, 3, size, size], on the device of its input."""


def image_pipeline(name: ImagePipelineName) -> ImagePipeline:
    """The pipeline of that name."""
    return _PIPELINES[name]


def _exact(images: Tensor, size: int) -> Tensor:
    return centre_crop(lanczos3(jpeg_round_trip(images), size))


def _bicubic(images: Tensor, size: int) -> Tensor:
    if images.shape[-2:] == (size, size):
        return images.contiguous()
    return torch.nn.functional.interpolate(
        images, size=(size, size), mode="bicubic", antialias=True, align_corners=False
    ).contiguous()


_PIPELINES: Final[dict[ImagePipelineName, ImagePipeline]] = {"exact": _exact, "bicubic": _bicubic}
