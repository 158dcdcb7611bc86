"""The image pipelines give the bytes of the reference projects' own code (see
`golden/README.md`).
"""

import hashlib
import typing
from pathlib import Path

import golden_recipe
import numpy as np
import pytest
import torch
from made_pictures import batch_of, picture
from PIL import Image

from vla_rl.models.images import ImagePipelineName
from vla_rl.models.images.jpeg import jpeg_round_trip
from vla_rl.models.images.pipeline import centre_crop, image_pipeline, lanczos3

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "images.npz")


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
    images = batch_of(picture("waves", 256, 256))
    expected = centre_crop(lanczos3(jpeg_round_trip(images), 224))
    assert torch.equal(image_pipeline("exact")(images, 224), expected)


def test_bicubic_leaves_frames_of_the_right_size_alone_and_follows_pillow_otherwise() -> None:
    image = picture("waves", 256, 256)
    same = image_pipeline("bicubic")(batch_of(image), 256)
    np.testing.assert_array_equal(same[0].permute(1, 2, 0).numpy(), image)
    ours = image_pipeline("bicubic")(batch_of(image), 224)[0].permute(1, 2, 0).numpy()
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
