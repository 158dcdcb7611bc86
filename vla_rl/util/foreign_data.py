"""Data that others wrote: files, rows, texts that may hold anything.

pyarrow, h5py, NumPy, zipfile and OpenCV raise OSError, KeyError, RuntimeError, OverflowError,
NotImplementedError and others for damaged files. Each reader calls them inside of `reading`, which
raises one error that names the file; values that come out of a file go through `get_text`,
`get_whole_number` or `get_number`.

Every search in a text takes time in proportion to its length, whatever it holds: 8,000 openings that
nothing closes cost a pattern `<a>(.*?)</a>` five seconds, in which no other thread runs.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from vla_rl.errors import DataError, VlaRlError
from vla_rl.util.values import excerpt

MOST_CAUSE: Final = 300
"""Characters of a library's own message that an error shows."""

MOST_WHOLE: Final = 1 << 53
"""Largest whole number that a file may hold; up to here a float is exact."""


def find_files(folder: Path, pattern: str) -> list[Path]:
    """Return the files and folders below a folder that match a pattern, in order, without hidden ones.

    Copies from macOS have a file `._NAME` beside each file NAME, editors keep older versions in
    `.ipynb_checkpoints`, and file managers keep deleted files in `.Trash-1000`. None of them belongs to the data.

    Args:
        folder: where to look; folders above it may be hidden.
        pattern: as `Path.glob` takes it, such as `*.parquet`, or `**/*.npz` for all folders below.
    """
    return sorted(
        path
        for path in folder.glob(pattern)
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


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
        location = path() if callable(path) else path
        # The system's own words are clearer than the library's, which often repeat the path.
        if isinstance(cause, OSError) and cause.strerror:
            raise error(
                f"{location} cannot be read ({cause.strerror}), expected {expected}; {remedy}."
            ) from cause
        raise error(f"{location} is not {expected}: {describe_cause(cause)}; {remedy}.") from cause


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
        raise ValueError(f"{path}{fault}: {describe_cause(cause)}; {remedy}.") from cause


def describe_cause(error: Exception) -> str:
    """Return a library's message in one line, with the class where the message needs it."""
    words = " ".join(str(error).split())
    if not isinstance(error, OSError | ValueError) or not words:
        words = f"{type(error).__name__}: {words}" if words else type(error).__name__
    words = words if len(words) <= MOST_CAUSE else f"{words[:MOST_CAUSE]}..."
    return words.rstrip(".")


def get_text(
    row: Mapping[str, Any], name: str, location: str, *, error: type[Exception] = DataError
) -> str:
    """Return a text of a row.

    Raises: `error` with location, field and value if it is none, or holds half a surrogate pair.
    """
    value = _get(row, name, location, "a text", error)
    if not isinstance(value, str) or not _is_unicode(value):
        raise error(f"{location}: {name!r} is {excerpt(value)}, expected a text.")
    return value


def get_whole_number(
    row: Mapping[str, Any], name: str, location: str, *, error: type[Exception] = DataError
) -> int:
    """Return a whole number of a row, at least 0.

    One that is stored as a float is taken: data frames do so once a row of the column is empty.

    Raises: `error` with location, field and value if it is none.
    """
    value = _get(row, name, location, "a whole number", error)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= MOST_WHOLE:
        raise error(
            f"{location}: {name!r} is {excerpt(value)}, expected a whole number from 0 to 2^53."
        )
    return value


def get_number(
    row: Mapping[str, Any], name: str, location: str, *, error: type[Exception] = DataError
) -> float:
    """Return a finite number of a row. Raises: `error` with location, field and value if it is none."""
    value = _get(row, name, location, "a number", error)
    if type(value) not in (int, float) or not abs(value) <= MOST_WHOLE or not math.isfinite(value):
        raise error(f"{location}: {name!r} is {excerpt(value)}, expected a finite number.")
    return float(value)


def _get(
    row: Mapping[str, Any], name: str, location: str, expected: str, error: type[Exception]
) -> Any:
    if row.get(name) is None:
        found = "is null" if name in row else f"is missing; it has {excerpt(sorted(map(str, row)))}"
        raise error(f"{location}: {name!r} {found}, expected {expected}.")
    return row[name]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def find_spans(text: str, opening: str, closing: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of what stands between an opening and the next closing, in order.

    An opening inside of a span belongs to the span. An opening that nothing closes is left out, and
    all after it.
    """
    end = 0
    while (begin := text.find(opening, end)) >= 0:
        start = begin + len(opening)
        stop = text.find(closing, start)
        if stop < 0:
            return
        yield start, stop
        end = stop + len(closing)


def repair_unicode(text: str) -> str:
    """Return the text with U+FFFD for each half of a surrogate pair, which no UTF-8 can hold.

    Both halves of a pair, which JSON writes one by one, become the character that they mean.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def repair_texts(value: Any) -> Any:
    """Return plain values with every text in them made valid, names of fields included."""
    if isinstance(value, str):
        return repair_unicode(value)
    if isinstance(value, dict):
        return {repair_texts(name): repair_texts(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(repair_texts, value)) if type(value) in (list, tuple) else value
    return value


def require_text(value: object, what: str, error: type[VlaRlError] = DataError) -> str:
    """Return a value that has to be text.

    `str()` of anything else gives Python's spelling of it, such as `None` for a null.

    Args:
        value: the value, from a file, an environment or another program.
        what: names field, row and file, for the error.
        error: class of the error.

    Raises: `error` for anything but a text.
    """
    if not isinstance(value, str):
        raise error(f"{what} is {excerpt(value)}, a {type(value).__name__}, expected a text.")
    return value
