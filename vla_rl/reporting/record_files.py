"""Files of records that a run adds to: a write that fails never ends the run.

A full disk must never end a run. Records that a `RetryingWriter` could not write wait in memory, in
order, and are tried again with the next record. Things whose failure a `FailureReporter` reports are
lost. The first of several failures is reported, and so is their end. Lines that a resumed run makes
again move from their file to one next to it.
"""

import logging
import textwrap
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec

from vla_rl.util.appended_file import AppendedFile
from vla_rl.util.atomic_files import replace_file

logger = logging.getLogger(__name__)

RecordT = TypeVar("RecordT")

MOST_CHARACTERS: Final = 600
"""Most characters of a reason, such as ffmpeg's output, that are shown."""

MOST_WAITING: Final = 1000
"""Most records that wait; of metrics, these are about 10 MB."""


class FailureReporter:
    """Reports the first of several failures in a row, counts them, and reports their end.

    Args:
        what: the action that fails, as the subject of a sentence.
        consequence: the consequence of a failure, as the end of a sentence.
    """

    def __init__(self, what: str, consequence: str) -> None:
        self._what, self._consequence = what, consequence
        self._num_in_a_row = 0
        self.num_failed = 0
        """Failures so far."""

    def failed(self, which: str, error: BaseException) -> None:
        """Count the failure of `which`, such as "update 3"."""
        self.num_failed += 1
        self._num_in_a_row += 1
        # a full disk fails at every episode: one line at its beginning and one at its end say as
        # much
        if self._num_in_a_row == 1:
            reason = str(error) if isinstance(error, OSError) and str(error) else repr(error)
            reason = textwrap.shorten(reason, MOST_CHARACTERS)
            logger.warning("%s failed at %s: %s; %s", self._what, which, reason, self._consequence)

    def worked(self) -> None:
        """Count a success."""
        if self._num_in_a_row > 0:
            logger.warning("%s works again, after %d failures", self._what, self._num_in_a_row)
            self._num_in_a_row = 0


class RetryingWriter(Generic[RecordT]):
    """Writes records in their order and never raises.

    A record that cannot be written (OSError) waits for the next one.

    A record that fails with another error would fail again, and is left out. Use it from one thread
    at a time.

    Args:
        name: the name of the output, for the warnings.
        write: writes one record, completely or not at all.
        close: closes files and connections.
        most_waiting: most records that wait; beyond that the oldest is left out.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[RecordT], object],
        close: Callable[[], object] = lambda: None,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._name, self._write, self._close, self._most_waiting = name, write, close, most_waiting
        self._waiting: deque[tuple[str, RecordT]] = deque()
        self._late = FailureReporter(
            name, "it waits in memory and is tried again with the next one"
        )
        self._lost = FailureReporter(name, "it is left out")
        self._is_overfull = False

    @property
    def waiting(self) -> list[RecordT]:
        """Return the records that were not written yet, the oldest first."""
        return [record for _, record in self._waiting]

    def put(self, which: str, record: RecordT) -> None:
        """Write a record after those that wait.

        `which` names it in warnings, such as "update 3".
        """
        self._waiting.append((which, record))
        self.flush()
        if len(self._waiting) > self._most_waiting:
            which, _ = self._waiting.popleft()
            if not self._is_overfull:
                self._is_overfull = True
                logger.warning(
                    "%s: %d records wait, which is the most that are kept: %s is left out, and "
                    "with each new record the oldest",
                    self._name,
                    self._most_waiting,
                    which,
                )

    def flush(self) -> None:
        """Write the records that wait, until one fails."""
        while self._waiting:
            # the oldest first and removed last: records stay in order, and none is lost if this is
            # interrupted
            which, record = self._waiting[0]
            try:
                self._write(record)
            except OSError as error:
                self._late.failed(which, error)
                return
            except Exception as error:
                # a back end may raise any error; the run continues without it
                self._lost.failed(which, error)
            else:
                self._lost.worked()
            self._waiting.popleft()
        self._late.worked()
        self._is_overfull = False

    def close(self) -> None:
        """Write the records that wait, if there is room now, and close.

        Records that are lost are reported.
        """
        self.flush()
        if self._waiting:
            logger.warning(
                "%s: %d records were never written, the first of them %s",
                self._name,
                len(self._waiting),
                self._waiting[0][0],
            )
        try:
            self._close()
        except Exception as error:  # the others still have to be closed
            logger.warning(
                "%s failed to close, its last records may be lost: %r", self._name, error
            )


_MOST_NAMED = 10


def set_aside_lines(path: Path, is_kept: Callable[[bytes], bool]) -> None:
    """Move the lines that are not kept to `<name>-undone<suffix>`; nothing is deleted.

    A line that `is_kept` calls damaged, or a last one that a kill cut off, is moved too, and one
    printed line says so.

    Args:
        path: a file of one object a line.
        is_kept: returns whether a line stays; raises ValueError for a damaged one that moves.

    Raises: OSError; the file is then unchanged.
    """
    kept, undone, damaged = list[bytes](), list[bytes](), list[int]()
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        whole = line if line.endswith(b"\n") else line + b"\n"
        try:
            if whole is not line:  # a kill may have cut it off anywhere
                msgspec.json.decode(line, type=dict[str, Any])
            (kept if is_kept(line) else undone).append(whole)
        except (ValueError, RecursionError):  # not JSON, no object, not UTF-8, or another's
            undone.append(whole)
            damaged.append(number)
    if not undone and b"".join(kept) == b"".join(lines):
        return
    aside = path.with_name(f"{path.stem}-undone{path.suffix}")
    if undone:
        # before the file is replaced: a kill in between leaves these lines twice, and never loses
        # one
        appended = AppendedFile(aside, lines=True)
        appended.write(b"".join(undone), sync=True)
        appended.close()
    replace_file(path, b"".join(kept))
    if damaged:
        print(f"{path}: {_describe_lines(damaged)} damaged, moved to {aside.name}", flush=True)


def _describe_lines(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"line {numbers[0]} is"
    more = f" and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else ""
    return f"lines {', '.join(map(str, numbers[:_MOST_NAMED]))}{more} are"
