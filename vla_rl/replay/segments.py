"""A segment: one file of rows that is complete or absent, and says what is in it.

    offset 0    magic (8 bytes), format, length of the header, checksum of the header, checksum of the rows
                (four little-endian uint32; both checksums are CRC-32)
    offset 24   the header as JSON, blanks up to a multiple of 64 bytes
    after it    the rows, as `TransitionLayout.row_dtype`

It is written under another name, synced, renamed, and never changed. A reader checks all of it before
it uses a row.
"""

import contextlib
import os
import struct
import zlib
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from vla_rl.errors import DataError
from vla_rl.replay.transitions import TransitionLayout
from vla_rl.util.appended_file import AppendedFile
from vla_rl.util.atomic_files import replacing
from vla_rl.util.foreign_data import reading
from vla_rl.util.values import excerpt

MAGIC: Final = b"VLARLROW"
FORMAT: Final = 1
PREFIX: Final = struct.Struct("<8s4I")
ALIGNMENT: Final = 64
MOST_HEADER: Final = 1 << 20
"""Bytes of a header; the names of a thousand tasks need a tenth of it."""

SUFFIX: Final = ".rows"
REMEDY: Final = "`vla-rl replay check` lists all damaged segments"

INSIDE_RUN: Final = "replay"
"""Folder of the rows in a run's folder, unless the run names another one."""


class _ReplayOptions(msgspec.Struct):
    folder: str | None = None


class _RunConfig(msgspec.Struct):
    """The part of a run's `config.json` that says where its rows are."""

    replay: _ReplayOptions


class SegmentHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a segment's rows, in front of them.

    Example:
        SegmentHeader(number=12, layout=layout, tasks=("libero_goal/3",), num_rows=96, is_success=True)
    """

    number: int
    """Position in the order in which segments were written."""

    layout: TransitionLayout
    tasks: tuple[str, ...]
    """Names that the rows' column `task` counts."""

    num_rows: int
    is_success: bool
    """Whether all episodes solved their tasks; if not, none of them did."""

    is_demonstration: bool = False
    source: str = ""
    """Data set or folder that the episodes were imported from; empty for those of the run itself."""


class SegmentName(msgspec.Struct, frozen=True, kw_only=True):
    """A segment as a checkpoint names it.

    Example:
        SegmentName(number=12, num_rows=96, checksum=2774181210)
    """

    number: int
    num_rows: int
    checksum: int
    """CRC-32 of the rows."""

    @property
    def file_name(self) -> str:
        """Name of the file in the folder of the buffer."""
        return f"segment-{self.number:08d}{SUFFIX}"


def name_segment(header: SegmentHeader, rows: np.ndarray) -> SegmentName:
    """Return the name of a segment with these rows."""
    checksum = zlib.crc32(rows.view(np.uint8).data)
    return SegmentName(number=header.number, num_rows=len(rows), checksum=checksum)


def write_segment(folder: Path, header: SegmentHeader, name: SegmentName, rows: np.ndarray) -> None:
    """Write a segment, sync it, and give it its name, which `sync_folder` syncs.

    Raises: OSError if the disk is full or fails; nothing of the segment stays.
    """
    text = msgspec.json.encode(header)
    text += b" " * (-(PREFIX.size + len(text)) % ALIGNMENT)
    prefix = PREFIX.pack(MAGIC, FORMAT, len(text), zlib.crc32(text), name.checksum)
    with replacing(folder / name.file_name) as part:
        file = AppendedFile(part, anew=True)
        with contextlib.closing(file):
            file.write(prefix + text)
            file.write(rows.view(np.uint8).data)


def sync_folder(folder: Path) -> None:
    """Sync the names of a folder's files, which a power cut could take away again. Raises: OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_header(path: Path) -> tuple[SegmentHeader, SegmentName]:
    """Read what a segment says about itself, without its rows.

    Raises: DataError naming the file and what is wrong with it.
    """
    with reading(path, "a replay segment", REMEDY), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header, name, start = _parse_header(path, file.read(PREFIX.size + MOST_HEADER))
        expected = start + header.num_rows * header.layout.row_dtype.itemsize
        if size != expected:
            raise DataError(
                f"{path} has {size} bytes, expected {expected}; it is damaged. {REMEDY}."
            )
        return header, name


def read_segment(path: Path) -> tuple[SegmentHeader, SegmentName, np.ndarray]:
    """Read a segment and check every byte of it.

    Returns: its header, its name in checkpoints, and its rows.
    Raises: DataError naming the file and what is wrong with it.
    """
    header, name = read_header(path)
    num_bytes = header.num_rows * header.layout.row_dtype.itemsize
    with reading(path, "a replay segment", REMEDY), path.open("rb") as file:
        file.seek(-num_bytes, os.SEEK_END)
        data = np.empty(num_bytes, np.uint8)
        num_read = file.readinto(data.data)
    if num_read != num_bytes or zlib.crc32(data.data) != name.checksum:
        raise DataError(
            f"{path} is not what was written (its checksum differs); it is damaged. {REMEDY}."
        )
    rows: np.ndarray = data.view(header.layout.row_dtype)
    if header.num_rows and not 0 <= rows["task"].min() <= rows["task"].max() < len(header.tasks):
        raise DataError(
            f"{path} counts tasks beyond its {len(header.tasks)} names; it is damaged. {REMEDY}."
        )
    return header, name, rows


def _parse_header(path: Path, data: bytes) -> tuple[SegmentHeader, SegmentName, int]:
    if len(data) < PREFIX.size or not data.startswith(MAGIC):
        raise DataError(
            f"{path} begins with {excerpt(data[:8])}, expected {MAGIC!r}; it is no replay segment, or it is "
            f"damaged. {REMEDY}."
        )
    _, version, length, header_checksum, checksum = PREFIX.unpack_from(data)
    if version != FORMAT:
        raise DataError(
            f"{path} has the format {version}, expected {FORMAT}; a newer vla_rl wrote it: read it with that "
            "one."
        )
    text = data[PREFIX.size : PREFIX.size + length]
    if len(text) != length or zlib.crc32(text) != header_checksum:
        raise DataError(f"the header of {path} is not what was written; it is damaged. {REMEDY}.")
    header = msgspec.json.decode(text, type=SegmentHeader)
    name = SegmentName(number=header.number, num_rows=header.num_rows, checksum=checksum)
    if path.name != name.file_name:
        raise DataError(f"{path} says that it is {name.file_name}; give it back its name.")
    return header, name, PREFIX.size + length


def find_buffer(folder: Path) -> Path:
    """Return the folder with the rows of a run, or the folder itself if it is not that of a run.

    The rows of a run with `replay.folder` are where its `config.json` says; a relative name counts from the
    working directory, as it did for the run.
    """
    inside, config = folder / INSIDE_RUN, folder / "config.json"
    if inside.is_dir() or not config.is_file():
        return inside if inside.is_dir() else folder
    try:
        named = msgspec.json.decode(config.read_bytes(), type=_RunConfig).replay.folder
    except (OSError, ValueError, RecursionError):
        return folder  # of a policy or a data set: others have files of this name
    return folder if named is None else Path(named)


def list_segments(folder: Path) -> list[Path]:
    """Return the complete segments of a folder, oldest first. Raises: DataError if it cannot be listed."""
    with reading(folder, "a folder that can be listed", "check its permissions"):
        return sorted(
            folder.glob(f"segment-*{SUFFIX}"), key=lambda path: (len(path.name), path.name)
        )


def read_number(path: Path) -> int | None:
    """Return the number in the name of a segment; None for another name."""
    number = path.name.removeprefix("segment-").removesuffix(SUFFIX)
    return int(number) if number.isdecimal() and len(number) <= 18 else None


def require_layout(path: Path, header: SegmentHeader, layout: TransitionLayout) -> None:
    """Raise DataError unless the rows of a segment have this layout and come from this base."""
    if difference := layout.describe_difference(header.layout):
        raise DataError(
            f"the rows of {path} are not this policy's: {difference}; give the policy that they were recorded "
            "with, or another folder."
        )
