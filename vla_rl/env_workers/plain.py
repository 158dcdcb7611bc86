"""Values that can be sent between processes: plain values and arrays of them."""

from typing import Any

import numpy as np

_AS_THEY_ARE = frozenset({str, bytes, bool, int, float, type(None)})


def as_plain(value: Any, name: str) -> Any:
    """Return the value with NumPy's scalars as Python's own.

    Args:
        value: nested dicts (with keys of str or int), lists and tuples of numbers, strings, None
            and numeric arrays.
        name: name of the value in errors.

    Raises: TypeError naming the part of any other type.
    """
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is dict:
        return {
            _plain_key(key, name): as_plain(part, f"{name}[{key!r}]") for key, part in value.items()
        }
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise TypeError(
                f"{name} is an array of {value.dtype}, expected numbers; only those can be sent "
                "between processes"
            )
        return value
    if isinstance(value, np.generic):
        return as_plain(value.item(), name)
    if kind is list or kind is tuple:
        parts = [as_plain(part, f"{name}[{index}]") for index, part in enumerate(value)]
        return parts if kind is list else tuple(parts)
    if isinstance(value, dict):
        return as_plain(dict(value), name)
    raise TypeError(
        f"{name} is a {kind.__name__}, expected numbers, strings, None, arrays, or dicts, lists "
        "and tuples of them: only those can be sent between processes"
    )


def _plain_key(key: Any, name: str) -> str | int:
    if isinstance(key, str | int):
        return key
    raise TypeError(f"{name} has the key {key!r} of {type(key).__name__}, expected str or int")
