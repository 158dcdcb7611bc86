"""Times and size of the frames of an mp4 file, read from its tables without decoding anything.

A container lists each frame with its time. That takes a millisecond, so it can be done for every
file when a data set is opened; ffmpeg would read whole files.

    moov ── trak ── mdia ── mdhd                    ticks a second
              │        └─── minf ── stbl ── stsd    height and width
              │                       ├──── stsz    number of frames
              │                       ├──── stts    ticks between frames, in decoding order
              │                       └──── ctts    ticks from decoding to showing
              └──── edts ── elst                    the part that is shown
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, NamedTuple

import numpy as np

MOST_MOOV: Final = 1 << 28
MOST_FRAMES: Final = 1 << 24
"""Frames of a file, 155 hours at 30 a second."""

MOST_BOXES: Final = 10_000

_EDIT, _LONG_EDIT = struct.Struct(">Ii4x"), struct.Struct(">Qq4x")


class VideoTables(NamedTuple):
    """Frames of a video file.

    Attributes:
        times: float64 [N], when each is shown, in order, in s after the first.
        size: height and width of the coded pictures; None if unknown.
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
            moov = _moov(file)
            movie = _only(moov, b"mvhd")
            for kind, content in _boxes(moov):
                if kind == b"trak" and bytes(_only(content, b"mdia", b"hdlr")[8:12]) == b"vide":
                    return _tables(content, _timescale(movie), path.stat().st_size)
        except (LookupError, ValueError, struct.error):
            pass
    return None


def _tables(trak: memoryview, movie_ticks: int, file_bytes: int) -> VideoTables:
    ticks = _timescale(_only(trak, b"mdia", b"mdhd"))
    stbl = _only(trak, b"mdia", b"minf", b"stbl")
    height, width = reversed(struct.unpack_from(">HH", _only(stbl, b"stsd"), 8 + 32))
    (num,) = struct.unpack_from(">I", _only(stbl, b"stsz"), 8)
    if not 0 < num <= min(MOST_FRAMES, file_bytes):
        raise ValueError(f"{num} frames")
    steps = _runs(_only(stbl, b"stts"), num, ">u4")
    shown = np.concatenate([[0], np.cumsum(steps[:-1])])
    if late := _all(stbl, b"ctts"):
        shown = shown + _runs(late[0], num, ">i4" if late[0][0] else ">u4")
    shown = np.sort(shown)
    for edts in _all(trak, b"edts"):
        start, length = _edit(_only(edts, b"elst"))
        end = start + length * ticks / movie_ticks if length else np.inf
        # lengths are rounded to the movie's ticks
        shown = shown[(shown >= start) & (shown < end + ticks / movie_ticks)]
    return VideoTables((shown - shown[:1]) / ticks, (height, width))


def _moov(file: IO[bytes]) -> memoryview:
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


def _boxes(content: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    place = 0
    while place + 8 <= len(content):
        size, kind = struct.unpack_from(">I4s", content, place)
        if not 8 <= size <= len(content) - place:
            raise ValueError(f"a box of {size} bytes")
        yield kind, content[place + 8 : place + size]
        place += size


def _all(content: memoryview, kind: bytes) -> list[memoryview]:
    return [inside for found, inside in _boxes(content) if found == kind]


def _only(content: memoryview, *kinds: bytes) -> memoryview:
    for kind in kinds:
        (content,) = _all(content, kind)
    return content


def _timescale(header: memoryview) -> int:
    ticks: int = struct.unpack_from(">I", header, 20 if header[0] else 12)[0]
    if ticks == 0:
        raise ValueError("no ticks")
    return ticks


def _runs(table: memoryview, num: int, kind: str) -> np.ndarray:
    """Return a table of (count, value) as one value for each frame, int64 [num]."""
    (entries,) = struct.unpack_from(">I", table, 4)
    rows = np.frombuffer(table[8:], ">u4", 2 * entries).reshape(-1, 2)
    counts = rows[:, 0].astype(np.int64)
    if counts.sum() != num:
        raise ValueError(f"{counts.sum()} of {num} frames")
    return np.repeat(rows[:, 1].copy().view(kind).astype(np.int64), counts)


def _edit(elst: memoryview) -> tuple[int, int]:
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
