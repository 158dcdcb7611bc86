"""Messages of openpi's websocket protocol: msgpack in which arrays are maps.

    server ─► client   metadata: a map, once, as soon as the connection stands
    client ─► server   an observation: a map of arrays, numbers and text, nested or not
    server ─► client   {"actions": float [H, D], "server_timing": {...}}, or a text frame with an error

An array is the map {b"__ndarray__": True, b"data": bytes, b"dtype": "<f4", b"shape": [2, 3]}, a number
of numpy's {b"__npgeneric__": True, b"data": number, b"dtype": "<f4"}, with keys of bytes. Checked
against openpi-client 0.1.2, whose `msgpack_numpy` writes and reads them.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.util.arrays import MOST_AXES, parse_dtype, view_as_array
from vla_rl.util.values import excerpt

MAX_DEPTH: Final = 8
"""Maps within maps; no published observation has more than two."""

_ARRAY: Final = b"__ndarray__"
_NUMBER: Final = b"__npgeneric__"


class BadMessage(ValueError):
    """A frame that is no message of the protocol."""


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Encode a map of plain values and numpy arrays."""
    return msgspec.msgpack.encode(message, enc_hook=_encode_numpy)


def decode_message(frame: bytes) -> dict[str, Any]:
    """Decode a map; arrays are views of the frame, read-only.

    Raises: BadMessage.
    """
    try:
        decoded = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"the frame is no msgpack: {error}; expected a map of arrays") from error
    message = _restore_numpy(decoded, "the message", MAX_DEPTH)
    if not isinstance(message, dict):
        raise BadMessage(f"the message is {_describe(message)}, expected a map of arrays by name")
    return message


def flatten_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of nested maps under one name each: {"images": {"top": a}} is {"images/top": a}."""
    flat: dict[str, Any] = {}
    for name, value in message.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{key}": each for key, each in flatten_names(value).items()}
        else:
            flat[name] = value
    return flat


def _encode_numpy(value: Any) -> Any:
    # a numpy number is no array for msgspec, and openpi's client knows how to read both
    if isinstance(value, np.generic):
        return {_NUMBER: True, b"data": value.item(), b"dtype": value.dtype.str}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        data = np.ascontiguousarray(value).data
        return {_ARRAY: True, b"data": data, b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"{type(value).__name__} cannot be sent, expected arrays of numbers")


def _restore_numpy(value: Any, where: str, depth: int) -> Any:
    if isinstance(value, list):
        return [_restore_numpy(each, where, depth - 1) for each in _within(value, where, depth)]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return _restore_array(value, where)
    if _NUMBER in value:
        return _restore_number(value.get(b"data"), value.get(b"dtype"), where)
    restored: dict[str, Any] = {}
    for key, each in _within(value, where, depth).items():
        if not isinstance(key, str):
            raise BadMessage(f"{where} has the key {excerpt(key)}, expected text")
        restored[key] = _restore_numpy(each, f"entry {excerpt(key)}", depth - 1)
    return restored


def _within(value: Any, where: str, depth: int) -> Any:
    # msgspec stops at the interpreter's own limit, which a walk in Python reaches earlier
    if depth <= 0:
        raise BadMessage(f"{where} is nested more than {MAX_DEPTH} deep")
    return value


def _restore_array(value: dict[Any, Any], where: str) -> np.ndarray:
    return restore_array(value.get(b"data"), value.get(b"dtype"), value.get(b"shape"), where)


def restore_array(data: Any, dtype_name: Any, shape: Any, where: str) -> np.ndarray:
    """Return the array of these parts of a message, read-only. Raises: BadMessage."""
    dtype = _numeric_dtype(dtype_name, where)
    if not isinstance(data, bytes) or not isinstance(shape, list):
        raise BadMessage(f"{where} is an array without data or shape")
    if len(shape) > MOST_AXES or not all(type(size) is int and size >= 0 for size in shape):
        raise BadMessage(
            f"{where} has the shape {excerpt(shape)}, expected at most {MOST_AXES} sizes of at least 0"
        )
    # Python's integers do not overflow, so a shape of [2**40, 2**40] is compared, not allocated
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise BadMessage(
            f"{where} has {len(data)} bytes, expected {expected} for {dtype.name} {shape}"
        )
    try:
        return view_as_array(data, dtype.str, shape)
    except ValueError as error:  # no bytes, and another size that NumPy cannot hold
        raise BadMessage(f"{where} cannot be read: {error}") from error


def _numeric_dtype(name: Any, where: str) -> np.dtype[Any]:
    try:
        # never `np.dtype` itself: a text such as "M8[s/0]" divides by zero there, and ends the server
        dtype = parse_dtype(name) if isinstance(name, str) else None
    except ValueError:
        dtype = None
    # text, times and complex numbers are no input of a policy
    if dtype is None or dtype.kind not in "biuf":
        raise BadMessage(
            f"{where} has the dtype {excerpt(name)}, expected one of numbers, such as '<f4'"
        )
    return dtype


def _restore_number(data: Any, dtype_name: Any, where: str) -> Any:
    dtype = _numeric_dtype(dtype_name, where)
    if not isinstance(data, bool | int | float):
        raise BadMessage(f"{where} holds {_describe(data)}, expected a number")
    try:
        return dtype.type(data)
    except (OverflowError, ValueError) as error:
        raise BadMessage(f"{where} is {data!r}, expected a number of {dtype.name}") from error


def _describe(value: Any) -> str:
    return f"a value of type {type(value).__name__}"
