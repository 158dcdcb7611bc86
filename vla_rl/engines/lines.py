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


class Lines:
    """Lines of one width, each filled from its left; finds the first with room in a number of steps that is the logarithm
    of theirs, by a tree that knows the most room below each node.

    Args:
        width: of every line.
        num_lines: that there are, at least one.
    """

    def __init__(self, width: int, num_lines: int) -> None:
        self._width, self._first_leaf = width, 1 << (num_lines - 1).bit_length()
        self._room = [-1] * (2 * self._first_leaf)
        self._room[self._first_leaf : self._first_leaf + num_lines] = [width] * num_lines
        for node in reversed(range(1, self._first_leaf)):
            self._room[node] = max(self._room[2 * node : 2 * node + 2])

    @property
    def most_room(self) -> int:
        """On the line that has most left."""
        return self._room[1]

    def place(self, length: int) -> Place | None:
        """The first line with room for so much, which is then taken; None where there is none."""
        room, node = self._room, 1
        if room[node] < length:
            return None
        while node < self._first_leaf:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        place = Place(node - self._first_leaf, self._width - room[node])
        room[node] -= length
        while node := node // 2:
            room[node] = max(room[2 * node], room[2 * node + 1])
        return place


def placed(lengths: Sequence[int], width: int) -> list[Place]:
    """First fit: each row, in the order given, on the first line that has room for it. Longest first wastes least.

    Args:
        lengths: of the rows, each at most `width`.
        width: of every line; there are as many as it takes.
    """
    lines = Lines(width, max(len(lengths), 1))
    places = []
    for length in lengths:
        place = lines.place(length)
        assert place is not None  # there are as many lines as rows
        places.append(place)
    return places
