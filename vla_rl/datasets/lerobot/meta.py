"""Tasks and episodes of a LeRobotDataset, out of `meta/`.

The words of a task stand in the table of tasks, often a second time in the lists of episodes, and
in a folder that was converted also in the files of the other version. All have to agree.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.datasets.arrow import pq
from vla_rl.datasets.lerobot.layout import (
    EPISODES_FILE_V2,
    EPISODES_FOLDER,
    OURS,
    TASKS_FILE,
    TASKS_FILE_V2,
    Info,
)
from vla_rl.datasets.lerobot.tables import AGAIN, WHOLE, read_rows
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import get_text, get_whole_number, reading
from vla_rl.util.values import compare_sources, excerpt

_log = logging.getLogger(__name__)

WORDS: Final = ("task", "__index_level_0__")
"""Columns of `meta/tasks.parquet` that hold the words: named, and as pandas stores a plain index."""


class Described(msgspec.Struct, frozen=True):
    """The row of one episode in `meta/`."""

    place: str
    """File and row, for errors."""

    row: Mapping[str, Any]
    """Fields, without statistics and without those that are null."""

    @property
    def length(self) -> int | None:
        """Return the number of its control steps; None if the row does not tell."""
        return get_whole_number(self.row, "length", self.place) if "length" in self.row else None

    @property
    def ours(self) -> dict[str, str | int | float | bool]:
        """Return the facts that our writer adds. Raises: DataError for one that is none."""
        found = {}
        for key, value in self.row.items():
            if not key.startswith(OURS):
                continue
            if not isinstance(value, str | int | float | bool):
                raise DataError(
                    f"{self.place}: {key!r} is {excerpt(value)}, expected a text or a number."
                )
            found[key.removeprefix(OURS)] = value
        if "name" in found:
            get_text(self.row, f"{OURS}name", self.place)
        return found


def read_tasks(root: Path, info: Info) -> dict[int, str]:
    """Return the words of each task by its index.

    Raises: DataError, naming file, row and field; also if two sources say different things.
    """
    own = TASKS_FILE_V2 if info.is_v2 else TASKS_FILE
    tasks = _tasks_of(root / own)
    other = root / (TASKS_FILE if info.is_v2 else TASKS_FILE_V2)
    if other.is_file():
        for index, words in _tasks_of(other).items():
            if index in tasks:
                _agreed(index, (str(root / own), tasks[index]), (str(other), words))
    return tasks


def _tasks_of(path: Path) -> dict[int, str]:
    rows = list(_lines(path) if path.suffix == ".jsonl" else _task_rows(path))
    tasks: dict[int, str] = {}
    for place, row in rows:
        index, words = get_whole_number(row, "task_index", place), get_text(row, "task", place)
        _agreed(index, (str(path), tasks.setdefault(index, words)), (place, words))
    if not tasks:
        raise DataError(f"{path} names no task, expected one or more; {AGAIN}.")
    return tasks


def _task_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and fields of each task, its words as `task`."""
    rows = read_rows(path)
    with reading(path, WHOLE, AGAIN):
        schema = pq.read_schema(path)
        note = json.loads((schema.metadata or {}).get(b"pandas", b"{}"))
        index = note.get("index_columns", []) if isinstance(note, dict) else []
    names = [name for name in WORDS if name in schema.names]
    # LeRobot takes the index of the data frame, whatever its name is
    names = names or [name for name in index if isinstance(name, str) and name in schema.names]
    if not names or "task_index" not in schema.names:
        raise DataError(
            f"{path} has the columns {sorted(schema.names)}, expected 'task_index' and the words of "
            f"each task as {' or '.join(map(repr, WORDS))}; rename the column that holds them."
        )
    for number, row in enumerate(rows):
        place = f"{path}, row {number}"
        words = {name: get_text(row, name, place) for name in names}
        first = names[0]
        for name in names[1:]:
            compare_sources(
                f"the words of task {row['task_index']} in {path}",
                (repr(first), words[first]),
                (repr(name), words[name]),
                remedy="drop the column that is wrong",
                error=DataError,
            )
        yield place, {**row, "task": words[first]}


def read_episodes(root: Path, info: Info) -> dict[int, Described]:
    """Return the description of each episode by its number.

    Raises: DataError, naming file, row and field; also for an episode that is described twice.
    """
    if info.is_v2:
        rows = list(_lines(root / EPISODES_FILE_V2))
    else:
        paths = sorted((root / EPISODES_FOLDER).glob("*/*.parquet"))
        rows = [
            (f"{path}, row {number}", row)
            for path in paths
            for number, row in enumerate(read_rows(path, without="stats/"))
        ]
    episodes: dict[int, Described] = {}
    for place, row in rows:
        number = get_whole_number(row, "episode_index", place)
        known = {key: value for key, value in row.items() if value is not None}
        if number in episodes and episodes[number].row != known:
            raise DataError(
                f"{place} describes episode {number} again, and differently than "
                f"{episodes[number].place}, expected one row for each; remove the wrong one."
            )
        episodes[number] = Described(place, known)
    return episodes


def require_agreement(number: int, words: set[str], about: Described | None) -> None:
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
            about.place,
            excerpt(listed),
            number,
            excerpt(sorted(words - set(listed))),
        )
        return
    compare_sources(
        f"the task of episode {number}",
        ("its rows and the table of tasks", sorted(words)),
        (f"{about.place}: 'tasks'", listed),
        remedy="correct the one that is wrong",
        error=DataError,
    )


def _agreed(index: int, first: tuple[str, str], second: tuple[str, str]) -> None:
    compare_sources(
        f"the words of task {index}",
        first,
        second,
        remedy="keep the one that the data were recorded with",
        error=DataError,
    )


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and fields of each line of JSON."""
    expected = "lines of JSON in UTF-8"
    with reading(path, expected, AGAIN):
        lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            with reading(f"{path}, line {number}", expected, AGAIN):
                fields = msgspec.json.decode(line, type=dict[str, Any])
            yield f"{path}, line {number}", fields
