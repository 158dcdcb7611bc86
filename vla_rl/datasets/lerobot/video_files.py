"""Frames of one video file: their times out of its tables, their images out of ffmpeg.

An mp4 container lists each frame with its time. That takes a millisecond, so it can be done for every
file when a data set is opened; ffmpeg would read whole files.

    moov ── trak ── mdia ── mdhd                    ticks a second
              │        └─── minf ── stbl ── stsd    height and width
              │                       ├──── stsz    number of frames
              │                       ├──── stts    ticks between frames, in decoding order
              │                       └──── ctts    ticks from decoding to showing
              └──── edts ── elst                    the part that is shown
"""

import logging
import re
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final, NamedTuple

import numpy as np

from vla_rl.datasets.lerobot.layout import DEPTH_FORMATS
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import reading

_log = logging.getLogger(__name__)

MOST_MOOV: Final = 1 << 28
MOST_FRAMES: Final = 1 << 24
"""Frames of a file, 155 hours at 30 a second."""

MOST_BOXES: Final = 10_000

_EDIT, _LONG_EDIT = struct.Struct(">Ii4x"), struct.Struct(">Qq4x")


class VideoTables(NamedTuple):
    """Frames of a video file.

    Attributes:
        times: float64 [N], when each is shown, in order, in s after the first.
        size: height and width of the coded images; None if unknown.

    Example:
        VideoTables(times=np.array([0.0, 0.05, 0.1]), size=(256, 256))
    """

    times: np.ndarray
    size: tuple[int, int] | None


def read_mp4_tables(path: Path) -> VideoTables | None:
    """Return the tables of an mp4 file.

    None for other containers, and for files whose tables are damaged, in fragments or of several
    edits.

    Raises: OSError.
    """
    with path.open("rb") as file:
        try:
            moov = _find_moov(file)
            movie = _get_box(moov, b"mvhd")
            for kind, content in _iterate_boxes(moov):
                if kind == b"trak" and bytes(_get_box(content, b"mdia", b"hdlr")[8:12]) == b"vide":
                    return _read_tables(content, _read_timescale(movie), path.stat().st_size)
        except (LookupError, ValueError, struct.error):
            pass
    return None


def _read_tables(trak: memoryview, movie_ticks: int, file_bytes: int) -> VideoTables:
    ticks = _read_timescale(_get_box(trak, b"mdia", b"mdhd"))
    stbl = _get_box(trak, b"mdia", b"minf", b"stbl")
    height, width = reversed(struct.unpack_from(">HH", _get_box(stbl, b"stsd"), 8 + 32))
    (num,) = struct.unpack_from(">I", _get_box(stbl, b"stsz"), 8)
    # a frame takes a byte at least: a damaged count would otherwise allocate gigabytes
    if not 0 < num <= min(MOST_FRAMES, file_bytes):
        raise ValueError(f"{num} frames")
    steps = _read_runs(_get_box(stbl, b"stts"), num, ">u4")
    shown = np.concatenate([[0], np.cumsum(steps[:-1])])
    if late := _find_boxes(stbl, b"ctts"):
        shown = shown + _read_runs(late[0], num, ">i4" if late[0][0] else ">u4")
    # Frames are stored in decoding order, and one that depends on a later frame is stored after it.
    shown = np.sort(shown)
    for edts in _find_boxes(trak, b"edts"):
        start, length = _read_edit(_get_box(edts, b"elst"))
        end = start + length * ticks / movie_ticks if length else np.inf
        # lengths are rounded to the movie's ticks
        shown = shown[(shown >= start) & (shown < end + ticks / movie_ticks)]
    return VideoTables((shown - shown[:1]) / ticks, (height, width))


def _find_moov(file: IO[bytes]) -> memoryview:
    for _ in range(MOST_BOXES):
        start = file.tell()
        size, kind = struct.unpack(">I4s", file.read(8))
        header = 8
        if size == 1:
            (size,), header = struct.unpack(">Q", file.read(8)), 16
        if kind == b"moov":
            if not header <= size <= MOST_MOOV:
                break
            return memoryview(file.read(size - header))
        if size < header:  # 0: up to the end of the file
            break
        file.seek(start + size)
    raise LookupError("moov")


def _iterate_boxes(content: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    begin = 0
    while begin + 8 <= len(content):
        size, kind = struct.unpack_from(">I4s", content, begin)
        if not 8 <= size <= len(content) - begin:
            raise ValueError(f"a box of {size} bytes")
        yield kind, content[begin + 8 : begin + size]
        begin += size


def _find_boxes(content: memoryview, kind: bytes) -> list[memoryview]:
    return [inside for found, inside in _iterate_boxes(content) if found == kind]


def _get_box(content: memoryview, *kinds: bytes) -> memoryview:
    for kind in kinds:
        (content,) = _find_boxes(content, kind)
    return content


def _read_timescale(header: memoryview) -> int:
    ticks: int = struct.unpack_from(">I", header, 20 if header[0] else 12)[0]
    if ticks == 0:
        raise ValueError("no ticks")
    return ticks


def _read_runs(table: memoryview, num: int, kind: str) -> np.ndarray:
    """Return a table of (count, value) as one value for each frame, int64 [num]."""
    (entries,) = struct.unpack_from(">I", table, 4)
    rows = np.frombuffer(table[8:], ">u4", 2 * entries).reshape(-1, 2)
    counts = rows[:, 0].astype(np.int64)
    if counts.sum() != num:
        raise ValueError(f"{counts.sum()} of {num} frames")
    return np.repeat(rows[:, 1].copy().view(kind).astype(np.int64), counts)


def _read_edit(elst: memoryview) -> tuple[int, int]:
    """Return begin, in the track's ticks, and length, in the movie's, of the part that is shown."""
    (entries,) = struct.unpack_from(">I", elst, 4)
    layout = _LONG_EDIT if elst[0] else _EDIT
    edits = [
        layout.unpack_from(elst, 8 + layout.size * number)
        for number in range(entries if entries <= 2 else 0)
    ]
    shown = [(start, length) for length, start in edits if start >= 0]  # -1: a pause before it
    (edit,) = shown
    return edit


TOLERANCE_S: Final = 1e-4
"""Largest distance of a frame from the time of its row, in a file of another rate: LeRobot's."""

CONTAINERS: Final = "mov,mp4,matroska,webm,avi,mpegts"
"""Formats that ffmpeg may read: not those that name further files or addresses."""

WHOLE_VIDEO: Final = "a whole video"
ENCODE_AGAIN: Final = "download it again or encode it again"

_EACH_FRAME: Final = ("-vf", "showinfo=checksum=0", "-fps_mode", "passthrough")
"""Without passthrough, ffmpeg repeats and drops frames to keep a rate."""

_AS_RGB: Final = ("-f", "rawvideo", "-pix_fmt", "rgb24")
_SHOWN_FRAME: Final = re.compile(r"pts_time:(\S+).* fmt:(\S+) .*\bs:(\d+)x(\d+) ")


def read_video_tables(path: Path) -> VideoTables:
    """Return the times of a file's frames: from its tables if it is an mp4, else by ffmpeg.

    Raises: DataError.
    """
    with reading(path, WHOLE_VIDEO, ENCODE_AGAIN):
        tables = read_mp4_tables(path)
        if tables is not None and len(tables.times):
            return tables
        listed, errors = _run_ffmpeg(path, [], ["-c", "copy", "-f", "framecrc"])
        lines = [line.split(",") for line in listed.decode("ascii", "replace").splitlines()]
        ticks, unit = _read_tick_s(lines), [line for line in lines if len(line) >= 6]
        times = np.sort(np.array([float(line[2]) * ticks for line in unit], np.float64))
        if not len(times):
            raise ValueError(errors or "it has no frames")
        return VideoTables(times - times[0], None)


def _read_tick_s(lines: Sequence[Sequence[str]]) -> float:
    """Return the seconds of a tick in a list of packets: `#tb 0: 1/10240`."""
    (words,) = [line[0] for line in lines if line and line[0].startswith("#tb 0:")]
    ticks, per = words.removeprefix("#tb 0:").split("/")
    return float(ticks) / float(per)


def decode_frames(
    path: Path, times: np.ndarray, chosen: np.ndarray
) -> tuple[np.ndarray, tuple[int, int]]:
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
    # Between two frames: ffmpeg seeks to the frame at or after a time, and a rounded time may fall
    # on either side of it.
    begin = 0.5 * (times[first - 1] + times[first]) if first else 0.0
    seek = ["-ss", f"{begin:.6f}"] if first else []
    with reading(path, WHOLE_VIDEO, ENCODE_AGAIN):
        output, words = _run_ffmpeg(
            path,
            [*seek, "-noautorotate"],
            [*_EACH_FRAME, "-frames:v", str(len(expected)), *_AS_RGB],
        )
        shown = _SHOWN_FRAME.findall(words)[: len(expected)]
        sizes = {(int(height), int(width)) for _, _, width, height in shown}
        errors = _find_error(words)
        if len(sizes) > 1:
            raise ValueError(f"its images change their size: {sorted(sizes)}")
        height, width = next(iter(sizes), (0, 0))
        if not shown or len(output) != len(expected) * height * width * 3:
            found = len(output) // (height * width * 3) if height * width else 0
            raise DataError(
                f"{path}: {found} frames of {height}x{width} from {times[first]:.3f} s on, expected "
                f"{len(expected)}; {ENCODE_AGAIN}. {errors}".strip()
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
            _log.warning("%s: ffmpeg reports %s; images may be damaged", path, errors)
        frames = np.frombuffer(output, np.uint8).reshape(len(expected), height, width, 3)
        return frames[chosen - first], (height, width)


def _run_ffmpeg(path: Path, before: Sequence[str], after: Sequence[str]) -> tuple[bytes, str]:
    """Return ffmpeg's output and messages. Raises: ValueError with them if it fails."""
    from imageio_ffmpeg import get_ffmpeg_exe  # needed only for videos

    command = [get_ffmpeg_exe(), "-hide_banner", "-nostdin", "-loglevel", "level+info"]
    # One thread: an episode is decoded by each of several workers, which have the cores already.
    # -xerror: damaged frames would be shown as grey blocks.
    command += ["-nostats", "-xerror", "-threads", "1"]
    # a file of another kind may name further files
    command += ["-protocol_whitelist", "file,pipe", "-format_whitelist", CONTAINERS]
    command += [*before, "-i", f"file:{path}", "-map", "0:v:0", *after, "-"]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    words = done.stderr.decode(errors="replace")
    if done.returncode != 0:
        raise ValueError(_find_error(words) or f"ffmpeg ends with status {done.returncode}")
    return done.stdout, words


def _find_error(words: str) -> str:
    """Return the first error among ffmpeg's messages; those after it repeat it."""
    lines = (re.split(r"\[(?:error|fatal|panic)\] ", line) for line in words.splitlines())
    return next((line[-1].strip() for line in lines if len(line) > 1), "")
