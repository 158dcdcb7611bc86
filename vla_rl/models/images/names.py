"""Names of the image pipelines, for configurations; imports without torch."""

from typing import Final, Literal, TypeAlias

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
