"""Augmentation does to frames what OpenVLA's fine-tuning does, computed again here in float64 NumPy
and `colorsys`.
"""

import colorsys

import numpy as np
import pytest
import torch

from vla_rl.errors import ConfigError
from vla_rl.models.images import ImagePipelineName
from vla_rl.models.images.augmentation import (
    AugmentationConfig,
    AugmentationDraws,
    augment,
    draw_augmentation,
    training_pipeline,
)
from vla_rl.models.images.pipeline import image_pipeline

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
        ({"crop_area": 0.0}, "crop_area is 0.0, expected a share above 0"),
        ({"hue": 0.6}, "hue is 0.6, expected 0 to 0.5"),
        ({"contrast": (1.2, 0.8)}, "expected two factors with 0 <= low <= high"),
    ],
)
def test_what_makes_no_sense_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AugmentationConfig(**changed)  # type: ignore[arg-type]
