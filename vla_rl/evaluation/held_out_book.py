"""The results of held-out episodes of one run: a file with a line for each, and the same in memory.

The file has results of several weight versions. An episode's identity is its key, and each version
has at most one line for a key.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import RenderableType

from vla_rl.errors import ConfigError
from vla_rl.evaluation.results import Key, line_outlet, whole_lines
from vla_rl.reporting.record_files import set_aside_lines
from vla_rl.types import EpisodeSpec, Trajectory


class HeldOutRow(NamedTuple):
    """One line: an episode, the weights that acted, and what it was worth."""

    weight_version: int
    key: Key
    value: float
    """1 for a success and 0 for a failure, or the episode's score."""


class RowFormat(NamedTuple):
    """The format of a run's held-out results."""

    file: str
    """Name of the file in the run's folder."""

    measure: str
    """Name of the mean of `value`: `success_rate`, or `score`."""

    line_of: Callable[[int, Trajectory], bytes]
    """Returns the line of a trajectory by a weight version; a function at the top of a module, so
    that another process can import it."""

    row_in: Callable[[bytes], HeldOutRow]
    """Reads a line. Raises: ValueError, RecursionError."""

    key_of: Callable[[EpisodeSpec], Key]
    """Returns the key that the line of an episode will have."""

    table_of: Callable[[Sequence[bytes]], RenderableType]
    """Returns a table of lines, by weight version."""


def choosing(format: RowFormat) -> RowFormat:
    """Return the format of the results on the starts that choose: a file of their own."""
    name = Path(format.file)
    return format._replace(file=f"{name.stem}_choose{name.suffix}")


class HeldOutBook:
    """Reads the results of a run and adds to them; a line is on disk when `add` returns.

    A line that finds no room on a full disk waits in memory, and is written with the next one.

    Raises: ConfigError for damaged lines.
    """

    def __init__(self, path: Path, format: RowFormat) -> None:
        self.format = format
        self.lines = whole_lines(path).splitlines()
        self.rows = [
            _row_in(line, format, f"{path}, line {number}")
            for number, line in enumerate(self.lines, start=1)
        ]
        self._outlet = line_outlet(path)
        self._turn = asyncio.Lock()

    def missing(self, version: int, episodes: Iterable[EpisodeSpec]) -> list[EpisodeSpec]:
        """Return the episodes that a weight version has not run yet."""
        run = self.keys_of(version)
        return [episode for episode in episodes if self.format.key_of(episode) not in run]

    def keys_of(self, version: int) -> Collection[Key]:
        """Return the keys of all episodes that a weight version has run."""
        return {row.key for row in self.rows if row.weight_version == version}

    async def add(self, line: bytes) -> None:
        """Append the line of an episode."""
        self.lines.append(line)
        self.rows.append(self.format.row_in(line))
        async with self._turn:  # the outlet is for one thread at a time
            await asyncio.to_thread(
                self._outlet.put, f"episode {len(self.rows)}", line.rstrip(b"\n") + b"\n"
            )


def set_aside_rows(path: Path, format: RowFormat, last: int) -> None:
    """Move the lines of weight versions after `last` to a file beside `path`.

    A damaged line stays, and is reported when the file is read.

    Raises: OSError.
    """

    def is_kept(line: bytes) -> bool:
        try:
            return format.row_in(line).weight_version <= last
        except (ValueError, RecursionError):
            return True

    set_aside_lines(path, is_kept)


def _row_in(line: bytes, format: RowFormat, where: str) -> HeldOutRow:
    try:
        return format.row_in(line)
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or no result
        raise ConfigError(
            f"{where} is not a result: {error}; remove that line, and its episode is run again"
        ) from error
