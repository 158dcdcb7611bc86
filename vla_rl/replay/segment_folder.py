"""The folder of a replay buffer: its segments, those that wait for room, and those that are not needed.

    segment-00000012.rows        complete; its name and place in the order are its number
    segment-00000013.rows.part   half-written, removed when the folder is opened
    owner.json                   the process that has the folder

A full disk delays segments: they wait in memory, in order, and a checkpoint carries them.
"""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec
import numpy as np

from vla_rl.errors import DataError
from vla_rl.replay.config import ReplayConfig
from vla_rl.replay.segments import (
    SUFFIX,
    SegmentHeader,
    SegmentName,
    list_segments,
    name_segment,
    read_number,
    read_segment,
    require_layout,
    sync_folder,
    write_segment,
)
from vla_rl.replay.transitions import TransitionLayout
from vla_rl.util.ownership import sole_owner

logger = logging.getLogger(__name__)

OWNER_FILE: Final = "owner.json"

LoadedSegment = tuple[SegmentHeader, SegmentName, np.ndarray]


class UnwrittenSegment(msgspec.Struct, frozen=True, kw_only=True):
    """A segment that a full disk keeps in memory, as a checkpoint carries it."""

    header: SegmentHeader
    rows: bytes


class SegmentFolder:
    """Segments on the disk; one process at a time has the folder. Use it as a context manager.

    Args:
        path: the folder, made if it is missing.
        layout: layout that every segment has to have.
        config: what happens to damaged segments.
    """

    def __init__(self, path: Path, layout: TransitionLayout, config: ReplayConfig) -> None:
        self.path, self._layout, self._config = path, layout, config
        self._unwritten: dict[int, LoadedSegment] = {}
        self._retired: set[int] = set()
        self._is_full = False
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be made ({error.strerror}), expected a folder for the rows of a replay "
                "buffer; name another one."
            ) from None
        owner = sole_owner(self.path / OWNER_FILE, f"the replay buffer {self.path}")
        self._exits.enter_context(owner)
        for part in self.path.glob(f"segment-*{SUFFIX}.part"):
            part.unlink()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.write_waiting()
        if self._unwritten:
            logger.warning(
                "%s found no room for %d segments; what no checkpoint carries of them is lost.",
                self.path,
                len(self._unwritten),
            )
        self._exits.close()

    @property
    def num_waiting_rows(self) -> int:
        """Rows that are in memory alone."""
        return sum(len(rows) for _, _, rows in self._unwritten.values())

    def add(self, header: SegmentHeader, rows: np.ndarray) -> SegmentName:
        """Take a segment behind those that wait; `write` writes it."""
        name = name_segment(header, rows)
        self._unwritten[header.number] = (header, name, rows)
        return name

    def write(self) -> None:
        """Write all segments that wait; without room they go on waiting, with one warning."""
        was_full = self._is_full
        error = self.write_waiting()
        self._is_full = error is not None
        if error is not None and not was_full:
            logger.warning(
                "%s cannot be written (%s); rows wait in memory and are sampled all the same. Make room.",
                self.path,
                error,
            )
        elif error is None and was_full:
            logger.warning("%s can be written again; no row waits any more.", self.path)

    def write_waiting(self) -> OSError | None:
        """Write the segments that wait, oldest first; return the error of the first that cannot be."""
        written, failure = [], None
        try:
            for number in sorted(self._unwritten):
                write_segment(self.path, *self._unwritten[number])
                written.append(number)
        except OSError as error:
            failure = error
        if written:
            # once for all of them: it costs as much as syncing a segment
            try:
                sync_folder(self.path)
            except OSError as error:
                return error
        for number in written:
            del self._unwritten[number]
        return failure

    def list_waiting(self) -> tuple[UnwrittenSegment, ...]:
        """Return the segments that wait, for a checkpoint to carry."""
        return tuple(
            UnwrittenSegment(header=header, rows=rows.tobytes())
            for _, (header, _, rows) in sorted(self._unwritten.items())
        )

    def retire(self, numbers: Iterable[int]) -> None:
        """Mark segments as not sampled any more; `remove_retired` removes them."""
        for number in numbers:
            if self._unwritten.pop(number, None) is None:
                self._retired.add(number)

    def remove_retired(self, needed: Collection[int]) -> None:
        """Remove the retired segments that no checkpoint needs."""
        for number in self._retired - set(needed):
            with contextlib.suppress(OSError):  # tried again by the next checkpoint
                (self.path / SegmentName(number=number, num_rows=0, checksum=0).file_name).unlink(
                    missing_ok=True
                )
                self._retired.discard(number)

    def load_all(self) -> list[LoadedSegment]:
        """Read every segment of the folder, oldest first.

        Raises: DataError for a damaged one, unless `config.damaged` drops it, and for another layout.
        """
        return self.load_paths(list_segments(self.path))

    def load_paths(self, paths: Sequence[Path]) -> list[LoadedSegment]:
        """Read segments, oldest first. Raises: as `load_all`."""
        return self._read(paths, read_segment)

    def load_named(self, names: Sequence[SegmentName]) -> list[LoadedSegment]:
        """Read the segments that a checkpoint names. Raises: as `load_all`, and for missing ones."""

        def read(path: Path) -> LoadedSegment:
            if not path.exists():
                raise DataError(f"{path} is missing, expected the rows that the checkpoint names.")
            found = read_segment(path)
            if found[1] != by_path[path]:
                raise DataError(
                    f"{path} has other rows than those that the checkpoint names: {found[1]}, expected "
                    f"{by_path[path]}; another run wrote it."
                )
            return found

        by_path = {self.path / name.file_name: name for name in names}
        return self._read(list(by_path), read)

    def _read(
        self, paths: Iterable[Path], read: Callable[[Path], LoadedSegment]
    ) -> list[LoadedSegment]:
        found = []
        for path in paths:
            try:
                loaded = read(path)
            except DataError as error:
                if self._config.damaged == "refuse":
                    raise DataError(
                        f"{error} To go on without its rows, set damaged = 'drop' (--replay.damaged drop)."
                    ) from error
                logger.warning("%s Its rows are dropped.", error)
                continue
            require_layout(path, loaded[0], self._layout)
            found.append(loaded)
        return found

    def restore_waiting(self, waiting: Sequence[UnwrittenSegment]) -> list[LoadedSegment]:
        """Take over the segments that a checkpoint carries, and write them if there is room."""
        loaded = []
        for each in waiting:
            rows = np.frombuffer(each.rows, np.uint8).copy().view(self._layout.row_dtype)
            segment = (each.header, name_segment(each.header, rows), rows)
            self._unwritten[each.header.number] = segment
            loaded.append(segment)
        self.write_waiting()
        return loaded

    def list_newer(self, names: Sequence[SegmentName], next_number: int) -> list[Path]:
        """Return the segments that are newer than a checkpoint.

        Older ones that it does not name were dropped before it, and are retired.
        """
        named = {name.file_name for name in names}
        newer = []
        for path in list_segments(self.path):
            number = read_number(path)
            if path.name in named or number is None:
                continue
            if number >= next_number:
                newer.append(path)
            else:
                self._retired.add(number)
        return newer
