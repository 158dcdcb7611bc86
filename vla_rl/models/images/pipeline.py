"""Image pipelines by name: every step between a camera's frame and the vision towers.

Systems that share weights differ in these steps; `vla_rl.models.images.names` lists which system
uses which. Frames are already rotated by 180 degrees: `LiberoEnv` does that.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

import torch
from torch import Tensor

from vla_rl.models.images.jpeg import jpeg_round_trip
from vla_rl.models.images.names import ImagePipelineName
from vla_rl.models.images.resampling import centre_crop, lanczos3, pillow_bicubic, torch_bicubic

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
