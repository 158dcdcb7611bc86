"""Values as people read them in errors, tables, files.

NumPy's numbers become Python's own where they come in: a run writes its settings as JSON, which other
processes read. Values from two sources are compared, because none may win in silence. Long values are
cut to what an error can show. NumPy itself is not imported: a process of a sandbox has configurations,
with no use for it.
"""

import re
import sys
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from vla_rl.errors import CheckpointError, VlaRlError

if TYPE_CHECKING:
    from rich.console import Console

T = TypeVar("T")

MOST_SHOWN: Final = 80
"""Characters of a value that an error shows."""

CONTEXT: Final = 20
"""Characters shown before the first difference of two long values."""


FOLDER_NAME: Final = (
    "letters, digits, '.', '_' and '-', first a letter or digit, at most 239, as it names a folder"
)
"""This is what `names_folder` expects, in words."""


def names_folder(name: str) -> bool:
    """Return whether a name can begin that of a new folder, before its date, on any file system."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,238}", name) is not None


def compare_sources(
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
        raise make_disagreement(what, first, second, remedy=remedy, error=error)
    return first[1]


def make_disagreement(
    what: str,
    first: tuple[str, object],
    second: tuple[str, object],
    *,
    remedy: str,
    error: type[VlaRlError] = CheckpointError,
) -> VlaRlError:
    """Return the error for two sources that differ, for values that `!=` does not compare.

    Args: those of `compare_sources`.
    """
    (first_name, one), (second_name, other) = first, second
    shown_one, shown_other = show_difference(one, other)
    return error(
        f"two sources of {what} say different things: {first_name} says {shown_one}, "
        f"{second_name} says {shown_other}, expected the same; {remedy}."
    )


def show_difference(one: object, other: object) -> tuple[str, str]:
    """Return both values as Python writes them; of long ones, the part from where they differ."""
    first, second = repr(one), repr(other)
    if max(len(first), len(second)) <= MOST_SHOWN:
        return first, second
    pairs = enumerate(zip(first, second, strict=False))
    differ_at = next(
        (index for index, (left, right) in pairs if left != right), min(len(first), len(second))
    )
    start = max(0, differ_at - CONTEXT)
    return _cut(first, start), _cut(second, start)


def excerpt(value: object) -> str:
    """Return a value as Python writes it, cut to a length that an error can show."""
    try:
        # `repr` of lists that are nested thousands deep, as JSON from a policy may be, fails by
        # recursion.
        return _cut(repr(value), 0)
    except RecursionError:
        return f"a {type(value).__name__} nested too deeply to show"


def shorten_middle(value: object, most: int = 2 * MOST_SHOWN) -> str:
    """Return a value's text, cut in its middle to a length that an error can show."""
    text = str(value)
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


def _cut(text: str, start: int) -> str:
    before, after = "..." * (start > 0), "..." * (start + MOST_SHOWN < len(text))
    return f"{before}{text[start : start + MOST_SHOWN]}{after}"


_AS_THEY_ARE: Final = frozenset({str, bytes, bool, int, float, type(None)})


def make_plain(value: Any) -> Any:
    """Return a value with NumPy's scalars, at any depth of dicts, lists and tuples, as Python's own.

    The same object is returned if there are none. Arrays and all else stay as they are.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is dict:
        # The same object if nothing changed: configurations are compared, and most have no number
        # of NumPy's.
        parts = {make_plain(key): make_plain(part) for key, part in value.items()}
        same = all(
            key is new_key and value[key] is parts[new_key]
            for key, new_key in zip(value, parts, strict=False)
        )
        return value if same else parts
    if kind is list or kind is tuple:
        items = [make_plain(part) for part in value]
        same = all(old is new for old, new in zip(value, items, strict=True))
        return value if same else kind(items)
    return value.item() if is_numpy_scalar(value) else value


def make_fields_plain(fields: msgspec.Struct) -> None:
    """Make the fields of a struct plain; call it in `__post_init__`."""
    for name in fields.__struct_fields__:
        value = getattr(fields, name)
        if type(value) not in _AS_THEY_ARE and (new := make_plain(value)) is not value:
            msgspec.structs.force_setattr(fields, name, new)


def is_numpy_scalar(value: object) -> bool:
    """Return whether a value is one of NumPy's numbers, booleans or strings."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def find_part_without_json(value: Any, name: str) -> tuple[str, Any] | None:
    """Return the name and value of a part that JSON cannot hold, such as `kwargs['size']`; None if
    it can hold everything.
    """
    try:
        msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        pass
    else:
        return None
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple):
        parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    elif isinstance(value, msgspec.Struct):
        parts = [(f"{name}.{field}", getattr(value, field)) for field in value.__struct_fields__]
    for inner, part in parts:
        if (found := find_part_without_json(part, inner)) is not None:
            return found
    return name, value


def plain_console(**options: Any) -> "Console":
    """Return a console that takes strings literally, in tables too.

    rich reads brackets in a string as markup, `:words:` as emoji: a task named "open [the] box" loses a
    word, one that holds "[/x]" ends the run with a MarkupError at its summary.

    Args:
        options: those of `rich.console.Console`.
    """
    from rich.console import Console  # here: processes of a sandbox read values, and print nothing

    return Console(markup=False, emoji=False, **options)
