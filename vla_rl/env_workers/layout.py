"""Observations of one space as one block of bytes and a list of other values.

Both ends derive the layout from the space.

The arrays are consecutive fields of one record in the block; values that are not arrays (texts,
whole numbers) are in a short list beside it.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

_ALIGNMENT = 64
_IN_PLACE_FROM = 4096
"""Arrays of fewer bytes are copied out of a block, so that keeping one does not keep the whole
block."""

Others: TypeAlias = list[Any]
"""Values that are not arrays, in the order of the space."""

Packed: TypeAlias = tuple[np.ndarray | None, Others]
"""An observation for sending: uint8 [num_bytes], or None if the arrays are elsewhere; and the other
values."""

ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces whose values are arrays of a known shape."""

_Take: TypeAlias = Callable[[Any, list[np.ndarray], Others], None]
_Build: TypeAlias = Callable[[Iterator[np.ndarray], Iterator[Any]], Any]


class ObservationLayout:
    """Splits observations of one space into arrays and other values, and assembles them.

    Args:
        space: space of the observation.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self._array_spaces: list[spaces.Space[Any]] = []
        self.others: list[spaces.Space[Any]] = []
        self._take, self._build = self._compile(space)
        self._fields = [f"array{index}" for index in range(len(self._array_spaces))]
        self._record = _record_of(self._array_spaces, self._fields, num_rows=None)
        self._records: dict[int, np.dtype[Any]] = {}
        self.num_bytes = self._record.itemsize
        self._parts = [_part_of(self._record, name) for name in self._fields]
        self._keys = (
            [*space.spaces]
            if isinstance(space, spaces.Dict) and _holds_only_arrays(space)
            else None
        )
        """Keys of an observation that is a dict of arrays only: the most frequent case, with a
        faster path. Else None."""

    def places(self, block: Any, num_rows: int | None = None) -> list[np.ndarray]:
        """Return the arrays in a block of `num_bytes`.

        With `num_rows`, they are [num_rows, ...] in a block of `batch_bytes`.
        """
        record: np.ndarray = np.ndarray((), self._of_rows(num_rows), block)
        return [record[name] for name in self._fields]

    def batch_bytes(self, num_rows: int) -> int:
        """Return the size in bytes of a block with `num_rows` observations."""
        return self._of_rows(num_rows).itemsize

    def write(self, observation: Any, places: list[np.ndarray]) -> Others:
        """Copy the arrays of a checked observation to their places; return the other values."""
        if self._keys is not None:
            for key, place in zip(self._keys, places, strict=True):
                place[...] = observation[key]
            return []
        arrays: list[np.ndarray] = []
        others: Others = []
        self._take(observation, arrays, others)
        for place, array in zip(places, arrays, strict=True):
            place[...] = array
        return others

    def read(self, block: np.ndarray, others: Others) -> Any:
        """Return the observation.

        Its large arrays are views of the block; the small ones are read-only copies.
        """
        record: np.ndarray = np.ndarray((), self._record, block)
        content = block.data
        arrays: list[np.ndarray] = [
            # bytes are read-only
            record[name] if in_place else np.ndarray(shape, dtype, content[begin:end].tobytes())
            for name, in_place, shape, dtype, begin, end in self._parts
        ]
        if self._keys is not None:
            return dict(zip(self._keys, arrays))  # noqa: B905  # equal lengths, and this is faster
        return self._build(iter(arrays), iter(others))

    def assemble(self, arrays: list[Any], others: list[Any]) -> Any:
        """Assemble an observation, or a batch of them, from its parts."""
        if self._keys is not None:
            return dict(zip(self._keys, arrays, strict=True))
        return self._build(iter(arrays), iter(others))

    def _of_rows(self, num_rows: int | None) -> np.dtype[Any]:
        if num_rows is None:
            return self._record
        if num_rows not in self._records:
            self._records[num_rows] = _record_of(self._array_spaces, self._fields, num_rows)
        return self._records[num_rows]

    def _compile(self, space: spaces.Space[Any]) -> tuple[_Take, _Build]:
        """Return functions that split and build one part of the space.

        Each array and other value is listed on the way.
        """
        if isinstance(space, spaces.Dict):
            return self._compile_dict(space)
        if isinstance(space, spaces.Tuple):
            return self._compile_tuple(space)
        if isinstance(space, ARRAYS):
            self._array_spaces.append(space)
            return (lambda value, arrays, _: arrays.append(value)), (lambda arrays, _: next(arrays))
        self.others.append(space)
        return (lambda value, _, others: others.append(value)), (lambda _, others: next(others))

    def _compile_dict(self, space: spaces.Dict) -> tuple[_Take, _Build]:
        keys = [*space.spaces]
        parts = [self._compile(space[key]) for key in keys]

        def take_all(value: Any, arrays: list[np.ndarray], others: Others) -> None:
            for key, (take, _) in zip(keys, parts, strict=True):
                take(value[key], arrays, others)

        def build_all(arrays: Iterator[np.ndarray], others: Iterator[Any]) -> dict[str, Any]:
            return {key: build(arrays, others) for key, (_, build) in zip(keys, parts, strict=True)}

        return take_all, build_all

    def _compile_tuple(self, space: spaces.Tuple[Any]) -> tuple[_Take, _Build]:
        parts = [self._compile(part) for part in space]

        def take_all(value: Any, arrays: list[np.ndarray], others: Others) -> None:
            for item, (take, _) in zip(value, parts, strict=True):
                take(item, arrays, others)

        return take_all, lambda arrays, others: tuple(build(arrays, others) for _, build in parts)


def _record_of(
    array_spaces: list[spaces.Space[Any]], names: list[str], num_rows: int | None
) -> np.dtype[Any]:
    """Return a record dtype with one field for each array, [num_rows, ...] if a number is given."""
    rows = () if num_rows is None else (num_rows,)
    formats = [np.dtype((space.dtype, (*rows, *(space.shape or ())))) for space in array_spaces]
    offsets, end = [], 0
    for part in formats:
        offsets.append(end)
        end += -(-part.itemsize // _ALIGNMENT) * _ALIGNMENT
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": end})


def _part_of(
    record: np.dtype[Any], name: str
) -> tuple[str, bool, tuple[int, ...], np.dtype[Any], int, int]:
    """Return name, whether it is read in place, shape, dtype, begin and end of one array.

    Begin and end are bytes in the block.
    """
    assert record.fields is not None
    part, begin = record.fields[name][:2]
    in_place = part.itemsize >= _IN_PLACE_FROM
    return name, in_place, part.shape, part.base, begin, begin + part.itemsize


def _holds_only_arrays(space: spaces.Dict) -> bool:
    return all(isinstance(part, ARRAYS) for part in space.values())
