"""Images of the rows of a data set: files beside it, or their bytes in the row.

    {"prompt": "How many blocks?", "answer": "3", "images": ["scenes/17.png"]}   a path, or a list of them
    {..., "images": [{"bytes": b"\\x89PNG...", "path": null}]}                    as in Hugging Face's parquet

OpenCV reads PNG, JPEG, WebP, BMP and TIFF here. It fills what is missing of a file that is cut short
with grey, in silence, so the end of a file is looked for before.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.datasets.prompts import first_messages
from vla_rl.errors import DataError
from vla_rl.types import Message
from vla_rl.util.imports import suggest
from vla_rl.util.values import excerpt

MARK: Final = "<image>"
"""Mark in the text of many data sets where an image belongs. Images of a message stand before its
text, so marks are taken out."""

MOST_PIXELS: Final = 1 << 26
"""Pixels of the largest image, 200 MB: no vision tower reads more of them."""

ENDS: Final = (
    (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"),
    (b"\xff\xd8\xff", b"\xff\xd9"),
)
"""First bytes of PNG and JPEG files, and the bytes that end them."""

TAIL: Final = 4096
"""Bytes at the end of a file in which its end is looked for; some programs append a few of their
own."""


def read_images(value: Any, folder: Path, label: str) -> tuple[np.ndarray, ...]:
    """Return the images of a row, RGB uint8 [H, W, 3] each; transparent pixels become white.

    Args:
        value: what the row has: a path, an object with `bytes` or `path`, a list of these, or null.
        folder: folder that relative paths start from.
        label: names field, row and file in errors.

    Raises: DataError for anything else, and for a file that is missing, cut short or no image.
    """
    if value is None:
        return ()
    given: Sequence[Any] = value if isinstance(value, list) else [value]
    return tuple(
        _read_image(each, folder, f"image {number} of {label}") for number, each in enumerate(given)
    )


def row_messages(
    row: Mapping[str, Any],
    prompt_field: str,
    system: str,
    label: str,
    image_field: str = "",
    folder: Path = Path(),
) -> tuple[Message, ...]:
    """Return the first messages of a row: the system's, if there is one, and the prompt with its
    images.

    Args:
        row: the row.
        prompt_field: column of the prompt.
        system: text of the system.
        label: names row and file in errors.
        image_field: column of the images; empty: none.
        folder: folder that relative paths of images start from.

    Raises: DataError.
    """
    messages = first_messages(row[prompt_field], system, f"{prompt_field!r} of {label}")
    if not image_field:
        return messages
    if image_field not in row:
        raise DataError(
            f"{label} has no {image_field!r}{suggest(image_field, row)}; a row without images has "
            "null there"
        )
    images = read_images(row[image_field], folder, f"{image_field!r} of {label}")
    return show_images(messages, images, f"{prompt_field!r} of {label}")


def show_images(
    messages: Sequence[Message], images: Sequence[np.ndarray], label: str
) -> tuple[Message, ...]:
    """Return the messages with images: each message of the user gets as many as its text has marks
    `<image>`, or the first one all of them if there are no marks.

    Raises: DataError, with the label, if there are other marks than images.
    """
    if not images:
        return tuple(messages)
    counts = [each.content.count(MARK) * (each.role == "user") for each in messages]
    if not any(counts):
        counts = [0] * len(messages)
        first = next((k for k, each in enumerate(messages) if each.role == "user"), None)
        if first is not None:
            counts[first] = len(images)
    if sum(counts) != len(images):
        raise DataError(
            f"{label} has {sum(counts)} marks {MARK} in the user's texts and {len(images)} images, "
            "expected as many, or a message of the user without marks"
        )
    left, shown = list(images), []
    for message, count in zip(messages, counts, strict=True):
        taken, left = tuple(left[:count]), left[count:]
        text = message.content.replace(MARK, "").strip() if taken else message.content
        shown.append(msgspec.structs.replace(message, content=text, images=taken))
    return tuple(shown)


def _read_image(value: Any, folder: Path, label: str) -> np.ndarray:
    data, path = value, None
    if isinstance(value, dict):
        data, path = value.get("bytes"), value.get("path")
    elif isinstance(value, str):
        data, path = None, value
    if data is None and isinstance(path, str):
        file = folder / path
        try:
            data = file.read_bytes()
        except (OSError, ValueError) as error:  # a null byte in a path is a ValueError
            raise DataError(f"{label}, {file}, cannot be read: {error}") from error
        label = f"{label}, {file},"
    if not isinstance(data, bytes):
        raise DataError(
            f"{label} is {excerpt(value)}, expected the path of a file, or an object with its bytes"
        )
    return _decode(data, label)


def _decode(data: bytes, label: str) -> np.ndarray:
    for begin, end in ENDS:
        if data.startswith(begin) and end not in data[-TAIL:]:
            raise DataError(f"{label} is cut short: its end is missing; copy it again")
    import cv2  # slow to import, needed only for images

    try:
        found = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED) if data else None
    except cv2.error as error:  # such as more pixels than OpenCV reads
        raise DataError(f"{label} cannot be read: {error}") from error
    if found is None:
        raise DataError(
            f"{label} is no image that OpenCV reads ({len(data)} bytes), expected PNG, JPEG, WebP, "
            "BMP or TIFF; copy or convert it again"
        )
    if found.shape[0] * found.shape[1] > MOST_PIXELS:
        raise DataError(
            f"{label} has {found.shape[0]} x {found.shape[1]} pixels, expected at most {MOST_PIXELS} "
            "in all; make it smaller"
        )
    return _to_rgb(found, label)


def _to_rgb(found: np.ndarray, label: str) -> np.ndarray:
    if found.dtype == np.uint16:
        found = (found >> 8).astype(np.uint8)
    if found.dtype != np.uint8:
        raise DataError(f"{label} has numbers of the type {found.dtype}, expected 8 or 16 bits")
    import cv2  # as above

    if found.ndim == 2:
        return cv2.cvtColor(found, cv2.COLOR_GRAY2RGB)
    if found.shape[2] == 4:
        share = found[..., 3:].astype(np.float32) / 255
        over_white = found[..., :3] * share + 255 * (1 - share)
        found = over_white.round().astype(np.uint8)
    return cv2.cvtColor(found, cv2.COLOR_BGR2RGB)
