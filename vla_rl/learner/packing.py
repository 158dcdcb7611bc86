"""Conversion of plain values with arrays to bytes and back. No pickle.

It is msgpack, with arrays as extension types.

Accepted are the types that msgspec encodes (structs, dicts, lists, tuples, enums, numbers,
strings), with NumPy arrays and numbers anywhere inside. Arrays come back writable, with their dtype
and shape; arrays of objects are rejected.
"""

from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from vla_rl.util.dtypes import is_plain, plain_array

T = TypeVar("T")

ARRAY: Final = 1
"""Extension code of an array: dtype and shape as msgpack, then its bytes in C order."""


class _Header(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]


def pack(value: object) -> bytes:
    """Encode a value. Raises: TypeError naming the type that cannot be packed."""
    return _ENCODER.encode(value)


def unpack(data: bytes, type: type[T]) -> T:
    """Decode bytes as `type`. Raises: ValueError if the bytes do not hold a `type`."""
    try:
        return msgspec.msgpack.decode(
            data, type=type, ext_hook=_decode_extension, dec_hook=_accept_array
        )
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"packed bytes are not a {type}: {error}") from error


def _encode_special(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if not is_plain(value.dtype):
            raise TypeError(
                f"an array of dtype {value.dtype} cannot be packed; use numbers or "
                "fixed-width strings."
            )
        header = msgspec.msgpack.encode(_Header(value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(
            ARRAY, len(header).to_bytes(2, "little") + header + value.tobytes()
        )
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(
        f"a {type(value).__name__} cannot be packed; use plain values and NumPy arrays."
    )


def _decode_extension(code: int, data: memoryview) -> np.ndarray:
    if code != ARRAY:
        raise ValueError(f"extension code {code} is unknown, expected {ARRAY}")
    num_header = int.from_bytes(data[:2], "little")
    header = msgspec.msgpack.decode(data[2 : 2 + num_header], type=_Header)
    return plain_array(data[2 + num_header :], header.dtype, header.shape).copy()


def _accept_array(expected: type[Any], value: Any) -> Any:
    if isinstance(value, expected):
        return value
    raise ValueError(f"found a {type(value).__name__}, expected a {expected.__name__}")


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_encode_special)
