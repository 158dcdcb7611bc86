"""Images of the rows of a data set: read as they are, and refused by row if they cannot be."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from vla_rl.datasets.image_files import read_images, row_messages, show_images
from vla_rl.errors import DataError
from vla_rl.types import Message

IMAGE = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
KINDS = ("png", "jpg", "webp", "bmp", "tiff")


def write(path: Path, image: np.ndarray = IMAGE) -> bytes:
    assert cv2.imwrite(str(path), image[..., ::-1])
    return path.read_bytes()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jpg"])
def test_paths_bytes_and_lists_of_both_give_the_pixels_of_the_file(
    kind: str, tmp_path: Path
) -> None:
    data = write(tmp_path / f"a.{kind}")
    for value in (f"a.{kind}", {"path": f"a.{kind}"}, {"bytes": data, "path": None}, data):
        (found,) = read_images(value, tmp_path, "row 0")
        np.testing.assert_array_equal(found, IMAGE)
    assert len(read_images([f"a.{kind}", {"bytes": data}], tmp_path, "row 0")) == 2
    assert read_images(None, tmp_path, "row 0") == ()


def test_grey_deep_and_transparent_images_become_rgb(tmp_path: Path) -> None:
    grey = IMAGE[..., 0]
    cv2.imwrite(str(tmp_path / "grey.png"), grey)
    cv2.imwrite(str(tmp_path / "deep.png"), grey.astype(np.uint16) * 257)
    clear = np.dstack([IMAGE[..., ::-1], np.zeros((40, 60), np.uint8)])
    cv2.imwrite(str(tmp_path / "clear.png"), clear)
    names = ["grey.png", "deep.png", "clear.png"]
    flat, deep, white = read_images(names, tmp_path, "row 0")
    np.testing.assert_array_equal(flat, np.dstack([grey] * 3))
    np.testing.assert_array_equal(deep, flat)
    assert (white == 255).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.97])
def test_an_image_file_that_is_cut_short_is_refused_by_name(
    kind: str, share: float, tmp_path: Path
) -> None:
    whole = write(tmp_path / f"a.{kind}")
    (tmp_path / f"a.{kind}").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(DataError, match=rf"image 0 of 'images' of row 3, .*a\.{kind}, .* again"):
        read_images([f"a.{kind}"], tmp_path, "'images' of row 3")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("missing.png", r"image 0 of row 1, .*missing\.png, cannot be read: .*No such file"),
        ("http://host/a.png", "cannot be read"),
        ("a\0.png", "cannot be read"),
        (7, "is 7, expected the path of a file, or an object with its bytes"),
        ({"bytes": None, "path": None}, "expected the path of a file"),
        (b"GIF89a", "is no image that OpenCV reads"),
    ],
)
def test_what_is_no_image_is_refused(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_images(value, tmp_path, "row 1")


def test_images_go_where_the_marks_are_or_to_the_first_message_of_the_user() -> None:
    system = Message(role="system", content="Look.")
    first, second = (
        Message(role="user", content="<image>\nWhich?"),
        Message(role="user", content="b"),
    )
    shown = show_images((system, first, second), [IMAGE], "row 0")
    assert [len(each.images) for each in shown] == [0, 1, 0]
    assert shown[1].content == "Which?"
    both = show_images((system, second, second), [IMAGE, IMAGE], "row 0")
    assert [len(each.images) for each in both] == [0, 2, 0]
    with pytest.raises(
        DataError, match=r"row 0 has 1 marks <image> .* and 2 images, expected as many"
    ):
        show_images((first,), [IMAGE, IMAGE], "row 0")
    with pytest.raises(DataError, match=r"row 0 has 0 marks .* and 1 images"):
        show_images((system,), [IMAGE], "row 0")


def test_a_row_without_the_field_is_named(tmp_path: Path) -> None:
    row = {"prompt": "a?", "image": "a.png"}
    with pytest.raises(DataError, match=r"row 4 has no 'images'; did you mean 'image'\?"):
        row_messages(row, "prompt", "", "row 4", "images", tmp_path)
