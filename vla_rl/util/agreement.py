"""Two sources of one fact: they have to agree, because none may win in silence.

A folder often states a fact twice: weights in shards and in one file, a chat template in two files,
statistics beside the configuration and in it. Readers compare the two here. Sources that agree are
no error.
"""

from typing import Final, TypeVar

from vla_rl.errors import CheckpointError, VlaRlError

T = TypeVar("T")

MOST_SHOWN: Final = 80
"""Characters of a value that an error shows."""

CONTEXT: Final = 20
"""Characters shown before the first difference of two long values."""


def agreed_value(
    what: str,
    first: tuple[str, T],
    second: tuple[str, T],
    *,
    remedy: str,
    error: type[VlaRlError] = CheckpointError,
) -> T:
    """Return the value that two sources give.

    Args:
        what: the fact, such as "the chat template of /models/mine".
        first: name of a source, usually a file, and its value.
        second: name and value of the other source.
        remedy: what to do, such as "remove the one that the policy was not trained with".
        error: class of the error.

    Raises: `error` naming both sources and values if they differ.
    """
    if first[1] != second[1]:
        raise disagreement(what, first, second, remedy=remedy, error=error)
    return first[1]


def disagreement(
    what: str,
    first: tuple[str, object],
    second: tuple[str, object],
    *,
    remedy: str,
    error: type[VlaRlError] = CheckpointError,
) -> VlaRlError:
    """Return the error for two sources that differ, for values that `!=` does not compare.

    Args: those of `agreed_value`.
    """
    (first_name, one), (second_name, other) = first, second
    shown_one, shown_other = excerpts(one, other)
    return error(
        f"two sources of {what} say different things: {first_name} says {shown_one}, "
        f"{second_name} says {shown_other}, expected the same; {remedy}."
    )


def excerpts(one: object, other: object) -> tuple[str, str]:
    """Return both values as Python writes them; of long ones, the part from where they differ."""
    first, second = repr(one), repr(other)
    if max(len(first), len(second)) <= MOST_SHOWN:
        return first, second
    pairs = enumerate(zip(first, second, strict=False))
    differ_at = next(
        (place for place, (left, right) in pairs if left != right), min(len(first), len(second))
    )
    start = max(0, differ_at - CONTEXT)
    return _cut(first, start), _cut(second, start)


def excerpt(value: object) -> str:
    """Return a value as Python writes it, cut to a length that an error can show."""
    try:
        return _cut(repr(value), 0)
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply to show"


def shortened(value: object, most: int = 2 * MOST_SHOWN) -> str:
    """Return a value's text, cut in its middle to a length that an error can show."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


def _cut(text: str, start: int) -> str:
    before, after = "..." * (start > 0), "..." * (start + MOST_SHOWN < len(text))
    return f"{before}{text[start : start + MOST_SHOWN]}{after}"
