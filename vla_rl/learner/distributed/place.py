"""Position of a rank's part in a whole tensor.

FSDP alone             rows                     ████████   one range of numbers
cut by outputs too     rows of its own part     ████████   one range of numbers
cut by inputs too      a piece of each row      ··██····   one range in each row
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Place:
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
    def run(self) -> int:
        """Numbers that follow each other: all of them, or those of one row."""
        if self.num_columns == self.row_size:
            return self.num_rows * self.row_size
        return self.num_columns

    def pieces(self, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield pieces of at most about `length` numbers.

        For each: where it begins and ends in this block, and its start in the flattened tensor.
        """
        size = self.num_rows * self.num_columns
        if self.run == size:
            for begin in range(0, size, max(length, 1)):
                yield begin, min(begin + length, size), self.start + begin
            return
        at_once = max(length // self.num_columns, 1)
        for row in range(0, self.num_rows, at_once):
            end = min(row + at_once, self.num_rows)
            begin, end = row * self.num_columns, end * self.num_columns
            yield begin, end, self.start + row * self.row_size


def place_of(tensor: DTensor) -> Place:
    """Return the block that this rank holds."""
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
        return Place(0, 1, 1, 0, 1, is_first)
    row_size = tensor.numel() // max(tensor.shape[0], 1)
    if tensor.ndim == 1 or shape[1:] == tensor.shape[1:]:
        return Place(offset[0], shape[0], row_size, 0, row_size, is_first)
    assert shape[2:] == tensor.shape[2:], "no part is cut beyond its columns"
    column = row_size // tensor.shape[1]
    return Place(offset[0], shape[0], row_size, offset[1] * column, shape[1] * column, is_first)
