"""Frames of a LeRobotDataset that are in video files, each with the row that it belongs to.

When a data set is opened, the tables of each file say which frame belongs to which row:

    as many frames as rows       frame k for row k, whatever the times of the frames are
    the rate of the data set     the frames from the episode's begin on, one for each row
    another rate                 the frame at the time of the row, as LeRobot picks it
    none of these                DataError

So a video that is too short or of another size is noticed then, not in the middle of training.
"""

import itertools
import logging
import re
import subprocess
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from vla_rl.datasets.episode import FrameReader
from vla_rl.datasets.lerobot.layout import DEPTH_FORMATS, Feature
from vla_rl.datasets.lerobot.mp4 import VideoTables, read_mp4_tables
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import reading

_log = logging.getLogger(__name__)

KEPT_VIDEOS: Final = 16
"""Episodes whose decoded videos stay in memory; each camera counts separately."""

TOLERANCE_S: Final = 1e-4
"""Largest distance of a frame from the time of its row, in a file of another rate: LeRobot's."""

RATES_DIFFER: Final = 0.01
"""Share by which a file's rate may differ from the data set's: 29.97 is 30."""

CONTAINERS: Final = "mov,mp4,matroska,webm,avi,mpegts"
"""Formats that ffmpeg may read: not those that name further files or addresses."""

WHOLE_VIDEO: Final = "a whole video"
AGAIN: Final = "download it again or encode it again"

_EACH_FRAME: Final = ("-vf", "showinfo=checksum=0", "-fps_mode", "passthrough")
"""Without passthrough, ffmpeg repeats and drops frames to keep a rate."""

_AS_RGB: Final = ("-f", "rawvideo", "-pix_fmt", "rgb24")
_SHOWN: Final = re.compile(r"pts_time:(\S+).* fmt:(\S+) .*\bs:(\d+)x(\d+) ")


class Segment(msgspec.Struct, frozen=True):
    """Rows of one episode in a video file."""

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

    def add(self, segment: Segment) -> None:
        """Add an episode, before `match`."""
        self._segments[segment.episode] = segment

    def match(self) -> float | None:
        """Find the frame of each row.

        Returns: the rate by the file's own times, if that is another than the data set's and was
            not needed.

        Raises: DataError if a row has no frame, or the pictures have another size than described.
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
                f"{_episodes(segments)}; {AGAIN}."
            )
        rate = (len(times) - 1) / times[-1] if times[-1] > 0 else self._fps
        has_rate = abs(rate - self._fps) <= RATES_DIFFER * self._fps
        if len(times) == num_rows and _are_apart(segments):
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
        frames, size = decode(self.path, self._tables.times, self._frames_of[episode])
        self._require_size(size)
        return frames

    def _by_time(self, segment: Segment, times: np.ndarray, rate: float) -> np.ndarray:
        num, wanted = len(segment.row_s), segment.from_s + segment.row_s
        begin = int(np.searchsorted(times, wanted[0] - 0.5 / self._fps))
        in_order = np.arange(begin, begin + num)
        if in_order[-1] < len(times):
            found = times[in_order]
            is_near = np.abs(found - wanted).max() < 0.5 / self._fps
            drift = abs((found[-1] - found[0]) - (wanted[-1] - wanted[0])) * self._fps
            if is_near and drift <= 0.1 + RATES_DIFFER * num:
                return in_order
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
                f"frame for each row; {AGAIN}, at the rate of the data set."
            )
        return nearest

    def _require_size(self, size: tuple[int, int] | None) -> None:
        described = self._described.height_and_width
        if size is not None and described is not None and size != described:
            raise DataError(
                f"{self.path} has pictures of {size[0]}x{size[1]} (height x width), meta/info.json "
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

    def add(
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
        file.add(segment)
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


def read_video_tables(path: Path) -> VideoTables:
    """Return the times of a file's frames: from its tables if it is an mp4, else by ffmpeg.

    Raises: DataError.
    """
    with reading(path, WHOLE_VIDEO, AGAIN):
        tables = read_mp4_tables(path)
        if tables is not None and len(tables.times):
            return tables
        listed, errors = _ffmpeg(path, [], ["-c", "copy", "-f", "framecrc"])
        lines = [line.split(",") for line in listed.decode("ascii", "replace").splitlines()]
        ticks, unit = _unit(lines), [line for line in lines if len(line) >= 6]
        times = np.sort(np.array([float(line[2]) * ticks for line in unit], np.float64))
        if not len(times):
            raise ValueError(errors or "it has no frames")
        return VideoTables(times - times[0], None)


def _unit(lines: Sequence[Sequence[str]]) -> float:
    """Return the seconds of a tick in a list of packets: `#tb 0: 1/10240`."""
    (words,) = [line[0] for line in lines if line and line[0].startswith("#tb 0:")]
    ticks, per = words.removeprefix("#tb 0:").split("/")
    return float(ticks) / float(per)


def decode(path: Path, times: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Decode frames of a file.

    Args:
        path: the file.
        times: float64 [N], the times of all its frames.
        chosen: int64 [T], numbers of the frames to return, ascending.

    Returns: the frames, uint8 [T, H, W, 3], in ffmpeg's own size and not rotated; height and width.

    Raises: DataError if ffmpeg finds other frames than the file's tables list.
    """
    first, last = int(chosen[0]), int(chosen[-1])
    expected = times[first : last + 1]
    begin = 0.5 * (times[first - 1] + times[first]) if first else 0.0
    seek = ["-ss", f"{begin:.6f}"] if first else []
    with reading(path, WHOLE_VIDEO, AGAIN):
        output, words = _ffmpeg(
            path,
            [*seek, "-noautorotate"],
            [*_EACH_FRAME, "-frames:v", str(len(expected)), *_AS_RGB],
        )
        shown = _SHOWN.findall(words)[: len(expected)]
        sizes = {(int(height), int(width)) for _, _, width, height in shown}
        errors = _errors(words)
        if len(sizes) > 1:
            raise ValueError(f"its pictures change their size: {sorted(sizes)}")
        height, width = next(iter(sizes), (0, 0))
        if not shown or len(output) != len(expected) * height * width * 3:
            found = len(output) // (height * width * 3) if height * width else 0
            raise DataError(
                f"{path}: {found} frames of {height}x{width} from {times[first]:.3f} s on, expected "
                f"{len(expected)}; {AGAIN}. {errors}".strip()
            )
        if shown[0][1].startswith(DEPTH_FORMATS):
            raise DataError(
                f"{path} holds {shown[0][1]}, more than 8 bits of one channel like a depth map, "
                "expected colours; leave this camera out."
            )
        found_s = begin + np.array([float(each[0]) for each in shown])
        gaps = np.diff(expected)
        least = max(TOLERANCE_S, 0.4 * float(gaps[gaps > 0].min())) if (gaps > 0).any() else 0.5
        if len(found_s) == len(expected) and (off := np.abs(found_s - expected)).max() > least:
            raise ValueError(
                f"ffmpeg shows frame {first + int(off.argmax())} at {found_s[off.argmax()]:.4f} s, "
                f"its own tables at {expected[off.argmax()]:.4f} s"
            )
        if errors:
            _log.warning("%s: ffmpeg reports %s; pictures may be damaged", path, errors)
        frames = np.frombuffer(output, np.uint8).reshape(len(expected), height, width, 3)
        return frames[chosen - first], (height, width)


def _ffmpeg(path: Path, before: Sequence[str], after: Sequence[str]) -> tuple[bytes, str]:
    """Return ffmpeg's output and messages. Raises: ValueError with them if it fails."""
    from imageio_ffmpeg import get_ffmpeg_exe  # needed only for videos

    command = [get_ffmpeg_exe(), "-hide_banner", "-nostdin", "-loglevel", "level+info"]
    command += ["-nostats", "-xerror", "-threads", "1"]
    # a file of another kind may name further files
    command += ["-protocol_whitelist", "file,pipe", "-format_whitelist", CONTAINERS]
    command += [*before, "-i", f"file:{path}", "-map", "0:v:0", *after, "-"]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    words = done.stderr.decode(errors="replace")
    if done.returncode != 0:
        raise ValueError(_errors(words) or f"ffmpeg ends with status {done.returncode}")
    return done.stdout, words


def _errors(words: str) -> str:
    """Return the first error among ffmpeg's messages; those after it repeat it."""
    lines = (re.split(r"\[(?:error|fatal|panic)\] ", line) for line in words.splitlines())
    return next((line[-1].strip() for line in lines if len(line) > 1), "")


def _are_apart(segments: Sequence[Segment]) -> bool:
    begins = [segment.from_s for segment in segments]
    return all(one < other for one, other in itertools.pairwise(begins))


def _episodes(segments: Sequence[Segment]) -> str:
    numbers = sorted(segment.episode for segment in segments)
    return (
        f"episode {numbers[0]}"
        if len(numbers) == 1
        else f"{len(numbers)} episodes, {numbers[0]} to {numbers[-1]}"
    )
