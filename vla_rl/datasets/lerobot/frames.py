"""Frames of a LeRobotDataset, read on demand: images in Parquet files, or videos.

Images have a small cache. When a data set is opened, the tables of each video file say which frame
belongs to which row:

    as many frames as rows       frame k for row k, whatever the times of the frames are
    the rate of the data set     the frames from the episode's begin on, one for each row
    another rate                 the frame at the time of the row, as LeRobot picks it
    none of these                DataError

So a video that is too short or of another size is noticed then, not in the middle of training.
"""

import itertools
import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.datasets.episode import FrameReader
from vla_rl.datasets.lerobot.layout import Feature
from vla_rl.datasets.lerobot.tables import DataFile
from vla_rl.datasets.lerobot.video_files import (
    ENCODE_AGAIN,
    TOLERANCE_S,
    VideoTables,
    decode_frames,
    read_video_tables,
)
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import reading

_log = logging.getLogger(__name__)

KEPT_ROW_GROUPS: Final = 64
"""Row groups whose encoded images stay in memory; each camera counts separately."""

IMAGE_KIND: Final = "a PNG or JPEG image"
LEAVE_OUT: Final = "download it again or leave its episode out"


class ImageColumns:
    """Images in the rows of Parquet files, encoded as PNG or JPEG."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._row_group = lru_cache(maxsize=KEPT_ROW_GROUPS)(DataFile.encoded_images)
        self._of_other_size: set[str] = set()

    def frame(self, file: DataFile, feature: str, described: Feature, row: int) -> np.ndarray:
        """Return a frame, uint8 [H, W, 3], RGB; colours of grey images are equal, alpha is dropped.

        Raises: DataError, naming the row, if there is no image of 8 bits a channel.
        """
        group, index = file.find_row_group(row)
        # By row group, because that is what Parquet reads at once: frames of an episode are mostly
        # asked for one after the other.
        image = self._decoded(file, feature, row, self._row_group(file, feature, group)[index])
        if image.dtype != np.uint8:
            raise DataError(
                f"{file.path}: {feature!r} is {_describe_kind(image)} in {file.describe_row(row)}, expected 8 bits a "
                "channel; leave this camera out, or convert its images."
            )
        size = described.height_and_width
        if size is not None and image.shape[:2] != size and feature not in self._of_other_size:
            # Once for each camera: a data set of another size would write a line for each of its
            # frames.
            self._of_other_size.add(feature)
            _log.warning(
                "%s: %r is %dx%d (height x width) in %s, meta/info.json says %dx%d; images are read "
                "in the size that they have",
                file.path,
                feature,
                *image.shape[:2],
                file.describe_row(row),
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
        return None if image.dtype == np.uint8 else _describe_kind(image)

    def _decoded(
        self, file: DataFile, feature: str, row: int, image: dict[str, Any] | None
    ) -> np.ndarray:
        def describe() -> str:
            return f"{file.path}: {feature!r} in {file.describe_row(row)}"

        data = image["bytes"] if image is not None else None
        if data is None and image is not None and image["path"]:
            path = self._root / image["path"]
            with reading(describe, "a row whose file is there", LEAVE_OUT):
                if not path.is_file():
                    raise DataError(
                        f"{describe()} names {image['path']}, which is no file; {LEAVE_OUT}."
                    )
                data = path.read_bytes()
        if data is None:
            raise DataError(f"{file.path}: {feature!r} is empty in {file.describe_row(row)}.")
        import cv2  # slow to import, needed only for images

        with reading(describe, IMAGE_KIND, LEAVE_OUT):
            # as it is stored: anything else makes 8 bits of 16, and turns by what a camera noted
            found = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
            if found is None:
                raise ValueError("its bytes cannot be decoded")
            return np.asarray(found)


def _describe_kind(image: np.ndarray) -> str:
    channels = 1 if image.ndim == 2 else image.shape[2]
    return f"{image.dtype} of {channels} channel{'s' * (channels > 1)}"


KEPT_VIDEOS: Final = 16
"""Episodes whose decoded videos stay in memory; each camera counts separately."""

RATES_DIFFER: Final = 0.01
"""Share by which a file's rate may differ from the data set's: 29.97 is 30."""


class Segment(msgspec.Struct, frozen=True):
    """Rows of one episode in a video file.

    Example:
        Segment(episode=2, from_s=6.7, row_s=np.array([0.0, 0.05, 0.1]))
    """

    episode: int
    from_s: float
    """Time of the first row in the file."""

    row_s: np.ndarray
    """float64 [T], time of each row after `from_s`."""


class VideoFile:
    """One file of one camera, with the episodes that are in it."""

    def __init__(self, path: Path, feature: str, described: Feature, fps: float) -> None:
        self.path, self._feature, self._described, self._fps = path, feature, described, fps
        self._segments: dict[int, Segment] = {}
        self._frames_of: dict[int, np.ndarray] = {}
        self._tables: VideoTables | None = None

    def add_segment(self, segment: Segment) -> None:
        """Add an episode, before `match`."""
        self._segments[segment.episode] = segment

    def match(self) -> float | None:
        """Find the frame of each row.

        Returns: the rate by the file's own times, if that is another than the data set's and was
            not needed.

        Raises: DataError if a row has no frame, or the images have another size than described.
        """
        tables = read_video_tables(self.path)
        self._require_size(tables.size)
        times, segments = (
            tables.times,
            sorted(self._segments.values(), key=lambda segment: segment.from_s),
        )
        num_rows = sum(len(segment.row_s) for segment in segments)
        if len(times) < num_rows:
            raise DataError(
                f"{self.path} has {len(times)} frames, expected {num_rows}, one for each row of "
                f"{_describe_episodes(segments)}; {ENCODE_AGAIN}."
            )
        # By the times of its frames, because a header may say anything.
        rate = (len(times) - 1) / times[-1] if times[-1] > 0 else self._fps
        has_rate = abs(rate - self._fps) <= RATES_DIFFER * self._fps
        if len(times) == num_rows and _begin_apart(segments):
            ends = np.cumsum([len(segment.row_s) for segment in segments])
            self._frames_of = {
                segment.episode: np.arange(end - len(segment.row_s), end)
                for segment, end in zip(segments, ends.tolist(), strict=True)
            }
        else:
            self._frames_of = {
                segment.episode: self._by_time(segment, times, rate) for segment in segments
            }
            has_rate = True  # it was compared
        self._tables = tables
        return None if has_rate else float(rate)

    def decode(self, episode: int) -> np.ndarray:
        """Return the frames of an episode, uint8 [T, H, W, 3]. Raises: DataError."""
        if self._tables is None:
            self.match()
        assert self._tables is not None
        frames, size = decode_frames(self.path, self._tables.times, self._frames_of[episode])
        self._require_size(size)
        return frames

    def _by_time(self, segment: Segment, times: np.ndarray, rate: float) -> np.ndarray:
        num, wanted = len(segment.row_s), segment.from_s + segment.row_s
        begin = int(np.searchsorted(times, wanted[0] - 0.5 / self._fps))
        # One frame for each row is what writers mean, whatever they round; times are compared only
        # to see that it can be so.
        in_order = np.arange(begin, begin + num)
        if in_order[-1] < len(times):
            found = times[in_order]
            is_near = np.abs(found - wanted).max() < 0.5 / self._fps
            drift = abs((found[-1] - found[0]) - (wanted[-1] - wanted[0])) * self._fps
            if is_near and drift <= 0.1 + RATES_DIFFER * num:
                return in_order
        # As LeRobot picks it: the nearest frame, and of two at the same distance the earlier.
        right = np.clip(np.searchsorted(times, wanted), 1, max(len(times) - 1, 1))
        right = np.minimum(right, len(times) - 1)
        left = np.maximum(right - 1, 0)
        nearest = np.where(
            np.abs(times[left] - wanted) <= np.abs(times[right] - wanted), left, right
        )
        distances = np.abs(times[nearest] - wanted)
        wrong = np.flatnonzero(distances > TOLERANCE_S)
        if len(wrong):
            row = int(wrong[0])
            raise DataError(
                f"{self.path}: frame {row} of episode {segment.episode} is at {wanted[row]:.4f} s, "
                f"and the nearest of the file's {len(times)} frames at {times[nearest[row]]:.4f} s "
                f"({rate:.4g} frames a second; meta/info.json has fps {self._fps:g}), expected a "
                f"frame for each row; {ENCODE_AGAIN}, at the rate of the data set."
            )
        return nearest

    def _require_size(self, size: tuple[int, int] | None) -> None:
        described = self._described.height_and_width
        if size is not None and described is not None and size != described:
            raise DataError(
                f"{self.path} has images of {size[0]}x{size[1]} (height x width), meta/info.json "
                f"describes {self._feature!r} as {described[0]}x{described[1]} (shape "
                f"{list(self._described.shape)}, names {self._described.names}), expected the same; "
                "correct the one that is wrong."
            )


class Videos:
    """All video files of a data set; the first frame that is read decodes its whole episode."""

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._files: dict[tuple[Path, str], VideoFile] = {}
        self._needed: set[tuple[Path, str]] = set()
        self._decoded = lru_cache(maxsize=KEPT_VIDEOS)(
            lambda key, episode: self._files[key].decode(episode)
        )

    def add_segment(
        self, path: Path, feature: str, described: Feature, segment: Segment, *, is_needed: bool
    ) -> FrameReader:
        """Add an episode of a camera; return its frames.

        Args:
            path: the file.
            feature: name of the camera.
            described: its description.
            segment: the episode's rows in the file.
            is_needed: whether `match` raises for this file; of others only reading does.
        """
        key = (path, feature)
        file = self._files.setdefault(key, VideoFile(path, feature, described, self._fps))
        file.add_segment(segment)
        if is_needed:
            self._needed.add(key)
        return partial(self._frame, key, segment.episode)

    def match(self) -> None:
        """Find the frame of each row in every file, without decoding any.

        Raises: DataError for a file that lacks frames. A file of a camera that may never be read
            gets a log line instead.
        """
        other_rates = []
        for key, file in self._files.items():
            try:
                rate = file.match()
            except DataError as error:
                if key in self._needed:
                    raise
                # No line for a missing file: a download without some of the cameras is usual.
                if file.path.is_file():
                    _log.warning("%s, which matters only if this camera is read", error)
                continue
            if rate is not None:
                other_rates.append((file.path, rate))
        if other_rates:
            _log.warning(
                "%d video files have frames at another rate than meta/info.json's %g a second, such "
                "as %s at %.4g; each has one frame for each row, so frame k is read for row k",
                len(other_rates),
                self._fps,
                *other_rates[0],
            )

    def _frame(self, key: tuple[Path, str], episode: int, step: int) -> np.ndarray:
        return np.array(self._decoded(key, episode)[step])


def _begin_apart(segments: Sequence[Segment]) -> bool:
    begins = [segment.from_s for segment in segments]
    return all(one < other for one, other in itertools.pairwise(begins))


def _describe_episodes(segments: Sequence[Segment]) -> str:
    numbers = sorted(segment.episode for segment in segments)
    return (
        f"episode {numbers[0]}"
        if len(numbers) == 1
        else f"{len(numbers)} episodes, {numbers[0]} to {numbers[-1]}"
    )
