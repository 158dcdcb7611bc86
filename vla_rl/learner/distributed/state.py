"""A rank's part of the state: copied at one instant, written to files, read from them.

Any number of ranks can read the files.

    rank 0   │ header │ a: rows 0-3 │             │ b: rows 0-1 │            one safetensors file of
    rank 1            │             │ a: rows 4-7 │             │ b: row 2   whole tensors, as one
                                                                             process writes it

FSDP shards a tensor by its rows, so that a rank's part is one range of bytes in the file; tensor
parallelism cuts some by their columns too:

    FSDP alone             rows                     ████████   one range of numbers
    cut by outputs too     rows of its own part     ████████   one range of numbers
    cut by inputs too      a piece of each row      ··██····   one range in each row

Every rank writes its ranges in place; nothing is gathered, and nothing is pickled.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vla_rl.errors import CheckpointError


@dataclass(frozen=True)
class LocalBlock:
    """The block of a tensor that a rank holds, with sizes in numbers."""

    first_row: int
    num_rows: int
    row_size: int
    first_column: int
    num_columns: int
    is_first_copy: bool

    @property
    def start(self) -> int:
        """Index of the first number in the flattened tensor."""
        return self.first_row * self.row_size + self.first_column

    @property
    def run_length(self) -> int:
        """Numbers that follow each other: all of them, or those of one row."""
        if self.num_columns == self.row_size:
            return self.num_rows * self.row_size
        return self.num_columns

    def pieces(self, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield pieces of at most about `length` numbers.

        For each: where it begins and ends in this block, and its start in the flattened tensor.
        """
        size = self.num_rows * self.num_columns
        if self.run_length == size:
            for begin in range(0, size, max(length, 1)):
                yield begin, min(begin + length, size), self.start + begin
            return
        at_once = max(length // self.num_columns, 1)
        for row in range(0, self.num_rows, at_once):
            end = min(row + at_once, self.num_rows)
            begin, end = row * self.num_columns, end * self.num_columns
            yield begin, end, self.start + row * self.row_size


def get_local_block(tensor: DTensor) -> LocalBlock:
    """Return the block that this rank holds.

    Example:
        The second of two ranks, of a matrix of 8 rows and 6 columns:

        LocalBlock(first_row=4, num_rows=4, row_size=6, first_column=0, num_columns=6, is_first_copy=True)
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    # a mesh of some of the ranks has twins that hold the same
    is_first = bool((mesh.mesh == 0).any()) and all(
        coordinate == 0
        for coordinate, placement in zip(coordinates, placements, strict=True)
        if placement.is_replicate()
    )
    if not shape:
        return LocalBlock(0, 1, 1, 0, 1, is_first)
    row_size = tensor.numel() // max(tensor.shape[0], 1)
    if tensor.ndim == 1 or shape[1:] == tensor.shape[1:]:
        return LocalBlock(offset[0], shape[0], row_size, 0, row_size, is_first)
    assert shape[2:] == tensor.shape[2:], "no part is cut beyond its columns"
    column = row_size // tensor.shape[1]
    return LocalBlock(
        offset[0], shape[0], row_size, offset[1] * column, shape[1] * column, is_first
    )


DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in the header of a safetensors file."""


class Entry(msgspec.Struct, frozen=True):
    """One whole tensor of a file."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class Part:
    """The part of a tensor that one rank holds.

    Example:
        Entry(dtype="BF16", shape=(4096, 4096), num_bytes=33_554_432)
    """

    data: Tensor
    whole: Entry
    first_byte: int
    """Position in the bytes of the whole tensor."""

    is_ours: bool
    """Whether this rank writes it; of equal copies, the first rank writes its own."""

    run_bytes: int
    """Bytes that follow each other in the whole tensor."""

    row_bytes: int
    """Distance between the beginnings of two such runs."""


def copy_part(tensor: Tensor, dtype: torch.dtype | None, *, is_first_rank: bool) -> Part:
    """Copy a rank's part of a tensor to the CPU.

    Args:
        tensor: sharded, or whole and the same on every rank.
        dtype: type to write; None keeps the tensor's.
        is_first_rank: whether this rank writes whole tensors.
    """
    dtype = dtype or tensor.dtype
    shape = tuple(tensor.shape)
    entry = Entry(DTYPES[dtype], shape, tensor.numel() * dtype.itemsize)
    if not isinstance(tensor, DTensor):
        data = tensor.detach().to("cpu", dtype, copy=True) if is_first_rank else torch.empty(0)
        return Part(data, entry, 0, is_first_rank, entry.num_bytes, entry.num_bytes)
    block = get_local_block(tensor)
    data = tensor.to_local().detach().to("cpu", dtype, copy=True)
    first_byte, run_bytes, row_bytes = (
        numbers * dtype.itemsize for numbers in (block.start, block.run_length, block.row_size)
    )
    return Part(data, entry, first_byte, block.is_first_copy, run_bytes, row_bytes)


def make_header(entries: Mapping[str, Entry]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a safetensors file, and where each tensor begins in the file."""
    tensors: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    position = 0
    # the widest types first, so that every tensor is aligned
    for name in sorted(entries, key=lambda name: (-_width(entries[name]), name)):
        entry = entries[name]
        end = position + entry.num_bytes
        tensors[name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [position, end],
        }
        begins[name], position = position, end
    text = json.dumps(tensors).encode()
    # padded as safetensors' own writer does, so that tensors begin at addresses that can be mapped
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def create_file(path: Path, entries: Mapping[str, Entry]) -> dict[str, int]:
    """Create a file whose tensors are still zeros; return where each begins."""
    header, begins = make_header(entries)
    with path.open("wb") as file:
        file.write(header)
        # whole from the beginning: ranks write their ranges in any order, and none has to append
        file.truncate(len(header) + sum(entry.num_bytes for entry in entries.values()))
    return begins


def write_parts(path: Path, parts: Mapping[str, Part], begins: Mapping[str, int]) -> None:
    """Write a rank's parts into a file that `create_file` made. Raises: OSError."""
    with path.open("r+b") as file:
        for name, part in parts.items():
            if part.is_ours and part.data.numel():
                data = part.data.contiguous().flatten().view(torch.uint8).numpy()
                at = begins[name] + part.first_byte
                write_runs(file.fileno(), data, at, part.run_bytes, part.row_bytes)


def write_runs(descriptor: int, data: np.ndarray, at: int, run: int, distance: int) -> None:
    """Write bytes in runs, one at each `distance` from `at`. Raises: OSError."""
    for number, begin in enumerate(range(0, len(data), run)):
        write_at(descriptor, data[begin : begin + run], at + number * distance)


def write_at(descriptor: int, data: np.ndarray, at: int) -> None:
    """Write bytes at an offset of an open file. Raises: OSError."""
    left = memoryview(data)  # type: ignore[arg-type]
    # pwrite may write less than it was given, above all beyond 2 GiB
    while left:
        written = os.pwrite(descriptor, left, at)
        at, left = at + written, left[written:]


def split_part(
    part: Part, begin: int, num_bytes: int
) -> Iterator[tuple[int, int, int, np.ndarray]]:
    """Yield what `write_parts` would write of a part, about `num_bytes` at a time.

    For each piece: its offset in the file, the bytes of a run, their distance, and the bytes.
    """
    if not part.is_ours or not part.data.numel():
        return
    data = part.data.contiguous().flatten().view(torch.uint8).numpy()
    at, run = begin + part.first_byte, part.run_bytes
    if run >= len(data):
        for start in range(0, len(data), num_bytes):
            piece = data[start : start + num_bytes]
            yield at + start, len(piece), len(piece), piece
        return
    runs_at_once = max(num_bytes // run, 1)
    for number in range(0, len(data) // run, runs_at_once):
        piece = data[number * run : (number + runs_at_once) * run]
        yield at + number * part.row_bytes, run, part.row_bytes, piece


def read_header(path: Path) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Return the header of a safetensors file, and where each tensor begins and ends in the file.

    Raises: CheckpointError if it is none.
    """
    try:
        with path.open("rb") as file:
            length = file.read(8)
            text = file.read(int.from_bytes(length, "little"))
        offsets = {
            name: each["data_offsets"]
            for name, each in json.loads(text).items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from error
    header = length + text
    return header, {
        name: (len(header) + begin, len(header) + end) for name, (begin, end) in offsets.items()
    }


class ShardReader:
    """Reads a rank's parts of the tensors of a safetensors file, and nothing else of it.

    Args:
        path: the file.
        prefix: beginning of the names to read, which is left out of `names`.
    """

    def __init__(self, path: Path, prefix: str = "") -> None:
        self.path, self._prefix = path, prefix
        self._ranges: dict[str, tuple[int, int]] | None = None
        opened: Any = safe_open
        self._file = opened(path, "pt")
        found = [name for name in self._file.keys() if name.startswith(prefix)]  # noqa: SIM118
        self.names = frozenset(name.removeprefix(prefix) for name in found)

    def read_part(self, name: str, like: Tensor) -> Tensor:
        """Return the part of a tensor that this rank holds of `like`, as a tensor like it.

        Raises: CheckpointError if the tensor is missing, or has another shape.
        """
        if name not in self.names:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; it is of another policy.")
        found = self._file.get_slice(self._prefix + name)
        shape = tuple(found.get_shape())
        # compared as a whole: a slice of a larger tensor would fit, and be the wrong rows
        if shape != tuple(like.shape):
            raise CheckpointError(
                f"{name} in {self.path} is {list(shape)}, expected {list(like.shape)}; it is of "
                "another policy."
            )
        if not isinstance(like, DTensor):
            return self.read_numbers(name)
        block = get_local_block(like)
        rows = slice(block.first_row, block.first_row + block.num_rows)
        if block.num_columns < block.row_size:
            columns = slice(block.first_column, block.first_column + block.num_columns)
            held = found[rows, columns]
        else:
            held = found[rows]
        local = held.to(like.to_local().device, like.dtype)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )

    def locate(self, name: str, like: Tensor | None) -> tuple[int, int]:
        """Return where the file has what `read` would read like a tensor; None: all of it.

        An empty range if the tensor is missing.
        """
        if self._ranges is None:
            self._ranges = read_header(self.path)[1]
        begin, end = self._ranges.get(self._prefix + name, (0, 0))
        if not isinstance(like, DTensor) or not like.ndim or end == begin:
            return begin, end
        block, row_bytes = get_local_block(like), (end - begin) // like.shape[0]
        first = begin + block.first_row * row_bytes
        return first, first + block.num_rows * row_bytes

    def read_numbers(self, name: str) -> Tensor:
        """Return a small tensor whole."""
        tensor: Tensor = self._file.get_tensor(self._prefix + name)
        return tensor


def count_bytes(entries: Mapping[str, Entry]) -> int:
    """Return the bytes of all tensors of a file."""
    return sum(entry.num_bytes for entry in entries.values())


def _width(entry: Entry) -> int:
    return max((dtype.itemsize for dtype, name in DTYPES.items() if name == entry.dtype), default=1)


def split_parameter(
    tensor: Tensor, dtype: torch.dtype, num_bytes: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield a rank's part of a parameter as bytes, about `num_bytes` at a time.

    Before them come the first index, and the numbers that follow each other from there; the next
    ones begin a row later. Yields nothing for a copy that another rank sends.
    """
    assert isinstance(tensor, DTensor)
    block = get_local_block(tensor)
    if not block.is_first_copy:
        return
    local = tensor.to_local().detach().flatten()
    for begin, end, start in block.pieces(max(num_bytes // dtype.itemsize, 1)):
        piece = local[begin:end].to("cpu", dtype, copy=True)
        yield start, min(block.run_length, end - begin), piece.view(torch.uint8)
