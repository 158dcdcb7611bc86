"""Frames of a LeRobotDataset: images inside Parquet files, or stretches of mp4 files. Read on demand, a little kept."""

import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.lerobot.tables import DataFile
from vla_rl.errors import DataError

KEPT_ROW_GROUPS = 64
"""Row groups whose encoded images stay in memory, each camera counting for itself."""

KEPT_VIDEOS = 16
"""Episodes' decoded videos that stay in memory, each camera counting for itself."""


class ImageColumns:
    """Images that stand in the rows of Parquet files, encoded as PNG or JPEG."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._row_group = lru_cache(maxsize=KEPT_ROW_GROUPS)(_row_group)

    def frame(self, file: DataFile, feature: str, row: int) -> np.ndarray:
        """uint8 [H, W, 3], RGB. Raises: DataError naming the row where there is no image."""
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
    """uint8 [H, W, 3], RGB, as PNG: lossless."""
    import cv2  # slow to import, needed only where there are images

    _, data = cv2.imencode(".png", np.ascontiguousarray(frame[..., ::-1]))
    return bytes(data)


def _decoded(data: bytes, where: str) -> np.ndarray:
    import cv2

    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    if image is None:
        raise DataError(f"{where} is no PNG or JPEG image.")
    return np.ascontiguousarray(image[..., ::-1])


class Videos:
    """Frames that stand in mp4 files; an episode is decoded as a whole when its first frame is asked for."""

    def __init__(self) -> None:
        self._stretch = lru_cache(maxsize=KEPT_VIDEOS)(decode_stretch)

    def frame(
        self, path: Path, from_s: float, num_frames: int, fps: float, shape: tuple[int, ...], step: int
    ) -> np.ndarray:
        """uint8 [H, W, 3], RGB: frame `step` of the stretch that begins at `from_s`."""
        return np.array(self._stretch(path, from_s, num_frames, fps, shape[0], shape[1])[step])


def decode_stretch(path: Path, from_s: float, num_frames: int, fps: float, height: int, width: int) -> np.ndarray:
    """uint8 [num_frames, height, width, 3] from a moment of a video on. Raises: DataError where it is too short."""
    from imageio_ffmpeg import get_ffmpeg_exe  # needed only where there are videos

    begin = max(0.0, from_s - 0.5 / fps)  # between two frames: neither is left out by a rounding
    command = [get_ffmpeg_exe(), "-loglevel", "error", "-threads", "1", "-ss", f"{begin:.6f}", "-i", str(path)]
    command += ["-frames:v", str(num_frames), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0 or len(done.stdout) != num_frames * height * width * 3:
        words = done.stderr.decode(errors="replace").strip()
        found = len(done.stdout) // (height * width * 3)
        raise DataError(
            f"{path}: {found} frames of {height}x{width} from {from_s:.3f} s on, expected {num_frames}. {words}".strip()
        )
    return np.frombuffer(done.stdout, np.uint8).reshape(num_frames, height, width, 3)
