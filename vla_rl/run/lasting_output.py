"""Standard output and error that never fail.

Printing to a closed terminal or pipe, or to a full disk, raises nothing; letters that the output
cannot encode are printed as escapes, such as `\\xfc`.

Without this, a print ends a run of hours when the terminal closes, the disk of the log file is
full, or a task's name is not ASCII.
"""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, Final, TextIO, cast

_GONE: Final = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)
"""Errors of a stream whose reader is gone for good; other errors, such as a full disk, may pass."""


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """While the context is open, drop output that cannot be printed.

    That includes what a stream without a reader still buffers.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream whose `write` and `flush` raise neither OSError nor UnicodeEncodeError.

    Everything else is the stream's own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lost(error)
            return len(text)
        except UnicodeEncodeError as error:
            return self.write(
                text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            )

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        """Redirect a stream without a reader to nowhere.

        Its buffer would fail again, at the latest at the process's end.
        """
        if error.errno not in _GONE:
            return
        # a stream of a test or a notebook has no descriptor
        with contextlib.suppress(OSError, ValueError):
            descriptor = self._stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
