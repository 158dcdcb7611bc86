"""Arrays of an .npz file that somebody else wrote, without pickle.

`numpy.load` believes the header of each array: one that claims 25 TiB is allocated, and one whose
type is `M8[s/0]` ends the process. Here each header is read first, and compared with the bytes that
the zip holds.
"""

import ast
import math
import zipfile
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from vla_rl.util.agreement import excerpt
from vla_rl.util.dtypes import plain_dtype

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
        return plain_dtype(kind).itemsize
    except ValueError as error:
        raise ValueError(f"{excerpt(name)}: {error}") from error
