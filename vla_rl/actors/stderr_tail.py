"""The stderr of a child: passed on with the child's name in front.

The last lines are kept for error messages.
"""

import asyncio
import contextlib
import os
import sys
from collections import deque

_LINES_KEPT = 20
_LONGEST_LINE = 2000


class StderrTail:
    """Reads the pipe `fd` on the running loop; owns it."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd, self._name = fd, name
        self._rest = b""
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._open = True
        os.set_blocking(fd, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines, oldest first, including an unfinished one."""
        unfinished = [self._rest.decode(errors="replace")] if self._rest else []
        return tuple([*self._lines, *unfinished][-_LINES_KEPT:])

    def close(self) -> None:
        """Read the rest, without waiting for descendants that may hold the pipe, and close it."""
        if self._open:
            while self._open and self._read():
                pass
            if self._rest:
                self._take_line(self._rest)
                self._rest = b""
            self._shut()

    def _read(self) -> bool:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._shut()
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._take_line(line)
        if len(self._rest) > _LONGEST_LINE:
            self._take_line(self._rest)
            self._rest = b""
        return True

    def _take_line(self, line: bytes) -> None:
        text = line[:_LONGEST_LINE].decode(errors="replace")
        self._lines.append(text)
        with contextlib.suppress(
            OSError, ValueError
        ):  # our stderr may be closed; the child's end must be noticed anyway
            sys.stderr.write(f"[{self._name}] {text}\n")

    def _shut(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
