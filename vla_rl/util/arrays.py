"""Arrays from outside: described by a text, read from a file, checked to be finite.

NumPy and torch are not made for texts that somebody else wrote: `np.dtype("M8[s/0]")` divides by
zero and ends the process; `getattr(torch, name)` returns whatever has that name. A text goes
through here first, where only the types that our own senders write are accepted.

`numpy.load` also believes the header of each array: one that claims 25 TiB is allocated. `read_npz`
reads each header first, to compare it with the bytes that the zip holds.

A policy with a NaN among its weights still answers: NaN logits choose the same token again and
again. Whatever reads weights calls `require_finite` before they are used.
"""

import ast
import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import numpy as np

from vla_rl.errors import CheckpointError
from vla_rl.util.values import excerpt

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
def parse_dtype(text: str) -> np.dtype[Any]:
    """Return the NumPy type of a text such as `<f4` or `float32`.

    Raises: ValueError for anything but numbers, booleans, fixed-width text and bytes, times and time
        spans.
    """
    # The length before the pattern: a header may hold a text of megabytes.
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


def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Return whether the text of a type says all about it, and `parse_dtype` accepts it."""
    if dtype.names is not None or dtype.hasobject:
        return False
    try:
        return parse_dtype(dtype.str) == dtype
    except ValueError:
        return False


def view_as_array(content: Any, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Return bytes as an array, without a copy.

    Raises: ValueError if the type is not plain, or if the bytes are not exactly those of `shape`.
    """
    kind, num_bytes = parse_dtype(dtype), memoryview(content).nbytes
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


MOST_HEADER: Final = 1 << 16
"""Bytes of an array's header; NumPy's own are about 120."""

MOST_DEFLATED: Final = 1100
"""Bytes that a byte of a deflated zip can hold at most, rounded up."""

_FIRST_HEADERS: Final = {1: 2, 2: 4, 3: 4}
"""Bytes of a header's length, by version of the format."""


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a file.

    Call it inside of `reading`: a damaged file raises whatever zipfile, zlib or NumPy do.

    Raises: ValueError, naming the array, for Python objects, records, an array that claims other
        bytes than the file holds, and two arrays of one name.
    """
    arrays: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(path) as archive:
        num_bytes = path.stat().st_size
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name in arrays:
                raise ValueError(f"two arrays have the name {excerpt(name)}, expected one")
            if member.flag_bits & 1:
                raise ValueError(f"{excerpt(name)} is encrypted, expected a plain array")
            if (
                member.compress_size > num_bytes
                or member.file_size > MOST_DEFLATED * member.compress_size
            ):
                raise ValueError(
                    f"{excerpt(name)} claims {member.file_size} bytes, and the file has {num_bytes}"
                )
            with archive.open(member) as header:
                _require_plain(header, member.file_size, name)
            with archive.open(member) as content:
                # the zip's own checksum is compared when the last byte is read
                arrays[name] = np.lib.format.read_array(content, allow_pickle=False)  # type: ignore[no-untyped-call]
    return arrays


def _require_plain(file: IO[bytes], num_bytes: int, name: str) -> None:
    """Raise ValueError unless an array's header fits the bytes of its file."""
    start = file.read(8)
    width = _FIRST_HEADERS.get(start[6]) if start[:6] == b"\x93NUMPY" and len(start) == 8 else None
    if width is None:
        raise ValueError(f"{excerpt(name)} is no array of NumPy's format")
    length = int.from_bytes(file.read(width), "little")
    if length > MOST_HEADER:
        raise ValueError(f"{excerpt(name)} has a header of {length} bytes, expected {MOST_HEADER}")
    header: Any = ast.literal_eval(file.read(length).decode("utf-8" if start[6] == 3 else "latin1"))
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise ValueError(f"{excerpt(name)} has the header {excerpt(header)}, which is not NumPy's")
    kind, shape = header["descr"], header["shape"]
    if not isinstance(kind, str):
        raise ValueError(f"{excerpt(name)} holds records, expected plain numbers or texts")
    if kind.lstrip("<>|=") == "O":
        raise ValueError(f"{excerpt(name)} holds Python objects, expected plain numbers or texts")
    item = _item_bytes(kind, name)
    if (
        not isinstance(shape, tuple)
        or not all(type(size) is int and size >= 0 for size in shape)
        or 8 + width + length + math.prod(shape) * item != num_bytes
    ):
        raise ValueError(
            f"{excerpt(name)} is {excerpt(kind)} of shape {excerpt(shape)}, and its bytes are "
            f"{num_bytes}, header included"
        )


def _item_bytes(kind: str, name: str) -> int:
    if kind.lstrip("<>|=") in ("U0", "S0"):  # an array of empty texts
        return 0
    try:
        return parse_dtype(kind).itemsize
    except ValueError as error:
        raise ValueError(f"{excerpt(name)}: {error}") from error


def is_finite(tensor: "Tensor") -> bool:
    """Return whether all numbers are finite, without a copy of the tensor's size: minimum and
    maximum are NaN if any number is.
    """
    import torch  # here: processes that hold environments read arrays only

    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    # aminmax takes no complex numbers; seen as pairs, they need no copy.
    if tensor.is_complex():
        return is_finite(torch.view_as_real(tensor))
    if tensor.element_size() == 1:  # torch has no minimum of 8-bit floats
        tensor = tensor.float()
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor.detach()))


def find_not_finite(tensors: Mapping[str, "Tensor"]) -> str | None:
    """Return the name of the first tensor with a number that is not finite; None if there is
    none.
    """
    return next((name for name, tensor in tensors.items() if not is_finite(tensor)), None)


def require_finite(tensors: Mapping[str, "Tensor"], source: object) -> None:
    """Raise CheckpointError naming the first tensor that has a number that is not finite.

    Args:
        tensors: tensors by name.
        source: folder or file that they were read from.
    """
    name = find_not_finite(tensors)
    if name is not None:
        raise CheckpointError(
            f"{name} in {source} has numbers that are not finite; the file is damaged, or what "
            "wrote it had diverged."
        )
