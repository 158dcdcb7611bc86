"""Observations of one space as one block of bytes and the rest: known on both ends, so that neither walks the space again.

The arrays lie in the block one behind the other, as fields of one record; what is no array (texts, whole numbers) is a
short list beside it.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces

_ALIGNMENT = 64
_IN_PLACE_FROM = 4096
"""Smaller arrays are copied out of a block: whoever keeps one of them should not hold the whole block."""

Others: TypeAlias = list[Any]
"""What is no array, in the order of the space."""

Packed: TypeAlias = tuple[np.ndarray | None, Others]
"""An observation on its way: uint8 [num_bytes], or None if the arrays lie elsewhere; and the rest."""

ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces whose values are arrays of a known shape."""

_Take: TypeAlias = Callable[[Any, list[np.ndarray], Others], None]
_Build: TypeAlias = Callable[[Iterator[np.ndarray], Iterator[Any]], Any]


class ObservationLayout:
    """Takes observations of one space apart and puts them together.

    Args:
        space: of the observation.
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
        self._keys = [*space.spaces] if isinstance(space, spaces.Dict) and _holds_only_arrays(space) else None
        """Where the observation is a dict of arrays alone: the shortest way, and the most frequent one."""

    def places(self, block: Any, num_rows: int | None = None) -> list[np.ndarray]:
        """Where each array lies in a block of `num_bytes`; with `num_rows`, [num_rows, ...] in `batch_bytes` of them."""
        record: np.ndarray = np.ndarray((), self._of_rows(num_rows), block)
        return [record[name] for name in self._fields]

    def batch_bytes(self, num_rows: int) -> int:
        """Size of a block with that many observations."""
        return self._of_rows(num_rows).itemsize

    def write(self, observation: Any, places: list[np.ndarray]) -> Others:
        """Copy the arrays of a checked observation to their places; gives the rest."""
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
        """The observation. Its large arrays are views of the block; the small ones are copied, and read-only too."""
        record: np.ndarray = np.ndarray((), self._record, block)
        content = block.data
        arrays: list[np.ndarray] = [
            record[name] if in_place else np.ndarray(shape, dtype, content[begin:end].tobytes())  # bytes are read-only
            for name, in_place, shape, dtype, begin, end in self._parts
        ]
        if self._keys is not None:
            return dict(zip(self._keys, arrays))  # noqa: B905  # as many, and this is faster
        return self._build(iter(arrays), iter(others))

    def assemble(self, arrays: list[Any], others: list[Any]) -> Any:
        """An observation, or a batch of them, of its parts."""
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
        """Functions that take apart and build one part of the space; each array and other is listed on the way."""
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


def _record_of(array_spaces: list[spaces.Space[Any]], names: list[str], num_rows: int | None) -> np.dtype[Any]:
    """A record with one field for each array, [num_rows, ...] where a number is given."""
    rows = () if num_rows is None else (num_rows,)
    formats = [np.dtype((space.dtype, (*rows, *(space.shape or ())))) for space in array_spaces]
    offsets, end = [], 0
    for part in formats:
        offsets.append(end)
        end += -(-part.itemsize // _ALIGNMENT) * _ALIGNMENT
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": end})


def _part_of(record: np.dtype[Any], name: str) -> tuple[str, bool, tuple[int, ...], np.dtype[Any], int, int]:
    """Name, whether it is read in place, shape and dtype of one array, and the bytes of the block in which it lies."""
    assert record.fields is not None
    part, begin = record.fields[name][:2]
    in_place = part.itemsize >= _IN_PLACE_FROM
    return name, in_place, part.shape, part.base, begin, begin + part.itemsize


def _holds_only_arrays(space: spaces.Dict) -> bool:
    return all(isinstance(part, ARRAYS) for part in space.values())
