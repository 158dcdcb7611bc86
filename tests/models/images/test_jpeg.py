"""A round trip through JPEG gives TensorFlow's bytes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from made_pictures import batch_of, picture

from vla_rl.models.images.jpeg import jpeg_round_trip

TENSORFLOW = np.load(Path(__file__).parent / "data" / "tensorflow_images.npz")
"""Answers of TensorFlow 2.21 on pictures of `picture`, by what was done to which:
`decode_image(encode_jpeg(quality))`; `resize` (lanczos3, antialiased, rounded); `crop_and_resize`
to 0.9 of the area."""


@pytest.mark.parametrize("size", [(64, 48), (37, 61), (9, 17), (1, 1)])
@pytest.mark.parametrize("quality", [95, 50, 10])
def test_a_jpeg_round_trip_gives_tensorflows_bytes(size: tuple[int, int], quality: int) -> None:
    kinds = ("noise", "waves", "edge")
    ours = (
        jpeg_round_trip(batch_of(*(picture(kind, *size) for kind in kinds)), quality)
        .permute(0, 2, 3, 1)
        .numpy()
    )
    for mine, kind in zip(ours, kinds, strict=True):
        np.testing.assert_array_equal(
            mine, TENSORFLOW[f"jpeg {kind} {size[0]} {size[1]} {quality}"]
        )


def test_other_images_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch.float32 \[1, 3, 8, 8\], expected uint8"):
        jpeg_round_trip(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match="quality is 0"):
        jpeg_round_trip(torch.zeros(1, 3, 8, 8, dtype=torch.uint8), quality=0)
