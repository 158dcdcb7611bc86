"""Standard output and error that a run may print to whatever becomes of them: a closed terminal or pipe, a full disk.

Without it a print ends a run of hours when the terminal closes, or when the log file that it goes to has no more room.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, Final, TextIO, cast

_GONE: Final = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)
"""Errors of a stream that has no reader any more; others, such as a full disk, may pass."""


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Inside, what cannot be printed is dropped. What a stream without readers still holds at the end is dropped too."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream whose `write` and `flush` never raise an OSError; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lost(error)
            return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        """Let a stream that nothing reads go nowhere: its buffer would fail again, at the latest when the process ends."""
        if error.errno not in _GONE:
            return
        with contextlib.suppress(OSError, ValueError):  # a stream of a test or a notebook has no descriptor
            descriptor = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
