"""The bytes of a control step's message: its action on the way there, its observation on the way back.

Both ends derive the layout of an observation from its space: the arrays are consecutive fields of one
record in a block of shared memory; values that are not arrays (texts, whole numbers) are in a short
list beside it. Actions are checked before they are packed: a wrong action is the caller's mistake and
must not reach a simulator.
"""

import mmap
import os
from collections.abc import Callable, Iterator
from operator import le
from typing import Any, Protocol, TypeAlias, cast

import numpy as np
from gymnasium import spaces

from vla_rl.actors.wire.slots import PlainBlock, SharedBlock, new_block
from vla_rl.env_workers.spaces import describe_value

# a cache line: an array that begins inside of one is read and copied more slowly
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
        self._record = _build_record(self._array_spaces, self._fields, num_rows=None)
        self._records: dict[int, np.dtype[Any]] = {}
        self.num_bytes = self._record.itemsize
        self._parts = [_get_part(self._record, name) for name in self._fields]
        self._keys = (
            [*space.spaces]
            if isinstance(space, spaces.Dict)
            and all(isinstance(part, ARRAYS) for part in space.values())
            else None
        )
        """Keys of an observation that is a dict of arrays only: the most frequent case, with a
        faster path. Else None."""

    def get_arrays(self, block: Any, num_rows: int | None = None) -> list[np.ndarray]:
        """Return the arrays in a block of `num_bytes`.

        With `num_rows`, they are [num_rows, ...] in a block of `batch_bytes`.
        """
        record: np.ndarray = np.ndarray((), self._index_rows(num_rows), block)
        return [record[name] for name in self._fields]

    def batch_bytes(self, num_rows: int) -> int:
        """Return the size in bytes of a block with `num_rows` observations."""
        return self._index_rows(num_rows).itemsize

    def pack_observation(self, observation: Any, targets: list[np.ndarray]) -> Others:
        """Copy the arrays of a checked observation to `targets`; return the other values."""
        if self._keys is not None:
            for key, target in zip(self._keys, targets, strict=True):
                target[...] = observation[key]
            return []
        arrays: list[np.ndarray] = []
        others: Others = []
        self._take(observation, arrays, others)
        for target, array in zip(targets, arrays, strict=True):
            target[...] = array
        return others

    def unpack_observation(self, block: np.ndarray, others: Others) -> Any:
        """Return the observation.

        Its large arrays are views of the block; the small ones are read-only copies.
        """
        record: np.ndarray = np.ndarray((), self._record, block)
        content = block.data
        arrays: list[np.ndarray] = [
            # a small array as a view would keep a block of images for as long as an agent remembers a
            # state of eight numbers; its copy is of bytes, which are read-only as a view is
            record[name] if is_in_place else np.ndarray(shape, dtype, content[begin:end].tobytes())
            for name, is_in_place, shape, dtype, begin, end in self._parts
        ]
        if self._keys is not None:
            return dict(zip(self._keys, arrays))  # noqa: B905  # equal lengths, and this is faster
        return self._build(iter(arrays), iter(others))

    def assemble(self, arrays: list[Any], others: list[Any]) -> Any:
        """Assemble an observation, or a batch of them, from its parts."""
        if self._keys is not None:
            return dict(zip(self._keys, arrays, strict=True))
        return self._build(iter(arrays), iter(others))

    def _index_rows(self, num_rows: int | None) -> np.dtype[Any]:
        if num_rows is None:
            return self._record
        if num_rows not in self._records:
            self._records[num_rows] = _build_record(self._array_spaces, self._fields, num_rows)
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


def _build_record(
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


def _get_part(
    record: np.dtype[Any], name: str
) -> tuple[str, bool, tuple[int, ...], np.dtype[Any], int, int]:
    """Return name, whether it is read in place, shape, dtype, begin and end of one array.

    Begin and end are bytes in the block.
    """
    assert record.fields is not None
    part, begin = record.fields[name][:2]
    is_in_place = part.itemsize >= _IN_PLACE_FROM
    return name, is_in_place, part.shape, part.base, begin, begin + part.itemsize


NUM_BATCHES = 4
"""Batches that can be in use or written at the same time before one has to be copied."""


class Packer(Protocol):
    """Converts a checked observation to the form in which it is sent."""

    def pack(self, observation: Any, batch: int = 0) -> Packed:
        """Write the arrays before returning the packed form.

        `batch` is the number of the batch if there are several.
        """
        ...


class BlockPacker:
    """Writes each observation into a block of its own.

    The receiver reads it in place as long as it is referenced.
    """

    def __init__(self, layout: ObservationLayout) -> None:
        self._layout = layout
        self._known: list[tuple[SharedBlock, list[np.ndarray]]] = []
        """Blocks used so far: the same few come again and again."""

    def pack(self, observation: Any, batch: int = 0) -> Packed:
        """Implement `Packer.pack`."""
        block: SharedBlock | PlainBlock
        # the arrays of a block are built once, which saves some microseconds of every step
        for known in self._known:
            if known[0].retake():
                block, arrays = known
                break
        else:
            block = new_block(self._layout.num_bytes)
            arrays = self._layout.get_arrays(block.array)
            if isinstance(block, SharedBlock):
                self._known.append((block, arrays))
        # arrives as an array
        return cast(np.ndarray, block), self._layout.pack_observation(observation, arrays)


class RowPacker:
    """Writes all observations into the same rows of a batch.

    Its owner chooses the batch in each request.

    Args:
        path: path of the batch's memory, see `SharedBatch.path`.
        index, num_rows: number of our row, and number of rows.
    """

    def __init__(self, layout: ObservationLayout, path: str, index: int, num_rows: int) -> None:
        # the path leads through the owner's /proc/<pid>/fd: the memory has no name that could stay behind
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        self._layout = layout
        size = len(self._memory) // NUM_BATCHES
        batches = [
            np.ndarray(size, np.uint8, self._memory, number * size) for number in range(NUM_BATCHES)
        ]
        self._rows = [
            [array[index, ...] for array in layout.get_arrays(batch, num_rows)] for batch in batches
        ]

    def pack(self, observation: Any, batch: int = 0) -> Packed:
        """Implement `Packer.pack`."""
        return None, self._layout.pack_observation(observation, self._rows[batch])


# 7 numbers take 2.5 us as Python floats and 7.6 us by NumPy's comparisons, 32 about as long both ways
_SHORT_VECTOR = 32


class ActionGate:
    """Converts a caller's action to a value of the action space, or describes its mistake.

    Args:
        space: action space of one control step.
        env_id: name of the environment in errors.
    """

    def __init__(self, space: spaces.Space[Any], env_id: str) -> None:
        self._space, self._env_id = space, env_id
        self._box = space if isinstance(space, spaces.Box) else None
        self._dtype = space.dtype
        self._shape = space.shape or ()
        self._bounds: tuple[list[float], list[float]] | None = None
        """Bounds of a short vector, which is checked faster as Python numbers."""
        if self._box is not None and len(self._shape) == 1 and self._shape[0] <= _SHORT_VECTOR:
            self._bounds = self._box.low.tolist(), self._box.high.tolist()

    def check_action(self, action: Any) -> Any:
        """Check an action of one control step. Raises: ValueError describing the mistake."""
        if self._box is not None:
            if (
                self._bounds is not None
                and type(action) is np.ndarray
                and action.dtype is self._dtype
            ):
                low, high = self._bounds
                numbers = action.tolist()
                if (
                    action.shape == self._shape
                    and all(map(le, low, numbers))
                    and all(map(le, numbers, high))
                ):
                    return action  # a NaN is not
            return self._in_box(self._box, action, self._shape, "action")
        if isinstance(self._space, spaces.Discrete):
            return self._discrete(self._space, action)
        if isinstance(self._space, spaces.MultiDiscrete | spaces.MultiBinary):
            action = np.asarray(action, self._dtype)
        if not self._space.contains(action):
            raise ValueError(
                f"action for {self._env_id} is {describe_value(action)}, expected a value of {self._space}."
            )
        return action

    def pack_rows(self, actions: Any) -> list[Any] | None:
        """Check all rows at once; return each packed, or None if they need single checks."""
        # One comparison for all rows: it takes 3.4 us for 16 rows of seven numbers, and 2.9 us for
        # a single one.
        box = self._box
        if box is None or type(actions) is not np.ndarray or actions.dtype is not self._dtype:
            return None
        if (
            actions.shape[1:] != self._shape
            or not ((actions >= box.low) & (actions <= box.high)).all()
        ):
            return None
        return [row.tobytes() for row in actions]

    def pack(self, action: Any) -> Any:
        """Return the form of a checked action for sending.

        Of a Box it is only the bytes, since the receiver knows the rest.
        """
        return action.tobytes() if self._box is not None else action

    def unpack(self, packed: Any) -> Any:
        """Return the action that was given to `pack`; read-only."""
        return np.ndarray(self._shape, self._dtype, packed) if self._box is not None else packed

    def check_chunk(self, actions: Any) -> np.ndarray:
        """Check rows of actions, [H, *shape] with H >= 1.

        Raises: ValueError describing the mistake.
        """
        if self._box is None:
            raise ValueError(
                f"{self._env_id} takes actions of {self._space}; action chunks need a Box space."
            )
        array = np.asarray(actions)
        if array.ndim != len(self._shape) + 1 or len(array) < 1:
            shape = ", ".join(["H", *map(str, self._shape)])
            raise ValueError(
                f"action chunk for {self._env_id} is {describe_value(array)}, expected {self._dtype} "
                f"[{shape}] with H >= 1 rows; pass a single action to `step`."
            )
        return self._in_box(self._box, array, (len(array), *self._shape), "action chunk")

    def _in_box(
        self, box: spaces.Box, action: Any, shape: tuple[int, ...], what: str
    ) -> np.ndarray:
        array = np.asarray(action)
        if array.dtype != self._dtype or array.shape != shape:
            if array.shape != shape or not np.can_cast(array.dtype, self._dtype, "same_kind"):
                raise ValueError(
                    f"{what} for {self._env_id} is {describe_value(array)}, expected "
                    f"{self._dtype} {list(shape)}."
                )
            array = array.astype(self._dtype)
        if b"\0" in ((array >= box.low) & (array <= box.high)).tobytes():  # a NaN is neither
            self._refuse_range(box, array, what)
        return array

    def _refuse_range(self, box: spaces.Box, array: np.ndarray, what: str) -> None:
        wrong = ~((array >= box.low) & (array <= box.high))
        where = tuple(int(index) for index in np.argwhere(wrong)[0])
        low, high = (np.broadcast_to(bound, array.shape)[where] for bound in (box.low, box.high))
        raise ValueError(
            f"{what} for {self._env_id} holds {array[where]} at {list(where)}, expected {low} to "
            f"{high}; {int(wrong.sum())} of {array.size} numbers are out of range or not finite."
        )

    def _discrete(self, space: spaces.Discrete[Any], action: Any) -> int:
        if not isinstance(action, int | np.integer | np.ndarray) or np.ndim(action) != 0:
            raise ValueError(
                f"action for {self._env_id} is {describe_value(action)}, expected a whole number of {space}."
            )
        number = int(action)
        if not space.start <= number < space.start + space.n:
            raise ValueError(f"action for {self._env_id} is {number}, expected a value of {space}.")
        return number
