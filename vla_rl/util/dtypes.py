"""Data types named by texts from outside: from another process, a host, a file.

NumPy and torch are not made for texts that somebody else wrote: `np.dtype("M8[s/0]")` divides by
zero and ends the process, and `getattr(torch, name)` returns whatever has that name. A text goes
through here first; only the types that our own senders write are accepted.
"""

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from vla_rl.util.agreement import excerpt

if TYPE_CHECKING:
    import torch

SIZES: Final = {
    "b": (1,),
    "i": (1, 2, 4, 8),
    "u": (1, 2, 4, 8),
    "f": (2, 4, 8, 16),
    "c": (8, 16, 32),
    "m": (8,),
    "M": (8,),
}
"""Bytes of a number, by NumPy's letter of its kind."""

TEXT_KINDS: Final = {"S": 1, "U": 4, "V": 1}
"""Bytes of a character, by NumPy's letter of a kind whose items have any length."""

MOST_ITEM_BYTES: Final = 1 << 30
MOST_AXES: Final = 32
_CODE: Final = re.compile(
    r"[<>|=]?(?P<kind>[biufcmMSUV])(?P<size>[1-9][0-9]{0,9})"
    r"(?P<unit>\[([1-9][0-9]{0,9})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?",
    re.ASCII,
)
_WORDS: Final = {"i": "int", "u": "uint", "f": "float", "c": "complex"}
_NAMES: Final = {"bool": "b1"} | {
    f"{word}{8 * size}": f"{kind}{size}" for kind, word in _WORDS.items() for size in SIZES[kind]
}
TORCH_DTYPES: Final = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "complex128",
    "complex64",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint64",
    "uint32",
    "uint16",
    "uint8",
    "bool",
)
"""Types of tensors that one process may name to another."""


@lru_cache(maxsize=1024)
def plain_dtype(text: str) -> np.dtype[Any]:
    """Return the NumPy type of a text such as `<f4` or `float32`.

    Raises: ValueError for anything but numbers, booleans, fixed-width text and bytes, times and time
        spans.
    """
    found = _CODE.fullmatch(_NAMES.get(text, text)) if len(text) <= 32 else None
    if found is None or not _is_allowed(found["kind"], int(found["size"]), found["unit"]):
        raise ValueError(
            f"dtype is {excerpt(text)}, expected one number, boolean, fixed-width text, time or "
            "time span, as NumPy's dtype.str writes it, such as '<f4', '|u1' or '<U8'."
        )
    try:
        return np.dtype(found[0])
    except (TypeError, ValueError) as error:  # a float128 on a machine without it; a huge multiple
        raise ValueError(f"dtype is {excerpt(text)}, which NumPy cannot make: {error}.") from None


def is_plain(dtype: np.dtype[Any]) -> bool:
    """Return whether the text of a type says all about it, and `plain_dtype` accepts it."""
    if dtype.names is not None or dtype.hasobject:
        return False
    try:
        return plain_dtype(dtype.str) == dtype
    except ValueError:
        return False


def plain_array(content: Any, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Return bytes as an array, without a copy.

    Raises: ValueError if the type is not plain, or if the bytes are not exactly those of `shape`.
    """
    kind, num_bytes = plain_dtype(dtype), memoryview(content).nbytes
    sizes = tuple(shape)
    are_sizes = len(sizes) <= MOST_AXES and all(type(size) is int and size >= 0 for size in sizes)
    if (
        not are_sizes
        or max(sizes, default=0) > MOST_ITEM_BYTES
        or math.prod(sizes) * kind.itemsize != num_bytes
    ):
        raise ValueError(
            f"{num_bytes} bytes are an array of shape {excerpt(sizes)} and dtype {kind}, expected as "
            "many bytes as the shape needs."
        )
    return np.ndarray(sizes, kind, content)


def torch_dtype(name: str) -> "torch.dtype":
    """Return torch's type of a name such as `bfloat16`. Raises: ValueError for any other name."""
    if name not in TORCH_DTYPES:
        raise ValueError(
            f"the type of a tensor is {excerpt(name)}, expected one of {', '.join(TORCH_DTYPES)}."
        )
    import torch  # here: processes that hold environments read NumPy's types only

    kind: torch.dtype = getattr(torch, name)
    return kind


def _is_allowed(kind: str, size: int, unit: str | None) -> bool:
    if kind in TEXT_KINDS:
        return unit is None and size * TEXT_KINDS[kind] <= MOST_ITEM_BYTES
    return size in SIZES[kind] and (unit is None or kind in "mM")
