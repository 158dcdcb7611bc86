"""Frames of a LeRobotDataset: images in Parquet files, or segments of mp4 files.

Read on demand, with a small cache.
"""

import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.lerobot.tables import DataFile
from vla_rl.errors import DataError

KEPT_ROW_GROUPS = 64
"""Row groups whose encoded images stay in memory; each camera counts separately."""

KEPT_VIDEOS = 16
"""Episodes whose decoded videos stay in memory; each camera counts separately."""


class ImageColumns:
    """Images in the rows of Parquet files, encoded as PNG or JPEG."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._row_group = lru_cache(maxsize=KEPT_ROW_GROUPS)(_row_group)

    def frame(self, file: DataFile, feature: str, row: int) -> np.ndarray:
        """Return a frame, uint8 [H, W, 3], RGB.

        Raises: DataError, naming the row, if there is no image.
        """
        group, place = file.row_group_of(row)
        image = self._row_group(file, feature, group)[place]
        data = image["bytes"] if image is not None else None
        if data is None and image is not None and image["path"]:
            try:
                data = (self._root / image["path"]).read_bytes()
            except OSError as error:
                raise DataError(
                    f"{file.path}: {feature!r} in {file.place(row)} names {image['path']}: {error}"
                ) from error
        if data is None:
            raise DataError(f"{file.path}: {feature!r} is empty in {file.place(row)}.")
        return _decoded(data, f"{file.path}: {feature!r} in {file.place(row)}")


def _row_group(file: DataFile, feature: str, group: int) -> list[dict[str, Any] | None]:
    return file.encoded_images(feature, group)


def encode_png(frame: np.ndarray) -> bytes:
    """Encode uint8 [H, W, 3], RGB, as PNG, without loss."""
    import cv2  # slow to import, needed only for images

    _, data = cv2.imencode(".png", np.ascontiguousarray(frame[..., ::-1]))
    return bytes(data)


def _decoded(data: bytes, where: str) -> np.ndarray:
    import cv2

    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise DataError(f"{where} is not a PNG or JPEG image.")
    return np.ascontiguousarray(image[..., ::-1])


class Videos:
    """Frames in mp4 files; the first frame that is read of an episode decodes the whole episode."""

    def __init__(self) -> None:
        self._stretch = lru_cache(maxsize=KEPT_VIDEOS)(decode_stretch)

    def frame(
        self,
        path: Path,
        from_s: float,
        num_frames: int,
        fps: float,
        shape: tuple[int, ...],
        step: int,
    ) -> np.ndarray:
        """Return frame `step`, uint8 [H, W, 3], RGB, of the segment that begins at `from_s`."""
        return np.array(self._stretch(path, from_s, num_frames, fps, shape[0], shape[1])[step])


def decode_stretch(
    path: Path, from_s: float, num_frames: int, fps: float, height: int, width: int
) -> np.ndarray:
    """Decode uint8 [num_frames, height, width, 3] of a video from `from_s` on.

    Raises: DataError if it is too short.
    """
    from imageio_ffmpeg import get_ffmpeg_exe  # needed only for videos

    begin = max(0.0, from_s - 0.5 / fps)  # between two frames, so that rounding loses neither
    command = [
        get_ffmpeg_exe(),
        "-loglevel",
        "error",
        "-threads",
        "1",
        "-ss",
        f"{begin:.6f}",
        "-i",
        str(path),
    ]
    command += ["-frames:v", str(num_frames), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0 or len(done.stdout) != num_frames * height * width * 3:
        words = done.stderr.decode(errors="replace").strip()
        found = len(done.stdout) // (height * width * 3)
        raise DataError(
            f"{path}: {found} frames of {height}x{width} from {from_s:.3f} s on, expected "
            f"{num_frames}. {words}".strip()
        )
    return np.frombuffer(done.stdout, np.uint8).reshape(num_frames, height, width, 3)
