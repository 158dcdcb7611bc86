"""Text that a model, a tool or a page wrote: it may hold anything, and reading it must not fail or
take long.

Every search here takes time in proportion to the text, whatever it holds: 8,000 openings that
nothing closes cost a pattern `<a>(.*?)</a>` five seconds, in which no other thread runs.
"""

from collections.abc import Iterator
from typing import Any

from vla_rl.errors import DataError, VlaRlError
from vla_rl.util.agreement import excerpt


def delimited_spans(text: str, opening: str, closing: str) -> Iterator[tuple[int, int]]:
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


def valid_unicode(text: str) -> str:
    """Return the text with U+FFFD for each half of a surrogate pair, which no UTF-8 can hold.

    Both halves of a pair, which JSON writes one by one, become the character that they mean.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def valid_texts(value: Any) -> Any:
    """Return plain values with every text in them made valid, names of fields included."""
    if isinstance(value, str):
        return valid_unicode(value)
    if isinstance(value, dict):
        return {valid_texts(name): valid_texts(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(valid_texts, value)) if type(value) in (list, tuple) else value
    return value


def required_text(value: object, what: str, error: type[VlaRlError] = DataError) -> str:
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
