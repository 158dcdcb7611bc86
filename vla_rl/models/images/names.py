"""Names of the image pipelines, for configurations: imports without torch."""

from typing import Literal, TypeAlias

ImagePipelineName: TypeAlias = Literal["exact", "bicubic"]
"""`exact`: JPEG, lanczos3, crop of 0.9 of the area, as OpenVLA, OpenVLA-OFT, SimpleVLA-RL and SRPO evaluate in LIBERO.
`bicubic`: antialiased bicubic on uint8 and nothing else, as RLinf does, and policies trained from scratch here."""
