"""Image processing gives the bytes of the reference projects, TensorFlow's among them.

Augmentation does to frames what OpenVLA's fine-tuning does, computed again here in float64 NumPy.
"""

import colorsys
import hashlib
import math
import typing
from pathlib import Path

import golden_recipe
import numpy as np
import pytest
import torch
from made_inputs import make_image, make_image_batch
from PIL import Image

from vla_rl.errors import ConfigError
from vla_rl.models.images import ImagePipelineName
from vla_rl.models.images.jpeg import jpeg_round_trip
from vla_rl.models.images.pipeline import (
    AugmentationConfig,
    AugmentationDraws,
    augment,
    centre_crop,
    draw_augmentation,
    image_pipeline,
    lanczos3,
    to_uint8,
    torch_bicubic,
    training_pipeline,
)

GOLDEN = np.load(Path(__file__).parent / "golden" / "images.npz")


FIXED_POINT = ("bicubic", "bicubic_pillow")

FRAMES = {
    "256x256": golden_recipe.frame(7, 256, 256),
    "240x320": golden_recipe.frame(7, 240, 320),
    "128x128": golden_recipe.frame(7, 128, 128),
    "checks": golden_recipe.checks(200, 300),
}


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize(
    ("name", "project"),
    [("bicubic_float", "rlinf"), ("bicubic_pillow", "official"), ("crop", "robotwin")],
)
def test_a_pipeline_gives_the_bytes_of_the_project_it_is_named_for(
    name: ImagePipelineName, project: str, frame: str
) -> None:
    batch = torch.from_numpy(FRAMES[frame]).permute(2, 0, 1)[None]
    ours = (
        image_pipeline(name)(batch, golden_recipe.IMAGE_SIZE)[0]
        .permute(1, 2, 0)
        .contiguous()
        .numpy()
    )
    np.testing.assert_array_equal(ours[::7, ::7], GOLDEN[f"{project}_{frame}"])
    assert hashlib.sha256(ours).digest() == GOLDEN[f"{project}_{frame}_digest"].tobytes()


@pytest.mark.parametrize("frame", FRAMES)
def test_the_exact_pipeline_gives_openvla_ofts_libero_images_up_to_single_bytes(frame: str) -> None:
    batch = torch.from_numpy(FRAMES[frame]).permute(2, 0, 1)[None]
    ours = image_pipeline("exact")(batch, golden_recipe.IMAGE_SIZE)[0].permute(1, 2, 0).numpy()
    differs = np.abs(ours[::7, ::7].astype(int) - GOLDEN[f"libero_{frame}"])
    # 1 to 4 of all 150,528 bytes of these images: sums of float32 on the edge between two bytes
    assert differs.max() <= 1
    assert (differs > 0).sum() <= 1


@pytest.mark.parametrize("name", ["bicubic", "bicubic_float", "bicubic_pillow"])
def test_frames_of_the_wanted_size_stay_as_they_are(name: ImagePipelineName) -> None:
    batch = torch.from_numpy(golden_recipe.frame(7)).permute(2, 0, 1)[None]
    assert torch.equal(image_pipeline(name)(batch, golden_recipe.IMAGE_SIZE), batch)


def test_the_exact_pipeline_is_jpeg_then_lanczos_then_the_crop() -> None:
    images = make_image_batch(make_image("waves", 256, 256))
    expected = centre_crop(lanczos3(jpeg_round_trip(images), 224))
    assert torch.equal(image_pipeline("exact")(images, 224), expected)


def test_bicubic_leaves_frames_of_the_right_size_alone_and_follows_pillow_otherwise() -> None:
    image = make_image("waves", 256, 256)
    same = image_pipeline("bicubic")(make_image_batch(image), 256)
    np.testing.assert_array_equal(same[0].permute(1, 2, 0).numpy(), image)
    ours = image_pipeline("bicubic")(make_image_batch(image), 224)[0].permute(1, 2, 0).numpy()
    pillow = np.asarray(Image.fromarray(image).resize((224, 224), Image.Resampling.BICUBIC))
    assert np.abs(ours.astype(int) - pillow.astype(int)).max() <= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", typing.get_args(ImagePipelineName))
@pytest.mark.parametrize("frame", FRAMES)
def test_a_gpu_gives_the_bytes_of_a_cpu_up_to_single_ones(
    name: ImagePipelineName, frame: str
) -> None:
    batch = torch.from_numpy(FRAMES[frame]).permute(2, 0, 1)[None]
    expected = image_pipeline(name)(batch, golden_recipe.IMAGE_SIZE).int()
    differs = (
        image_pipeline(name)(batch.to("cuda"), golden_recipe.IMAGE_SIZE).cpu() - expected
    ).abs()
    assert differs.max() <= 1
    # float32 on the edge between two bytes; the fixed-point pipelines have no such edges
    assert (differs > 0).float().mean() <= (0.0 if name in FIXED_POINT else 1e-3)


TENSORFLOW = np.load(Path(__file__).parent / "data" / "tensorflow_images.npz")
"""Answers of TensorFlow 2.21 on images of `image`, by what was done to which:
`decode_image(encode_jpeg(quality))`; `resize` (lanczos3, antialiased, rounded); `crop_and_resize`
to 0.9 of the area."""


def oracle_lanczos3(image: np.ndarray, size: int) -> np.ndarray:
    """TensorFlow's antialiased lanczos3 by its definition, sample by sample, in float64."""

    def along_rows(rows: np.ndarray) -> np.ndarray:
        num_in = rows.shape[0]
        widening = max(1.0, num_in / size)
        out = np.zeros((size, *rows.shape[1:]))
        for position in range(size):
            centre = (position + 0.5) * num_in / size
            taps = [tap for tap in range(num_in) if abs(tap + 0.5 - centre) <= 3.0 * widening]
            weights = np.array([kernel((tap + 0.5 - centre) / widening) for tap in taps])
            out[position] = np.tensordot(weights / weights.sum(), rows[taps], axes=1)
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
    down, up, crop = make_image(kind, 64, 48), make_image(kind, 24, 24), make_image(kind, 40, 40)
    for ours, name in (
        (lanczos3(make_image_batch(down), 40), "lanczos3"),
        (lanczos3(make_image_batch(up), 40), "lanczos3 up"),
        (centre_crop(make_image_batch(crop)), "crop"),
    ):
        expected = TENSORFLOW[f"{name} {kind}"].astype(int)
        differs = np.abs(ours[0].permute(1, 2, 0).numpy() - expected)
        # a sum of float32 on the edge between two bytes may fall to either side; on ramps many are
        assert differs.max() <= 1
        assert (differs > 0).mean() <= (0.01 if kind == "waves" else 0.0005)


@pytest.mark.parametrize("kind", ["noise", "waves", "edge"])
def test_lanczos3_is_what_it_is_defined_as(kind: str) -> None:
    image = make_image(kind, 64, 48)
    ours = lanczos3(make_image_batch(image), 40)[0].permute(1, 2, 0).numpy()
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
    ours = centre_crop(make_image_batch(ramp))[0, 0, 5].numpy()
    side = math.sqrt(0.9)
    position = (1 - side) / 2 * (size - 1) + np.arange(size) * side
    low = np.floor(position).astype(int)
    row = ramp[0, :, 0].astype(np.float64)
    expected = row[low] + (row[np.minimum(low + 1, size - 1)] - row[low]) * (position - low)
    np.testing.assert_array_equal(ours, np.floor(expected / 255.0 * 255.5).astype(np.uint8))
    assert position[0] == pytest.approx(0.0256584 * 32, abs=1e-5)


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
    images = make_image_batch(make_image(kind, height, width), make_image("noise", height, width))
    expected = torch.nn.functional.interpolate(
        images, size=(size, size), mode="bicubic", antialias=True, align_corners=False
    )
    assert torch.equal(torch_bicubic(images, size), expected)


@pytest.mark.parametrize("size", [(64, 48), (37, 61), (9, 17), (1, 1)])
@pytest.mark.parametrize("quality", [95, 50, 10])
def test_a_jpeg_round_trip_gives_tensorflows_bytes(size: tuple[int, int], quality: int) -> None:
    kinds = ("noise", "waves", "edge")
    ours = (
        jpeg_round_trip(make_image_batch(*(make_image(kind, *size) for kind in kinds)), quality)
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


SIZE = 16


def images(num: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)


def draws(**changed: float) -> AugmentationDraws:
    """For one frame; what is not named changes nothing."""
    neutral = {
        "top": 0.5,
        "left": 0.5,
        "brightness": 0.0,
        "contrast": 1.0,
        "saturation": 1.0,
        "hue": 0.0,
        **changed,
    }
    return AugmentationDraws(
        **{name: torch.tensor([value], dtype=torch.float32) for name, value in neutral.items()}
    )


def crop(values: np.ndarray, top: float, left: float, area: float) -> np.ndarray:
    """Corner-aligned bilinear crop of float64 [3, S, S]."""
    size, side = values.shape[-1], np.sqrt(area)
    steps = np.arange(size)
    rows = top * (1 - side) * (size - 1) + steps * side
    columns = left * (1 - side) * (size - 1) + steps * side
    out = np.empty_like(values)
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            r, c = min(int(row), size - 2), min(int(column), size - 2)
            a, b = row - r, column - c
            square = values[:, r : r + 2, c : c + 2]
            weights = np.outer([1 - a, a], [1 - b, b])
            out[:, y, x] = (square * weights).sum((1, 2))
    return out


def oracle(image: np.ndarray, drawn: AugmentationDraws, area: float | None) -> np.ndarray:
    """float64 [3, S, S] in [0, 1]."""
    at = {name: float(getattr(drawn, name)[0]) for name in AugmentationDraws.__struct_fields__}
    values = image.astype(np.float64) / 255
    if area is not None:
        values = crop(values, at["top"], at["left"], area)
    values = np.clip(values + at["brightness"], 0, 1)
    mean = values.mean((1, 2), keepdims=True)
    values = np.clip((values - mean) * at["contrast"] + mean, 0, 1)
    out = np.empty_like(values)
    for y, x in np.ndindex(*values.shape[1:]):
        h, s, v = colorsys.rgb_to_hsv(*values[:, y, x])
        out[:, y, x] = colorsys.hsv_to_rgb((h + at["hue"]) % 1.0, min(s * at["saturation"], 1.0), v)
    return out


@pytest.mark.parametrize(
    ("changed", "area"),
    [
        ({}, None),
        ({"top": 0.0, "left": 1.0}, 0.9),
        ({"brightness": 0.15}, None),
        ({"brightness": -0.2}, None),
        ({"contrast": 1.2}, None),
        ({"saturation": 0.8}, None),
        ({"saturation": 1.2}, None),
        ({"hue": 0.05}, None),
        ({"hue": -0.05}, None),
        (
            {
                "top": 0.3,
                "left": 0.8,
                "brightness": 0.1,
                "contrast": 0.85,
                "saturation": 1.15,
                "hue": -0.04,
            },
            0.9,
        ),
    ],
)
def test_every_step_is_that_of_the_reference(changed: dict[str, float], area: float | None) -> None:
    image, drawn = images(1), draws(**changed)
    got = augment(image, drawn, area)[0].numpy().astype(int)
    wanted = np.minimum(np.floor(oracle(image[0].numpy(), drawn, area) * 255.5), 255).astype(int)
    # a value on the edge between two numbers may fall on either side in float32
    assert np.abs(got - wanted).max() <= 1
    assert (got == wanted).mean() > 0.99


def test_the_middle_crop_is_the_one_of_acting() -> None:
    from vla_rl.models.images.pipeline import centre_crop

    got = augment(
        images(3),
        AugmentationDraws(*[torch.full((3,), value) for value in (0.5, 0.5, 0.0, 1.0, 1.0, 0.0)]),
        0.9,
    )
    assert (got.int() - centre_crop(images(3)).int()).abs().max() <= 1


def test_every_frame_has_draws_of_its_own_from_the_seed() -> None:
    config = AugmentationConfig()
    first = draw_augmentation(config, 2000, torch.Generator().manual_seed(3))
    again = draw_augmentation(config, 2000, torch.Generator().manual_seed(3))
    assert torch.equal(first.hue, again.hue)
    for values, low, high in (
        (first.top, 0.0, 1.0),
        (first.left, 0.0, 1.0),
        (first.brightness, -0.2, 0.2),
        (first.contrast, 0.8, 1.2),
        (first.saturation, 0.8, 1.2),
        (first.hue, -0.05, 0.05),
    ):
        assert low <= float(values.min()) < low + 0.02 * (high - low)
        assert high - 0.02 * (high - low) < float(values.max()) <= high
    assert abs(float(torch.corrcoef(torch.stack([first.top, first.left]))[0, 1])) < 0.1


STILL = AugmentationConfig(brightness=0.0, contrast=(1.0, 1.0), saturation=(1.0, 1.0), hue=0.0)


@pytest.mark.parametrize("name", ["bicubic", "bicubic_float", "bicubic_pillow"])
def test_a_policy_that_sees_whole_frames_is_not_trained_on_crops(name: ImagePipelineName) -> None:
    frames, train = images(2), training_pipeline(name, STILL, torch.Generator().manual_seed(0))
    assert (train(frames, SIZE).int() - image_pipeline(name)(frames, SIZE).int()).abs().max() <= 1


@pytest.mark.parametrize("name", ["exact", "crop"])
def test_a_policy_that_sees_the_middle_of_a_frame_is_trained_on_random_crops(
    name: ImagePipelineName,
) -> None:
    frames, train = images(2), training_pipeline(name, STILL, torch.Generator().manual_seed(0))
    assert not torch.equal(train(frames, SIZE), train(frames, SIZE))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"contrast": (1.2, 0.8)}, "expected two factors, the lower one first"),
    ],
)
def test_what_makes_no_sense_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AugmentationConfig(**changed)  # type: ignore[arg-type]
