"""Images of 8 bits are read as they are, grey and transparent ones too; deeper ones are left out."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from made_datasets import FEATURES, change_rows, frames, published

from vla_rl.datasets import read_lerobot
from vla_rl.errors import DataError

DISTANCES = np.arange(144, dtype=np.uint16).reshape(12, 12) * 256 + 7


def stored(root: Path, name: str, images: list[np.ndarray], ending: str = ".png") -> Path:
    """A data set of 3 rows with one more camera, whose images are stored as they are given."""
    described = {"dtype": "image", "shape": [12, 12, 3], "names": None}
    published(root, (len(images),), features={**FEATURES, f"observation.images.{name}": described})

    def add(rows: list[dict[str, Any]]) -> None:
        for row, image in zip(rows, images, strict=True):
            data = bytes(cv2.imencode(ending, image)[1])
            row[f"observation.images.{name}"] = {"bytes": data, "path": None}

    change_rows(root, add)
    return root


@pytest.mark.parametrize(
    ("image", "ending"),
    [(DISTANCES, ".png"), (DISTANCES, ".tiff"), (DISTANCES.astype(np.float32), ".tiff")],
    ids=["png", "tiff", "tiff of floats"],
)
def test_a_camera_of_more_than_8_bits_is_left_out_with_a_line(
    image: np.ndarray, ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored(tmp_path, "depth", [image] * 3, ending)
    (episode,) = read_lerobot(tmp_path)
    assert set(episode.frames) == {"image", "wrist_image"}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the camera 'depth' (observation.images.depth) is left out: its images are" in line
    assert f"{image.dtype} of 1 channel, expected 8 bits a channel" in line
    with pytest.raises(DataError, match=r"fields name 'observation\.images\.depth' for 'image'"):
        read_lerobot(tmp_path, fields={"image": "observation.images.depth"})


def test_one_deep_image_among_others_is_never_squeezed(tmp_path: Path) -> None:
    colour = frames(1, 1)[0]
    (episode,) = read_lerobot(stored(tmp_path, "head", [colour, DISTANCES, colour]))
    assert np.array_equal(episode.frames["head"](2), colour[..., ::-1])
    with pytest.raises(
        DataError, match=r"'observation\.images\.head' is uint16 of 1 channel in row 1"
    ):
        episode.frames["head"](1)


def test_grey_transparent_and_palette_images_stay_readable(tmp_path: Path) -> None:
    colour = frames(1, 1)[0]
    grey, alpha = colour[..., 0], np.dstack([colour, colour[..., :1]])
    (episode,) = read_lerobot(stored(tmp_path, "head", [grey, alpha, colour]))
    assert np.array_equal(episode.frames["head"](0), np.repeat(grey[..., None], 3, axis=2))
    assert np.array_equal(episode.frames["head"](1), colour[..., ::-1])
    assert np.array_equal(episode.frames["head"](2), colour[..., ::-1])
    assert {episode.frames["head"](step).dtype for step in range(3)} == {np.dtype(np.uint8)}


def test_a_size_other_than_described_gets_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wide = np.zeros((6, 12, 3), np.uint8)
    (episode,) = read_lerobot(stored(tmp_path, "head", [wide] * 3))
    assert [episode.frames["head"](step).shape for step in range(3)] == [(6, 12, 3)] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'observation.images.head' is 6x12 (height x width) in row 0" in line
    assert "meta/info.json says 12x12" in line


def test_a_flipped_byte_of_a_png_is_noticed(tmp_path: Path) -> None:
    def flip(rows: list[dict[str, Any]]) -> None:
        image = rows[1]["observation.images.image"]
        data = bytearray(image["bytes"])
        data[len(data) // 2] ^= 1
        image["bytes"] = bytes(data)

    change_rows(published(tmp_path, (3,)), flip)
    (episode,) = read_lerobot(tmp_path)
    with pytest.raises(DataError, match=r"row 1 \(episode 0, frame 1\) is not a PNG or JPEG image"):
        episode.frames["image"](1)


@pytest.mark.parametrize("path", ["images/none.png", "/dev/zero", "images"])
def test_an_image_in_a_file_that_is_none_is_named(path: str, tmp_path: Path) -> None:
    def outside(rows: list[dict[str, Any]]) -> None:
        rows[1]["observation.images.image"] = {"bytes": None, "path": path}

    change_rows(published(tmp_path, (3,)), outside)
    (tmp_path / "images").mkdir()
    with pytest.raises(DataError, match=rf"row 1 \(.*\) names {path}, which is no file"):
        read_lerobot(tmp_path)[0].frames["image"](1)


def test_images_stored_as_plain_bytes_are_read(tmp_path: Path) -> None:
    def plain(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["observation.images.image"] = row["observation.images.image"]["bytes"]

    change_rows(published(tmp_path, (3,)), plain)
    assert np.array_equal(read_lerobot(tmp_path)[0].frames["image"](2), frames(0, 3)[2])
