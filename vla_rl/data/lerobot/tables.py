"""Numbers from Parquet files, checked row by row: errors name the file, row, episode and frame."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.errors import DataError


class DataFile:
    """One Parquet file of frames: numbers are read at once, images by row group on demand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{path} is not a whole Parquet file: {error}") from error
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        """First row of each row group."""

    def integers(self, name: str) -> np.ndarray:
        """Return a column of integers, int64 [rows]."""
        return np.asarray(self._column(name).to_numpy(zero_copy_only=False), np.int64)

    def numbers(self, name: str, width: int) -> np.ndarray:
        """Return a column, float32 [rows, width].

        Single numbers may be stored plain, as LeRobot does, or in lists.
        """
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
        if not _is_number(values.type) or (width > 1 and values is column):
            expected = "numbers" if width == 1 else f"lists of {width} numbers"
            raise DataError(f"{self.path}: {name!r} holds {column.type}, expected {expected}.")
        wrong = np.flatnonzero(lengths != width)
        if len(wrong):
            row = int(wrong[0])
            raise DataError(
                f"{self.path}: {name!r} has {lengths[row]} numbers in {self.place(row)}, expected "
                f"{width}."
            )
        rows = np.asarray(values.to_numpy(zero_copy_only=False), np.float32).reshape(-1, width)
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(bad):
            raise DataError(
                f"{self.path}: {name!r} is not a finite number in {self.place(int(bad[0]))}."
            )
        return rows

    def encoded_images(self, name: str, row_group: int) -> list[dict[str, Any] | None]:
        """Return `{"bytes": ..., "path": ...}` for every row of a row group."""
        self._require(name)
        column = self._file.read_row_group(row_group, columns=[name]).column(name)
        values: list[dict[str, Any] | None] = column.to_pylist()
        return values

    def row_group_of(self, row: int) -> tuple[int, int]:
        """Return the row group of a row, and the position in it."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        return group, int(row - self._starts[group])

    def place(self, row: int) -> str:
        """Describe a row in words."""
        try:
            return (
                f"row {row} (episode {self.integers('episode_index')[row]}, frame "
                f"{self.integers('frame_index')[row]})"
            )
        except DataError:
            return f"row {row}"

    def _column(self, name: str) -> pa.Array:
        self._require(name)
        try:
            column = self._file.read(columns=[name]).column(name).combine_chunks()
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{self.path}: the column {name!r} cannot be read: {error}") from error
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            where = f"row {row}" if name in ("episode_index", "frame_index") else self.place(row)
            raise DataError(f"{self.path}: {name!r} is empty in {where}.")
        return column

    def _require(self, name: str) -> None:
        known = self._file.schema_arrow.names
        if name not in known:
            raise DataError(f"{self.path} has no column {name!r}; it has {sorted(known)}.")


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    )


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read all rows of small Parquet files, as plain values.

    Raises: DataError if a file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        try:
            rows += pq.read_table(path).to_pylist()
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            # a text column may hold any bytes
            raise DataError(
                f"{path} is not a whole Parquet file with texts in UTF-8: {error}"
            ) from error
    return rows
