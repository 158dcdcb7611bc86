"""Rows of a prompt data set, from parquet or jsonl.

A row is one question, with the fields that its scorer needs.

    questions.jsonl   {"prompt": "What is 6 x 7?", "answer": "42"}
    questions.parquet the same as columns

Every row is checked when the file is opened, so that a missing answer does not stop a run hours
later.
"""

import codecs
import difflib
import logging
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.datasets.arrow import pa, pq
from vla_rl.errors import DataError

logger = logging.getLogger(__name__)

_OPENED: Final[dict[tuple[str, int, int, tuple[str, ...]], "PromptRows"]] = {}
_OPENING: Final = threading.Lock()


class PromptRows(Sequence[dict[str, Any]]):
    """The rows of one file, in its order; parquet's stay columns until a row is read.

    Args:
        table: the rows.
        path: the file, for errors.
        fields: fields that each row has to have. Another column with a value that Python has no
            type for, such as a time to the nanosecond, is left out, with a warning.
    """

    def __init__(
        self,
        table: "pa.Table | list[dict[str, Any]]",
        path: Path | None = None,
        fields: Sequence[str] = (),
    ) -> None:
        self._table, self._path, self._fields = table, path, tuple(fields)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Any:
        """Return row `index` as a dict; a slice returns a list of them."""
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(
                f"row {index} of a data set that has {len(self)} rows, numbered from 0"
            )
        if isinstance(self._table, list):
            return self._table[index]
        return self._row(index % len(self))

    def _row(self, index: int) -> dict[str, Any]:
        assert isinstance(self._table, pa.Table)
        while True:
            columns = self._table.slice(index, 1)
            try:
                row: dict[str, Any] = columns.to_pylist()[0]
            except (ValueError, OverflowError, pa.ArrowException) as error:
                name = next(
                    name for name in columns.column_names if not _is_readable(columns, name)
                )
                if name in self._fields:
                    raise DataError(f"{self._path}: row {index}, {name!r}: {error}") from error
                logger.warning("%s: the column %r is left out: %s", self._path, name, error)
                self._table = self._table.drop_columns([name])
            else:
                return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(len(self)))


def _is_readable(columns: "pa.Table", name: str) -> bool:
    try:
        columns.column(name).to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        return False
    return True


def read_prompts(path: str | Path, fields: Sequence[str] = ("prompt",)) -> PromptRows:
    """Read the rows of a `.parquet` or `.jsonl` file.

    The same file is read only once, from any thread.

    Args:
        path: the file.
        fields: fields that each row must have, with a value other than null.

    Raises: DataError, naming the file, the row (counted from 0) and the field.
    """
    path = Path(path)
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = "" if isinstance(error, FileNotFoundError) else f" ({error})"
        raise DataError(
            f"{path} is no file{reason}; expected the .parquet or .jsonl file of a data set."
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"{path} is no file; expected the .parquet or .jsonl file of a data set.")
    key = (str(path.resolve()), status.st_mtime_ns, status.st_size, tuple(fields))
    with _OPENING:
        if key not in _OPENED:
            _OPENED[key] = _read(path, fields)
        return _OPENED[key]


def _read(path: Path, fields: Sequence[str]) -> PromptRows:
    try:
        return _rows_of(path, fields)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _rows_of(path: Path, fields: Sequence[str]) -> PromptRows:
    if path.suffix == ".parquet":
        rows = PromptRows(_parquet(path, fields), path, fields)
    elif path.suffix == ".jsonl":
        rows = PromptRows(_jsonl(path, fields))
    else:
        raise DataError(f"{path} is neither .parquet nor .jsonl; expected one of them.")
    if len(rows) == 0:
        raise DataError(f"{path} has no rows, expected at least one.")
    return rows


def _parquet(path: Path, fields: Sequence[str]) -> "pa.Table":
    try:
        table = pq.read_table(path)
        # a text column may hold any bytes, which else fail only when a row is read
        table.validate(full=True)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is not a parquet file with texts in UTF-8: {error}; write it again."
        ) from error
    for field in fields:
        if field not in table.column_names:
            raise DataError(
                f"{path}: row 0, like all others, has no field {field!r}; "
                f"{_nearest(field, table.column_names)}"
            )
        column = table.column(field)
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise DataError(
                f"{path}: row {row} has no {field!r} (it is null), expected a value in every row."
            )
    return table


def _jsonl(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    _require_utf8(path)
    decoder = msgspec.json.Decoder(dict[str, Any])
    rows: list[dict[str, Any]] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                row = decoder.decode(line)
            except (ValueError, RecursionError) as error:  # not a JSON object, or not UTF-8
                raise DataError(
                    f"{path}: row {len(rows)} (line {number}) is not a JSON object: {error}"
                ) from error
            for field in fields:
                if row.get(field) is None:
                    raise DataError(
                        f"{path}: row {len(rows)} (line {number}) has no {field!r}; "
                        f"{_nearest(field, list(row))}"
                    )
            rows.append(row)
    return rows


def _require_utf8(path: Path) -> None:
    """Raise DataError for a file in UTF-16 or UTF-32, as some programs of Windows write it."""
    with path.open("rb") as file:
        begin = file.read(4)
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)):
        raise DataError(f"{path} is in UTF-16 or UTF-32, expected UTF-8; save it as UTF-8.")


def _nearest(field: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(field, [name for name in names if name != field], n=1)
    return (
        f"did you mean {near[0]!r}? " if near else ""
    ) + f"it has: {', '.join(map(repr, names)) or 'nothing'}."
