"""Numbers out of Parquet files, checked row by row: what is wrong is named with its file, row, episode and frame."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vla_rl.errors import DataError


class DataFile:
    """One Parquet file of frames: numbers at once, images by row group when they are wanted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{path} is not a whole Parquet file: {error}") from error
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        """Row that each row group begins with."""

    @property
    def num_rows(self) -> int:
        """Frames in this file."""
        return int(self._starts[-1])

    def integers(self, name: str) -> np.ndarray:
        """int64 [rows]."""
        return np.asarray(self._column(name).to_numpy(zero_copy_only=False), np.int64)

    def numbers(self, name: str, width: int | None) -> np.ndarray:
        """float32 [rows, width], or [rows] where `width` is None."""
        column = self._column(name)
        if width is None:
            return np.asarray(column.to_numpy(zero_copy_only=False), np.float32).reshape(-1)
        if pa.types.is_fixed_size_list(column.type):
            lengths = np.full(len(column), column.type.list_size)
        elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        else:
            raise DataError(f"{self.path}: {name!r} holds {column.type}, expected lists of {width} numbers.")
        wrong = np.flatnonzero(lengths != width)
        if len(wrong):
            row = int(wrong[0])
            raise DataError(f"{self.path}: {name!r} has {lengths[row]} numbers in {self.place(row)}, expected {width}.")
        values = np.asarray(column.flatten().to_numpy(zero_copy_only=False), np.float32).reshape(-1, width)
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        if len(bad):
            raise DataError(f"{self.path}: {name!r} is not a finite number in {self.place(int(bad[0]))}.")
        return values

    def encoded_images(self, name: str, row_group: int) -> list[dict[str, Any] | None]:
        """`{"bytes": ..., "path": ...}` of every row of a row group."""
        self._require(name)
        column = self._file.read_row_group(row_group, columns=[name]).column(name)
        values: list[dict[str, Any] | None] = column.to_pylist()
        return values

    def row_group_of(self, row: int) -> tuple[int, int]:
        """The row group that a row lies in, and its place there."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        return group, int(row - self._starts[group])

    def place(self, row: int) -> str:
        """A row for a person."""
        try:
            return (
                f"row {row} (episode {self.integers('episode_index')[row]}, frame {self.integers('frame_index')[row]})"
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


def read_rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """All rows of small Parquet files, as plain values. Raises: DataError."""
    rows: list[dict[str, Any]] = []
    for path in paths:
        try:
            rows += pq.read_table(path).to_pylist()
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"{path} is not a whole Parquet file: {error}") from error
    return rows
