"""Numbers from Parquet files, checked row by row: errors name the file, row, episode and frame."""

from pathlib import Path
from typing import Any, Final

import numpy as np

from vla_rl.datasets.arrow import pa, pq
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import reading
from vla_rl.util.values import excerpt

WHOLE: Final = "a whole Parquet file"
AGAIN: Final = "download or convert the data set again"


class DataFile:
    """One Parquet file of frames: numbers are read at once, images by row group on demand.

    Args:
        path: the file.
        most_rows: rows that the data set has in all; a file that claims more is not read.
    """

    def __init__(self, path: Path, most_rows: int) -> None:
        self.path = path
        with reading(path, WHOLE, AGAIN):
            self._file = pq.ParquetFile(path, page_checksum_verification=True)
            metadata = self._file.metadata
            sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
            self.num_rows = int(metadata.num_rows)
        if min(sizes, default=0) < 0 or sum(sizes) != self.num_rows or self.num_rows > most_rows:
            raise DataError(
                f"{path} claims {self.num_rows} rows, in row groups of {excerpt(sizes)}; expected at "
                f"most the {most_rows} frames of meta/info.json; {AGAIN}."
            )
        self._starts = np.cumsum([0, *sizes])
        """First row of each row group."""

    def has(self, name: str) -> bool:
        """Return whether there is a column of this name."""
        return name in self._file.schema_arrow.names

    def integers(self, name: str) -> np.ndarray:
        """Return a column of whole numbers, int64 [rows], stored plain, as floats or in lists."""
        with reading(f"{self.path}: {name!r}", "a column of whole numbers", AGAIN):
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

    def numbers(self, name: str, width: int) -> np.ndarray:
        """Return a column, float32 [rows, width].

        Single numbers may be stored plain, as LeRobot does, or in lists.
        """
        with reading(f"{self.path}: {name!r}", "a column of numbers", AGAIN):
            values, lengths = self._values(name, width)
            wrong = np.flatnonzero(lengths != width)
            if len(wrong):
                row = int(wrong[0])
                raise DataError(
                    f"{self.path}: {name!r} has {lengths[row]} numbers in {self.place(row)}, "
                    f"expected {width}."
                )
            if values.null_count and not pa.types.is_floating(values.type):
                values = values.cast(pa.float64())  # NaN for what is missing
            with np.errstate(over="ignore"):  # what float32 cannot hold is infinite, and refused
                rows = np.asarray(values.to_numpy(zero_copy_only=False), np.float32)
                rows = rows.reshape(-1, width)
            bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
            if len(bad):
                raise DataError(
                    f"{self.path}: {name!r} is not a finite number in {self.place(int(bad[0]))}."
                )
            return rows

    def encoded_image(self, name: str, row: int) -> dict[str, Any] | None:
        """Return `{"bytes": ..., "path": ...}` of one row without reading its whole row group."""
        self._require(name)
        group, place = self.row_group_of(row)
        with reading(f"{self.path}: {name!r}", "a column of images", AGAIN):
            for batch in self._file.iter_batches(1, row_groups=[group], columns=[name]):
                if place == 0:
                    return _image_of(batch.column(0).to_pylist()[0])
                place -= 1
        raise DataError(f"{self.path}: {name!r} has no {self.place(row)}.")

    def encoded_images(self, name: str, row_group: int) -> list[dict[str, Any] | None]:
        """Return `{"bytes": ..., "path": ...}` for every row of a row group."""
        self._require(name)
        with reading(f"{self.path}: {name!r}", "a column of images", AGAIN):
            column = self._file.read_row_group(row_group, columns=[name]).column(name)
            images = [_image_of(value) for value in column.to_pylist()]
            expected = int(self._starts[row_group + 1] - self._starts[row_group])
            if len(images) != expected:
                raise ValueError(f"row group {row_group} has {len(images)} rows, not {expected}")
            return images

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
        if not _is_number(values.type) or (width > 1 and values is column):
            expected = "numbers" if width == 1 else f"lists of {width} numbers"
            raise DataError(f"{self.path}: {name!r} holds {column.type}, expected {expected}.")
        return values, lengths

    def _column(self, name: str) -> "pa.Array":
        self._require(name)
        with reading(f"{self.path}: {name!r}", "a column that can be read", AGAIN):
            column = self._file.read(columns=[name]).column(name).combine_chunks()
        if len(column) != self.num_rows:
            raise DataError(
                f"{self.path}: {name!r} has {len(column)} rows, expected {self.num_rows}; {AGAIN}."
            )
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            where = f"row {row}" if name in ("episode_index", "frame_index") else self.place(row)
            raise DataError(f"{self.path}: {name!r} is empty in {where}.")
        return column

    def _require(self, name: str) -> None:
        known = self._file.schema_arrow.names
        if known.count(name) != 1:
            found = "no column" if name not in known else f"{known.count(name)} columns"
            raise DataError(f"{self.path} has {found} {name!r}; it has {sorted(known)}.")


def _is_number(kind: "pa.DataType") -> bool:
    return bool(
        pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind)
    )


def _image_of(value: Any) -> dict[str, Any] | None:
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
    with reading(path, f"{WHOLE} with texts in UTF-8", AGAIN):
        file = pq.ParquetFile(path, page_checksum_verification=True)
        names = file.schema_arrow.names
        twice = sorted(name for name in set(names) if names.count(name) > 1)
        if twice:
            raise DataError(f"{path} has two columns {twice[0]!r}, expected one.")
        kept = [name for name in names if without is None or not name.startswith(without)]
        # a text column may hold any bytes, which fail only here
        rows: list[dict[str, Any]] = file.read(columns=kept).to_pylist()
    return rows
