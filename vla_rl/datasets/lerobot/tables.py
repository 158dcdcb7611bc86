"""Tables of a LeRobotDataset, checked row by row: frames in `data/`, tasks, episodes in `meta/`.

Errors name the file, row, episode and frame. The words of a task stand in the table of tasks, often a
second time in the lists of episodes, and in a folder that was converted also in the files of the other
version. All have to agree.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.datasets.lerobot.layout import (
    EPISODES_FILE_V2,
    EPISODES_FOLDER,
    OURS,
    TASKS_FILE,
    TASKS_FILE_V2,
    Info,
)
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import find_files, get_text, get_whole_number, reading
from vla_rl.util.imports import pa, pq
from vla_rl.util.values import compare_sources, excerpt

_log = logging.getLogger(__name__)

WHOLE_TABLE: Final = "a whole Parquet file"
CONVERT_AGAIN: Final = "download or convert the data set again"


class DataFile:
    """One Parquet file of frames: numbers are read at once, images by row group on demand.

    Args:
        path: the file.
        most_rows: rows that the data set has in all; a file that claims more is not read.
    """

    def __init__(self, path: Path, most_rows: int) -> None:
        self.path = path
        with reading(path, WHOLE_TABLE, CONVERT_AGAIN):
            # without the checksums pyarrow returns other numbers for a flipped bit, and no error
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
            metadata = self._file.metadata
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            self.num_rows = int(metadata.num_rows)
        if min(sizes, default=0) < 0 or sum(sizes) != self.num_rows or self.num_rows > most_rows:
            raise DataError(
                f"{path} claims {self.num_rows} rows, in row groups of {excerpt(sizes)}; expected at "
                f"most the {most_rows} frames of meta/info.json; {CONVERT_AGAIN}."
            )
        self._starts = np.cumsum([0, *sizes])
        """First row of each row group."""

    def has(self, name: str) -> bool:
        """Return whether there is a column of this name."""
        return name in self._file.schema_arrow.names

    def integers(self, name: str) -> np.ndarray:
        """Return a column of whole numbers, int64 [rows], stored plain, as floats or in lists."""
        with reading(f"{self.path}: {name!r}", "a column of whole numbers", CONVERT_AGAIN):
            values = self._values(name, 1)[0]
            if not pa.types.is_floating(values.type):
                return np.asarray(values.cast(pa.int64()).to_numpy(zero_copy_only=False), np.int64)
            floats = np.asarray(values.to_numpy(zero_copy_only=False), np.float64)
            broken = np.flatnonzero(~(np.isfinite(floats) & (floats == np.rint(floats))))
            if len(broken):
                raise DataError(
                    f"{self.path}: {name!r} is {floats[broken[0]]} in row {broken[0]}, expected a "
                    "whole number."
                )
            return floats.astype(np.int64)

    def read_numbers(self, name: str, width: int) -> np.ndarray:
        """Return a column, float32 [rows, width].

        Single numbers may be stored plain, as LeRobot does, or in lists.
        """
        with reading(f"{self.path}: {name!r}", "a column of numbers", CONVERT_AGAIN):
            values, lengths = self._values(name, width)
            wrong = np.flatnonzero(lengths != width)
            if len(wrong):
                row = int(wrong[0])
                raise DataError(
                    f"{self.path}: {name!r} has {lengths[row]} numbers in {self.describe_row(row)}, "
                    f"expected {width}."
                )
            # Whole numbers with a gap have no NaN; as floats, the gap is found below with its row.
            if values.null_count and not pa.types.is_floating(values.type):
                values = values.cast(pa.float64())  # NaN for what is missing
            with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and refused
                rows = np.asarray(values.to_numpy(zero_copy_only=False), np.float32)
                rows = rows.reshape(-1, width)
            bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
            if len(bad):
                raise DataError(
                    f"{self.path}: {name!r} is not a finite number in {self.describe_row(int(bad[0]))}."
                )
            return rows

    def encoded_image(self, name: str, row: int) -> dict[str, Any] | None:
        """Return `{"bytes": ..., "path": ...}` of one row without reading its whole row group."""
        self._require(name)
        group, index = self.find_row_group(row)
        with reading(f"{self.path}: {name!r}", "a column of images", CONVERT_AGAIN):
            # One row at a time: a row group may hold gigabytes of images, and only the first
            # decides about a camera.
            for batch in self._file.iter_batches(1, row_groups=[group], columns=[name]):
                if index == 0:
                    return _parse_image(batch.column(0).to_pylist()[0])
                index -= 1
        raise DataError(f"{self.path}: {name!r} has no {self.describe_row(row)}.")

    def encoded_images(self, name: str, row_group: int) -> list[dict[str, Any] | None]:
        """Return `{"bytes": ..., "path": ...}` for every row of a row group."""
        self._require(name)
        with reading(f"{self.path}: {name!r}", "a column of images", CONVERT_AGAIN):
            column = self._file.read_row_group(row_group, columns=[name]).column(name)
            images = [_parse_image(value) for value in column.to_pylist()]
            expected = int(self._starts[row_group + 1] - self._starts[row_group])
            if len(images) != expected:
                raise ValueError(f"row group {row_group} has {len(images)} rows, not {expected}")
            return images

    def find_row_group(self, row: int) -> tuple[int, int]:
        """Return the row group of a row, and the position in it."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        return group, int(row - self._starts[group])

    def describe_row(self, row: int) -> str:
        """Describe a row in words."""
        try:
            return (
                f"row {row} (episode {self.integers('episode_index')[row]}, frame "
                f"{self.integers('frame_index')[row]})"
            )
        except (DataError, IndexError):
            return f"row {row}"

    def _values(self, name: str, width: int) -> "tuple[pa.Array, np.ndarray]":
        """Return the numbers of a column one after the other, and how many each row has."""
        column = self._column(name)
        if pa.types.is_fixed_size_list(column.type):
            values, lengths = column.flatten(), np.full(len(column), column.type.list_size)
        elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            values, lengths = (
                column.flatten(),
                column.value_lengths().to_numpy(zero_copy_only=False),
            )
        else:
            values, lengths = column, np.ones(len(column), np.int64)
        kinds = (pa.types.is_floating, pa.types.is_integer, pa.types.is_boolean)
        if not any(is_kind(values.type) for is_kind in kinds) or (width > 1 and values is column):
            expected = "numbers" if width == 1 else f"lists of {width} numbers"
            raise DataError(f"{self.path}: {name!r} holds {column.type}, expected {expected}.")
        return values, lengths

    def _column(self, name: str) -> "pa.Array":
        self._require(name)
        with reading(f"{self.path}: {name!r}", "a column that can be read", CONVERT_AGAIN):
            column = self._file.read(columns=[name]).column(name).combine_chunks()
        if len(column) != self.num_rows:
            raise DataError(
                f"{self.path}: {name!r} has {len(column)} rows, expected {self.num_rows}; {CONVERT_AGAIN}."
            )
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            where = (
                f"row {row}" if name in ("episode_index", "frame_index") else self.describe_row(row)
            )
            raise DataError(f"{self.path}: {name!r} is empty in {where}.")
        return column

    def _require(self, name: str) -> None:
        known = self._file.schema_arrow.names
        # pyarrow takes the first of two columns of one name; which one the author meant is not
        # known.
        if known.count(name) != 1:
            found = "no column" if name not in known else f"{known.count(name)} columns"
            raise DataError(f"{self.path} has {found} {name!r}; it has {sorted(known)}.")


def _parse_image(value: Any) -> dict[str, Any] | None:
    """Return an image with its two fields; a column of bytes holds the encoded images alone."""
    if value is None or isinstance(value, bytes):
        return None if value is None else {"bytes": value, "path": None}
    if not isinstance(value, dict) or not {"bytes", "path"} & value.keys():
        raise ValueError(f"a row is {excerpt(value)}, not an image with 'bytes' and 'path'")
    data, path = value.get("bytes"), value.get("path")
    if not isinstance(data, bytes | None) or not isinstance(path, str | None):
        raise ValueError(f"a row is {excerpt(value)}, not an image with 'bytes' and 'path'")
    return {"bytes": data, "path": path}


def read_rows(path: Path, *, without: str | None = None) -> list[dict[str, Any]]:
    """Read all rows of a small Parquet file, as plain values.

    Args:
        path: the file.
        without: columns whose names begin so are not read.

    Raises: DataError if the file cannot be read, or if two columns have one name.
    """
    with reading(path, f"{WHOLE_TABLE} with texts in UTF-8", CONVERT_AGAIN):
        file = pq.ParquetFile(path, page_checksum_verification=True)
        names = file.schema_arrow.names
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        if twice:
            raise DataError(f"{path} has two columns {twice[0]!r}, expected one.")
        kept = [name for name in names if without is None or not name.startswith(without)]
        # a text column may hold any bytes, which fail only here
        rows: list[dict[str, Any]] = file.read(columns=kept).to_pylist()
    return rows


WORDS_COLUMNS: Final = ("task", "__index_level_0__")
"""Columns of `meta/tasks.parquet` that hold the words: named, and as pandas stores a plain index."""


class EpisodeRow(msgspec.Struct, frozen=True):
    """The row of one episode in `meta/`.

    Example:
        EpisodeRow(location="meta/episodes/chunk-000/file-000.parquet, row 2",
                   row={"episode_index": 2, "length": 118, "tasks": ["push the plate"]})
    """

    location: str
    """File and row, for errors."""

    row: Mapping[str, Any]
    """Fields, without statistics and without those that are null."""

    @property
    def length(self) -> int | None:
        """Return the number of its control steps; None if the row does not tell."""
        return get_whole_number(self.row, "length", self.location) if "length" in self.row else None

    @property
    def ours(self) -> dict[str, str | int | float | bool]:
        """Return the facts that our writer adds. Raises: DataError for one that is none."""
        found = {}
        for key, value in self.row.items():
            if not key.startswith(OURS):
                continue
            if not isinstance(value, str | int | float | bool):
                raise DataError(
                    f"{self.location}: {key!r} is {excerpt(value)}, expected a text or a number."
                )
            found[key.removeprefix(OURS)] = value
        if "name" in found:
            get_text(self.row, f"{OURS}name", self.location)
        return found


def read_tasks(root: Path, info: Info) -> dict[int, str]:
    """Return the words of each task by its index.

    Raises: DataError, naming file, row and field; also if two sources say different things.
    """
    own = TASKS_FILE_V2 if info.is_v2 else TASKS_FILE
    tasks = _read_tasks_file(root / own)
    other = root / (TASKS_FILE if info.is_v2 else TASKS_FILE_V2)
    if other.is_file():
        for index, words in _read_tasks_file(other).items():
            if index in tasks:
                _require_same_words(index, (str(root / own), tasks[index]), (str(other), words))
    return tasks


def _read_tasks_file(path: Path) -> dict[int, str]:
    rows = list(_iterate_json_lines(path) if path.suffix == ".jsonl" else _iterate_task_rows(path))
    tasks: dict[int, str] = {}
    for location, row in rows:
        index, words = (
            get_whole_number(row, "task_index", location),
            get_text(row, "task", location),
        )
        _require_same_words(index, (str(path), tasks.setdefault(index, words)), (location, words))
    if not tasks:
        raise DataError(f"{path} names no task, expected one or more; {CONVERT_AGAIN}.")
    return tasks


def _iterate_task_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield location and fields of each task, its words as `task`."""
    rows = read_rows(path)
    with reading(path, WHOLE_TABLE, CONVERT_AGAIN):
        schema = pq.read_schema(path)
        note = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
        index = note.get("index_columns", []) if isinstance(note, dict) else []
    names = [name for name in WORDS_COLUMNS if name in schema.names]
    # LeRobot takes the index of the data frame, whatever its name is
    names = names or [name for name in index if isinstance(name, str) and name in schema.names]
    if not names or "task_index" not in schema.names:
        raise DataError(
            f"{path} has the columns {sorted(schema.names)}, expected 'task_index' and the words of "
            f"each task as {' or '.join(map(repr, WORDS_COLUMNS))}; rename the column that holds them."
        )
    for number, row in enumerate(rows):
        location = f"{path}, row {number}"
        words = {name: get_text(row, name, location) for name in names}
        first = names[0]
        for name in names[1:]:
            compare_sources(
                f"the words of task {row['task_index']} in {path}",
                (repr(first), words[first]),
                (repr(name), words[name]),
                remedy="drop the column that is wrong",
                error=DataError,
            )
        yield location, {**row, "task": words[first]}


def read_episodes(root: Path, info: Info) -> dict[int, EpisodeRow]:
    """Return the description of each episode by its number.

    Raises: DataError, naming file, row and field; also for an episode that is described twice.
    """
    if info.is_v2:
        rows = list(_iterate_json_lines(root / EPISODES_FILE_V2))
    else:
        paths = find_files(root / EPISODES_FOLDER, "*/*.parquet")
        rows = [
            (f"{path}, row {number}", row)
            for path in paths
            for number, row in enumerate(read_rows(path, without="stats/"))
        ]
    episodes: dict[int, EpisodeRow] = {}
    for location, row in rows:
        number = get_whole_number(row, "episode_index", location)
        # Parquet has a null wherever a file before it had a field more.
        known = {key: value for key, value in row.items() if value is not None}
        if number in episodes and episodes[number].row != known:
            raise DataError(
                f"{location} describes episode {number} again, and differently than "
                f"{episodes[number].location}, expected one row for each; remove the wrong one."
            )
        episodes[number] = EpisodeRow(location, known)
    return episodes


def require_listed_tasks(number: int, words: set[str], about: EpisodeRow | None) -> None:
    """Compare the words of an episode's rows with the list of its tasks in `meta/`.

    A list that lacks some of them gets one log line: the rows are more exact.

    Raises: DataError if the list has none of them.
    """
    listed = about.row.get("tasks") if about is not None else None
    if about is None or not isinstance(listed, list) or not listed:
        return
    if not all(isinstance(each, str) for each in listed):
        return  # numbers of tasks, which the rows have as well
    if words <= set(listed):
        return
    if words & set(listed):
        _log.warning(
            "%s: 'tasks' is %s, and the rows of episode %d have also %s; each row keeps its own.",
            about.location,
            excerpt(listed),
            number,
            excerpt(sorted(words - set(listed))),
        )
        return
    compare_sources(
        f"the task of episode {number}",
        ("its rows and the table of tasks", sorted(words)),
        (f"{about.location}: 'tasks'", listed),
        remedy="correct the one that is wrong",
        error=DataError,
    )


def _require_same_words(index: int, first: tuple[str, str], second: tuple[str, str]) -> None:
    compare_sources(
        f"the words of task {index}",
        first,
        second,
        remedy="keep the one that the data were recorded with",
        error=DataError,
    )


def _iterate_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield location and fields of each line of JSON."""
    expected = "lines of JSON in UTF-8"
    with reading(path, expected, CONVERT_AGAIN):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            with reading(f"{path}, line {number}", expected, CONVERT_AGAIN):
                fields = msgspec.json.decode(line, type=dict[str, Any])
            yield f"{path}, line {number}", fields
