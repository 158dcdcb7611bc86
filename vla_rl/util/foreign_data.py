"""Data that others wrote, read by libraries that may raise anything: one error that names the file.

pyarrow, h5py, NumPy, zipfile and OpenCV raise OSError, KeyError, RuntimeError, OverflowError,
NotImplementedError and others for damaged files. Each reader calls them inside of `reading`; values
that come out of a file go through `text_in`, `whole_number_in` and `number_in`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from vla_rl.errors import DataError, VlaRlError
from vla_rl.util.agreement import excerpt

MOST_CAUSE: Final = 300
"""Characters of a library's own message that an error shows."""

MOST_WHOLE: Final = 1 << 53
"""Largest whole number that a file may hold; up to here a float is exact."""


@contextmanager
def reading(
    path: Path | str | Callable[[], str],
    expected: str,
    remedy: str,
    *,
    error: type[Exception] = DataError,
) -> Iterator[None]:
    """Turn whatever a library raises about a file into one error that names it.

    Args:
        path: the file, with row or field where they are known; a function that names them is called
            for an error only.
        expected: what the file should be, such as "a whole Parquet file".
        remedy: what to do, such as "download it again".
        error: class of the error; one of this class, or of ours, passes as it is.

    Raises: `error`.
    """
    try:
        yield
    except (VlaRlError, error):
        raise
    except Exception as cause:  # no list of types is complete: each library has its own
        place = path() if callable(path) else path
        if isinstance(cause, OSError) and cause.strerror:
            raise error(
                f"{place} cannot be read ({cause.strerror}), expected {expected}; {remedy}."
            ) from cause
        raise error(f"{place} is not {expected}: {cause_of(cause)}; {remedy}.") from cause


@contextmanager
def reading_file(path: Path, fault: str, remedy: str) -> Iterator[None]:
    """Turn the error of a reader into a ValueError that names the file; one that does passes as it is.

    Args:
        fault: what is wrong, such as " is no scene file"; it follows the file's name.
        remedy: what to do, such as "export it again".

    Raises: ValueError.
    """
    try:
        yield
    except Exception as cause:  # as in `reading`; NumPy's own ValueErrors name no file
        if isinstance(cause, ValueError) and str(cause).startswith(str(path)):
            raise
        raise ValueError(f"{path}{fault}: {cause_of(cause)}; {remedy}.") from cause


def cause_of(error: Exception) -> str:
    """Return a library's message in one line, with the class where the message needs it."""
    words = " ".join(str(error).split())
    if not isinstance(error, OSError | ValueError) or not words:
        words = f"{type(error).__name__}: {words}" if words else type(error).__name__
    words = words if len(words) <= MOST_CAUSE else f"{words[:MOST_CAUSE]}..."
    return words.rstrip(".")


def text_in(
    row: Mapping[str, Any], name: str, place: str, *, error: type[Exception] = DataError
) -> str:
    """Return a text of a row.

    Raises: `error` with place, field and value if it is none, or holds half a surrogate pair.
    """
    value = _in(row, name, place, "a text", error)
    if not isinstance(value, str) or not _is_unicode(value):
        raise error(f"{place}: {name!r} is {excerpt(value)}, expected a text.")
    return value


def whole_number_in(
    row: Mapping[str, Any], name: str, place: str, *, error: type[Exception] = DataError
) -> int:
    """Return a whole number of a row, at least 0.

    One that is stored as a float is taken: data frames do so once a row of the column is empty.

    Raises: `error` with place, field and value if it is none.
    """
    value = _in(row, name, place, "a whole number", error)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= MOST_WHOLE:
        raise error(
            f"{place}: {name!r} is {excerpt(value)}, expected a whole number from 0 to 2^53."
        )
    return value


def number_in(
    row: Mapping[str, Any], name: str, place: str, *, error: type[Exception] = DataError
) -> float:
    """Return a finite number of a row. Raises: `error` with place, field and value if it is none."""
    value = _in(row, name, place, "a number", error)
    if type(value) not in (int, float) or not abs(value) <= MOST_WHOLE or not math.isfinite(value):
        raise error(f"{place}: {name!r} is {excerpt(value)}, expected a finite number.")
    return float(value)


def _in(
    row: Mapping[str, Any], name: str, place: str, expected: str, error: type[Exception]
) -> Any:
    if row.get(name) is None:
        found = "is null" if name in row else f"is missing; it has {excerpt(sorted(map(str, row)))}"
        raise error(f"{place}: {name!r} {found}, expected {expected}.")
    return row[name]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
