"""Image processing of the public checkpoints, by name.

JPEG, TensorFlow's resampling and the crop are batched, on any device; start reading at
`pipeline.py`. This module has what configurations need, so that they can name a pipeline without
importing torch.
"""

from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from vla_rl.types import Config, NonNegativeFloat, Share

ImagePipelineName: TypeAlias = Literal[
    "exact", "crop", "bicubic", "bicubic_float", "bicubic_pillow"
]
"""Steps between a camera's frame and what the vision towers see:

    exact            JPEG, lanczos3, central crop of 0.9 of the area: LIBERO in OpenVLA, OpenVLA-OFT, SimpleVLA-RL, SRPO
    crop             the central crop of the raw frame alone: RoboTwin in SimpleVLA-RL and RLinf
    bicubic          torch's antialiased bicubic in fixed-point arithmetic: policies trained from scratch here
    bicubic_float    torch's in float32, clamped and rounded: RLinf's own version of OpenVLA and OpenVLA-OFT
    bicubic_pillow   Pillow's: RLinf's version for models of the official OpenVLA-OFT
"""

CROPPING: Final[tuple[ImagePipelineName, ...]] = ("exact", "crop")
"""Pipelines whose policies were trained on random crops."""


class AugmentationConfig(Config, frozen=True, kw_only=True):
    """Strength of the augmentation; the defaults are OpenVLA's."""

    crop_area: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """Share of the area that a random crop keeps."""

    brightness: Share = 0.2
    """Largest value added to all pixel values, which lie between 0 and 1; drawn from [-brightness,
    brightness]."""

    contrast: tuple[NonNegativeFloat, NonNegativeFloat] = (0.8, 1.2)
    """Range of the contrast factor, which scales the distance of values from their channel's
    mean."""

    saturation: tuple[NonNegativeFloat, NonNegativeFloat] = (0.8, 1.2)
    """Range of the saturation factor."""

    hue: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.05
    """Largest rotation of the hue, as a share of the colour circle."""

    def __post_init__(self) -> None:
        for field in ("contrast", "saturation"):
            low, high = getattr(self, field)
            self.require(low <= high, field, "two factors, the lower one first")
