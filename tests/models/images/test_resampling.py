"""Resampling and cropping give TensorFlow's bytes, or are what they are defined as."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from made_pictures import batch_of, picture

from vla_rl.models.images.pipeline import centre_crop, lanczos3, to_uint8, torch_bicubic

TENSORFLOW = np.load(Path(__file__).parent / "data" / "tensorflow_images.npz")
"""Answers of TensorFlow 2.21 on pictures of `picture`, by what was done to which:
`decode_image(encode_jpeg(quality))`; `resize` (lanczos3, antialiased, rounded); `crop_and_resize`
to 0.9 of the area."""


def oracle_lanczos3(image: np.ndarray, size: int) -> np.ndarray:
    """TensorFlow's antialiased lanczos3 by its definition, sample by sample, in float64."""

    def along_rows(rows: np.ndarray) -> np.ndarray:
        num_in = rows.shape[0]
        widening = max(1.0, num_in / size)
        out = np.zeros((size, *rows.shape[1:]))
        for place in range(size):
            centre = (place + 0.5) * num_in / size
            taps = [tap for tap in range(num_in) if abs(tap + 0.5 - centre) <= 3.0 * widening]
            weights = np.array([kernel((tap + 0.5 - centre) / widening) for tap in taps])
            out[place] = np.tensordot(weights / weights.sum(), rows[taps], axes=1)
        return out

    def kernel(x: float) -> float:
        return (
            1.0
            if x == 0
            else 3 * math.sin(math.pi * x) * math.sin(math.pi * x / 3) / (math.pi * x) ** 2
        )

    wide = along_rows(image.astype(np.float64).transpose(1, 0, 2)).transpose(1, 0, 2)
    return np.clip(along_rows(wide), 0.0, 255.0)


@pytest.mark.parametrize("kind", ["noise", "waves", "edge"])
def test_resampling_gives_tensorflows_bytes(kind: str) -> None:
    down, up, crop = picture(kind, 64, 48), picture(kind, 24, 24), picture(kind, 40, 40)
    for ours, name in (
        (lanczos3(batch_of(down), 40), "lanczos3"),
        (lanczos3(batch_of(up), 40), "lanczos3 up"),
        (centre_crop(batch_of(crop)), "crop"),
    ):
        expected = TENSORFLOW[f"{name} {kind}"].astype(int)
        differs = np.abs(ours[0].permute(1, 2, 0).numpy() - expected)
        # a sum of float32 on the edge between two bytes may fall to either side; on ramps many are
        assert differs.max() <= 1
        assert (differs > 0).mean() <= (0.01 if kind == "waves" else 0.0005)


@pytest.mark.parametrize("kind", ["noise", "waves", "edge"])
def test_lanczos3_is_what_it_is_defined_as(kind: str) -> None:
    image = picture(kind, 64, 48)
    ours = lanczos3(batch_of(image), 40)[0].permute(1, 2, 0).numpy()
    expected = oracle_lanczos3(image, 40)
    assert np.abs(ours - expected).max() <= 0.5 + 1e-3  # rounded, and nothing else


def test_the_crop_keeps_nine_tenths_of_the_area_and_samples_its_corners() -> None:
    """On a ramp, bilinear sampling is exact: sample i stands at offset + i * side * (S - 1) / (S -
    1).
    """
    size = 33
    ramp = np.repeat(
        np.linspace(0, 255, size).round().astype(np.uint8)[None, :, None], size, axis=0
    ).repeat(3, axis=2)
    ours = centre_crop(batch_of(ramp))[0, 0, 5].numpy()
    side = math.sqrt(0.9)
    place = (1 - side) / 2 * (size - 1) + np.arange(size) * side
    low = np.floor(place).astype(int)
    row = ramp[0, :, 0].astype(np.float64)
    expected = row[low] + (row[np.minimum(low + 1, size - 1)] - row[low]) * (place - low)
    np.testing.assert_array_equal(ours, np.floor(expected / 255.0 * 255.5).astype(np.uint8))
    assert place[0] == pytest.approx(0.0256584 * 32, abs=1e-5)


def test_floats_become_bytes_by_flooring() -> None:
    values = torch.tensor([0.0, 0.5 / 255.0, 0.999, 1.0, 1.5, -0.1])
    assert to_uint8(values).tolist() == [0, 0, 255, 255, 255, 0]


@pytest.mark.parametrize("kind", ["noise", "waves", "edge"])
@pytest.mark.parametrize(
    ("height", "width", "size"), [(256, 256, 224), (240, 320, 224), (48, 31, 56), (8, 8, 56)]
)
def test_bicubic_for_gpus_gives_the_bytes_of_torchs_kernel_for_cpus(
    kind: str, height: int, width: int, size: int
) -> None:
    images = batch_of(picture(kind, height, width), picture("noise", height, width))
    expected = torch.nn.functional.interpolate(
        images, size=(size, size), mode="bicubic", antialias=True, align_corners=False
    )
    assert torch.equal(torch_bicubic(images, size), expected)
