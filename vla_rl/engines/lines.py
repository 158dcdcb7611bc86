"""Rows of different lengths side by side on lines of one width: what padding would waste holds other rows.

line 0   │ row 0 . . . . . . . . . . . │
line 1   │ row 1 . . . . . │ row 4 . . │
line 2   │ row 2 . . . │ row 3 . . . │ │
"""

from collections.abc import Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """Where a row begins."""

    line: int
    start: int


def placed(lengths: Sequence[int], width: int, most_lines: int | None = None) -> list[Place | None]:
    """First fit: each row, in the order given, on the first line that has room for it. Longest first wastes least.

    Args:
        lengths: of the rows, each at most `width`.
        width: of every line.
        most_lines: that there may be; a row that finds no room on them has no place. None: as many as it takes.
    """
    taken: list[int] = []
    places: list[Place | None] = []
    for length in lengths:
        line = next((number for number, end in enumerate(taken) if end + length <= width), len(taken))
        if line == len(taken):
            if most_lines is not None and line >= most_lines:
                places.append(None)
                continue
            taken.append(0)
        places.append(Place(line, taken[line]))
        taken[line] += length
    return places
