"""TFRecord files of `tf.train.Example`, read without TensorFlow and without copying their images.

A record is its length (8 bytes), a checksum of that (4), the data, and a checksum of those (4). The
data are a protocol buffer: a map from names to lists of bytes, float32 or int64 numbers. Checksums
(CRC-32C) are not checked: Python has none of that kind, and a record that is cut short is noticed by
its length.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from vla_rl.errors import DataError
from vla_rl.util.foreign_data import reading

_LENGTH: Final = struct.Struct("<Q")
_AROUND: Final = 12
"""Bytes before a record's data: its length and the checksum of that."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""

Span: TypeAlias = tuple[int, int]
"""Begin and end of some bytes in a file."""

DOWNLOAD_AGAIN: Final = "download it again"


@dataclass(frozen=True)
class Example:
    """The features of one record.

    Attributes:
        numbers: lists of float32 and of int64 numbers, by name.
        spans: where in the file the bytes of each list of texts or images are, by name.
    """

    numbers: dict[str, np.ndarray]
    spans: dict[str, list[Span]]


def read_examples(path: Path) -> Iterator[Example]:
    """Read the records of a file, in order. Raises: DataError, naming the file and the record."""
    with (
        reading(path, "a TFRecord file", DOWNLOAD_AGAIN),
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        position = number = 0
        while position < len(data):
            where = f"{path}: record {number}"
            if position + _AROUND > len(data):
                raise DataError(f"{where} is cut off; {DOWNLOAD_AGAIN}.")
            (length,) = _LENGTH.unpack_from(data, position)
            begin = position + _AROUND
            if begin + length + 4 > len(data):
                raise DataError(
                    f"{where} has {length} bytes, and the file ends after {len(data) - begin}; "
                    f"{DOWNLOAD_AGAIN}."
                )
            with reading(where, "a tf.train.Example", DOWNLOAD_AGAIN):
                yield _read_example(data, (begin, begin + length))
            position, number = begin + length + 4, number + 1


def read_span(path: Path, span: Span) -> bytes:
    """Return some bytes of a file. Raises: DataError if it has become shorter, or cannot be read."""
    with reading(path, "a file that can be read", DOWNLOAD_AGAIN), path.open("rb") as file:
        file.seek(span[0])
        found = file.read(span[1] - span[0])
    if len(found) < span[1] - span[0]:
        raise DataError(f"{path} ends before byte {span[1]}, where an image was; {DOWNLOAD_AGAIN}.")
    return found


def _read_example(data: mmap.mmap, span: Span) -> Example:
    numbers: dict[str, np.ndarray] = {}
    spans: dict[str, list[Span]] = {}
    for features in _find_messages(data, span, 1):
        for entry in _find_messages(data, features, 1):
            names = _find_messages(data, entry, 1)
            name = data[slice(*names[-1])].decode() if names else ""
            for feature in _find_messages(data, entry, 2):
                for texts in _find_messages(data, feature, 1):
                    spans[name] = _find_messages(data, texts, 1)
                for floats in _find_messages(data, feature, 2):
                    numbers[name] = _read_floats(data, floats)
                for whole in _find_messages(data, feature, 3):
                    numbers[name] = _read_whole_numbers(data, whole)
    return Example(numbers, spans)


def _walk_fields(data: mmap.mmap, span: Span) -> Iterator[tuple[int, int, Span, int]]:
    """Yield number, wire type, bytes and, of a varint, value of each field of a message."""
    position, end = span
    while position < end:
        key, position = _read_varint(data, position, end)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, after = _read_varint(data, position, end)
            yield number, kind, (position, after), value
        elif kind == _BYTES:
            size, position = _read_varint(data, position, end)
            after = position + size
            yield number, kind, (position, after), 0
        elif kind in (_FIXED32, _FIXED64):
            after = position + (4 if kind == _FIXED32 else 8)
            yield number, kind, (position, after), 0
        else:
            raise ValueError(f"byte {position} begins a field of the unknown wire type {kind}")
        if after > end:
            raise ValueError(f"a field at byte {position} ends behind its message")
        position = after


def _find_messages(data: mmap.mmap, span: Span, number: int) -> list[Span]:
    """Return the bytes of each field of a number."""
    fields = _walk_fields(data, span)
    return [part for found, kind, part, _ in fields if found == number and kind == _BYTES]


def _read_floats(data: mmap.mmap, span: Span) -> np.ndarray:
    # writers may pack all numbers into one field, or give each a field of its own
    parts = [data[slice(*part)] for number, _, part, _ in _walk_fields(data, span) if number == 1]
    return np.frombuffer(b"".join(parts), "<f4")


def _read_whole_numbers(data: mmap.mmap, span: Span) -> np.ndarray:
    found: list[int] = []
    for number, kind, part, value in _walk_fields(data, span):
        if number == 1 and kind == _VARINT:
            found.append(value)
        elif number == 1:
            position, end = part
            while position < end:
                value, position = _read_varint(data, position, end)
                found.append(value)
    # negative numbers are written as 64 bits
    return np.array(found, np.uint64).view(np.int64)


def _read_varint(data: mmap.mmap, position: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while position < end and shift < 64:
        byte = data[position]
        value |= (byte & 127) << shift
        position += 1
        if byte < 128:
            return value & (2**64 - 1), position
        shift += 7
    raise ValueError(f"a number at byte {position} does not end")
