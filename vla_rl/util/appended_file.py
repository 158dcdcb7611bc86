"""A file that grows by whole records, even if its disk is full or fails.

Traces, metrics and results are written with it. It is in this package because the trace needs it,
and all packages that write results may import this one.
"""

import contextlib
import errno
import os
from os import write as _write
from pathlib import Path
from typing import Final

from vla_rl.util.ownership import is_open_at

BLOCK: Final = 1 << 16
"""Bytes read at a time when searching for the end of the last whole line."""


class AppendedFile:
    """Appends records, each of which is in the file completely or not at all.

    The part that a full disk leaves is removed.

    The first record opens the file. Only one writer per file, and one thread at a time.

    Args:
        path: the file, in a folder that exists.
        opening: bytes at the beginning of an empty file; written together with the first record.
        lines: True if records are lines. An incomplete line at the end of an existing file, as a
            kill leaves it, is cut off.
        anew: discard the content of an existing file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        opening: bytes = b"",
        lines: bool = False,
        anew: bool = False,
    ) -> None:
        self.path = Path(path)
        self._opening, self._has_lines, self._is_anew = opening, lines, anew
        self._descriptor: int | None = None
        self._size = 0
        self._is_torn = False

    @property
    def size(self) -> int:
        """Bytes of complete records, once a record was written; 0 before."""
        return self._size

    def write(self, record: bytes | memoryview, *, sync: bool = False) -> int:
        """Append a record, with `sync` also to the disk itself; return its length.

        Raises: OSError with the path if the record could not be written; none of it then stays in
            the file. A file that was removed or replaced since its last record also raises, and the
            next record begins a new file.
        """
        try:
            descriptor = self._opened()
            if self._is_torn:
                self._take_back(descriptor)
            # The opening goes with the first record, so that a file is never there with its opening
            # alone.
            whole = record if self._size else self._opening + record
            # before the write: its error does not tell how much of the record is in the file
            self._is_torn = True
            _write_all(descriptor, whole)
            if sync:
                os.fsync(descriptor)
            self._is_torn = False
        except OSError as error:
            if self._descriptor is not None and self._is_torn:
                with contextlib.suppress(OSError):  # the next record tries again
                    self._take_back(self._descriptor)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._size += len(whole)
        return len(record)

    def sync(self) -> None:
        """Flush all records to the disk itself. Raises: OSError."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; a later record opens it again and is appended."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def _opened(self) -> int:
        if self._descriptor is not None:
            # records for a file without a name would be lost without a word
            if is_open_at(self._descriptor, self.path):
                return self._descriptor
            self.close()
            raise FileNotFoundError(errno.ENOENT, "the file was removed while records were written")
        flags = (
            os.O_WRONLY
            | os.O_CREAT
            | os.O_APPEND
            | os.O_CLOEXEC
            | (os.O_TRUNC if self._is_anew else 0)
        )
        descriptor = os.open(self.path, flags, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            # A kill in the middle of a write leaves half a line, to which the next record would be
            # glued.
            self._size = _end_of_last_line(self.path, size) if self._has_lines else size
            if self._size < size:
                os.ftruncate(descriptor, self._size)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self._is_anew, self._is_torn = descriptor, False, False
        return descriptor

    def _take_back(self, descriptor: int) -> None:
        os.ftruncate(descriptor, self._size)
        self._is_torn = False


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        num_written = _write(descriptor, left)
        if num_written == 0:  # a full disk usually raises, but POSIX does not promise that
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left = left[num_written:]


def _end_of_last_line(path: Path, size: int) -> int:
    """Return the number of bytes up to and including the last newline."""
    with path.open("rb") as file:
        end = size
        while end > 0:
            start = max(0, end - BLOCK)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0
