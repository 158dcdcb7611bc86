"""Images of a LeRobotDataset that are in Parquet files, read on demand, with a small cache."""

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from vla_rl.datasets.lerobot.layout import Feature
from vla_rl.datasets.lerobot.tables import DataFile
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import reading

_log = logging.getLogger(__name__)

KEPT_ROW_GROUPS: Final = 64
"""Row groups whose encoded images stay in memory; each camera counts separately."""

AN_IMAGE: Final = "a PNG or JPEG image"
AGAIN: Final = "download it again or leave its episode out"


class ImageColumns:
    """Images in the rows of Parquet files, encoded as PNG or JPEG."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._row_group = lru_cache(maxsize=KEPT_ROW_GROUPS)(_row_group)
        self._of_other_size: set[str] = set()

    def frame(self, file: DataFile, feature: str, described: Feature, row: int) -> np.ndarray:
        """Return a frame, uint8 [H, W, 3], RGB; colours of grey images are equal, alpha is dropped.

        Raises: DataError, naming the row, if there is no image of 8 bits a channel.
        """
        group, place = file.row_group_of(row)
        image = self._decoded(file, feature, row, self._row_group(file, feature, group)[place])
        if image.dtype != np.uint8:
            raise DataError(
                f"{file.path}: {feature!r} is {_kind(image)} in {file.place(row)}, expected 8 bits a "
                "channel; leave this camera out, or convert its images."
            )
        size = described.height_and_width
        if size is not None and image.shape[:2] != size and feature not in self._of_other_size:
            self._of_other_size.add(feature)
            _log.warning(
                "%s: %r is %dx%d (height x width) in %s, meta/info.json says %dx%d; images are read "
                "in the size that they have",
                file.path,
                feature,
                *image.shape[:2],
                file.place(row),
                *size,
            )
        if image.ndim == 2:
            return np.repeat(image[..., None], 3, axis=2)
        return np.ascontiguousarray(image[..., 2::-1])

    def deep_kind(self, file: DataFile, feature: str, row: int) -> str | None:
        """Return what an image holds if it has more than 8 bits a channel, as depth maps have.

        None for one of 8 bits, and for one that cannot be read, which is reported when it is asked
        for.
        """
        try:
            image = self._decoded(file, feature, row, file.encoded_image(feature, row))
        except DataError:
            return None
        return None if image.dtype == np.uint8 else _kind(image)

    def _decoded(
        self, file: DataFile, feature: str, row: int, image: dict[str, Any] | None
    ) -> np.ndarray:
        def place() -> str:
            return f"{file.path}: {feature!r} in {file.place(row)}"

        data = image["bytes"] if image is not None else None
        if data is None and image is not None and image["path"]:
            path = self._root / image["path"]
            with reading(place, "a row whose file is there", AGAIN):
                if not path.is_file():
                    raise DataError(f"{place()} names {image['path']}, which is no file; {AGAIN}.")
                data = path.read_bytes()
        if data is None:
            raise DataError(f"{file.path}: {feature!r} is empty in {file.place(row)}.")
        import cv2  # slow to import, needed only for images

        with reading(place, AN_IMAGE, AGAIN):
            # as it is stored: anything else makes 8 bits of 16, and turns by what a camera noted
            found = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
            if found is None:
                raise ValueError("its bytes cannot be decoded")
            return np.asarray(found)


def _row_group(file: DataFile, feature: str, group: int) -> list[dict[str, Any] | None]:
    return file.encoded_images(feature, group)


def _kind(image: np.ndarray) -> str:
    channels = 1 if image.ndim == 2 else image.shape[2]
    return f"{image.dtype} of {channels} channel{'s' * (channels > 1)}"


def encode_png(frame: np.ndarray) -> bytes:
    """Encode uint8 [H, W, 3], RGB, as PNG, without loss."""
    import cv2  # slow to import, needed only for images

    _, data = cv2.imencode(".png", np.ascontiguousarray(frame[..., ::-1]))
    return bytes(data)
