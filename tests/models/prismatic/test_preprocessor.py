"""`preprocessor_config.json`: its colour constants are used.

Other sizes, filters and crops are refused by name.
"""

import json
from pathlib import Path
from typing import Any

import golden_recipe
import public_checkpoint
import pytest
import torch

from vla_rl.errors import CheckpointError
from vla_rl.models.openvla import OpenVla
from vla_rl.models.prismatic.config import PUBLIC_PIXELS, TINY_TOKENIZER
from vla_rl.models.prismatic.folder import PREPROCESSOR_FILE, read_pixel_scaling

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "inplace": False}
HALF = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "inplace": False}


def written(folder: Path, **changes: Any) -> Path:
    fields = {**golden_recipe.preprocessor(), **changes}
    (folder / PREPROCESSOR_FILE).write_text(
        json.dumps({name: x for name, x in fields.items() if x != "missing"})
    )
    return folder


def test_the_public_file_has_the_constants_that_are_the_default_here(tmp_path: Path) -> None:
    assert read_pixel_scaling([tmp_path], 224) == PUBLIC_PIXELS
    assert read_pixel_scaling([written(tmp_path)], 224) == PUBLIC_PIXELS


@pytest.mark.parametrize(
    "changes",
    [
        {"tvf_normalize_params": [IMAGENET, HALF]},
        # then the file's processor computes them from means and stds
        {"tvf_normalize_params": "missing"},
        # fields of transformers that say what is done anyway
        {
            "tvf_normalize_params": [IMAGENET, HALF],
            "do_rescale": True,
            "do_center_crop": False,
            "size": None,
        },
    ],
)
def test_other_colour_constants_are_what_the_towers_see_by(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    public_checkpoint.write(tmp_path / "public", public_checkpoint.Parts(seed=0), TINY_TOKENIZER)
    square = [28, 28]
    sizes = {
        "input_sizes": [[3, *square]] * 2,
        "tvf_resize_params": [
            {"size": square, "interpolation": 3, "antialias": True, "max_size": None}
        ]
        * 2,
        "tvf_crop_params": [{"output_size": square}] * 2,
    }
    policy = OpenVla.load(written(tmp_path / "public", **sizes, **changes), norm_key="libero_goal")
    policy.save(tmp_path / "again")
    images = torch.full((1, 1, 3, 28, 28), 51, dtype=torch.uint8)  # a fifth of 255
    for loaded in (policy, OpenVla.load(tmp_path / "again")):
        seen: dict[str, torch.Tensor] = {}

        def look(
            tower: torch.nn.Module, pixels: torch.Tensor, name: str, seen: Any = seen
        ) -> torch.Tensor:
            seen[name] = pixels
            return torch.zeros(1, 4, 24)

        loaded.network.vision_backbone(images, look)
        expected = (0.2 - torch.tensor(IMAGENET["mean"])) / torch.tensor(IMAGENET["std"])
        torch.testing.assert_close(seen["featurizer"][0, :, 0, 0], expected)
        torch.testing.assert_close(seen["fused_featurizer"][0, :, 0, 0], torch.full((3,), -0.6))


def changed(name: str, tower: int, **fields: Any) -> dict[str, Any]:
    of_both = [dict(held) for held in golden_recipe.preprocessor()[name]]
    of_both[tower] |= fields
    return {name: of_both}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_resize_strategy": "letterbox"},
            r"image_resize_strategy is 'letterbox', expected 'resize-naive'",
        ),
        ({"tvf_do_letterbox": True}, "tvf_do_letterbox is True, expected False"),
        ({"use_fused_vision_backbone": False}, "use_fused_vision_backbone is False, expected True"),
        ({"image_mean": [0.5, 0.5, 0.5]}, r"image_mean is \[0\.5, 0\.5, 0\.5\], which is not read"),
        ({"do_normalize": False}, "do_normalize is False, which is not read here"),
        ({"do_center_crop": True}, "do_center_crop is True, which is not read here"),
        ({"a_field_of_tomorrow": 2}, "a_field_of_tomorrow is 2, which is not read here"),
        (
            {"input_sizes": [[3, 384, 384]] * 2},
            r"input_sizes is \[\[3, 384, 384\], .*expected \[\[3, 224, 224\]",
        ),
        (
            {"interpolations": ["bicubic", "bilinear"]},
            r"interpolations is \['bicubic', 'bilinear'\]",
        ),
        (
            changed("tvf_resize_params", 1, interpolation=2),
            r"tvf_resize_params\[1\]\.interpolation is 2, expected 3",
        ),
        (
            changed("tvf_resize_params", 0, antialias=False),
            r"tvf_resize_params\[0\]\.antialias is False",
        ),
        (
            changed("tvf_resize_params", 0, size=224),
            r"tvf_resize_params\[0\]\.size is 224, expected \[224, 224\]",
        ),
        (
            changed("tvf_crop_params", 1, output_size=[200, 200]),
            r"tvf_crop_params\[1\]\.output_size is \[200, 200\]",
        ),
        (
            {"tvf_crop_params": [{"output_size": 224}]},
            "the length of tvf_crop_params is 1, expected 2",
        ),
        (
            changed("tvf_normalize_params", 0, std=[0.0, 1.0, 1.0]),
            r"stds is .*, expected numbers above 0",
        ),
        (
            {"tvf_normalize_params": [{"mean": [0.5] * 3}]},
            "cannot be read as the settings of an image processor",
        ),
    ],
)
def test_pictures_that_would_be_made_otherwise_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_pixel_scaling([written(tmp_path, **changes)], 224)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / PREPROCESSOR_FILE).write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json cannot be read"):
        read_pixel_scaling([tmp_path], 224)
