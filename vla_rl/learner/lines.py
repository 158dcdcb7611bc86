"""Rows of different lengths side by side on lines of one width.

Other rows then fill the space of padding.

line 0   │ row 0 . . . . . . . . . . . │
line 1   │ row 1 . . . . . │ row 4 . . │
line 2   │ row 2 . . . │ row 3 . . . │ │
"""

from typing import NamedTuple


class Place(NamedTuple):
    """Position of a row's first token."""

    line: int
    start: int


class Lines:
    """Lines of one width, each filled from its left.

    A tree over the free space finds the first line with enough room in a number of steps that is
    logarithmic in the number of lines.

    Args:
        width: width of every line.
        num_lines: number of lines, at least one.
    """

    def __init__(self, width: int, num_lines: int) -> None:
        self._width, self._first_leaf = width, 1 << (num_lines - 1).bit_length()
        self._room = [-1] * (2 * self._first_leaf)
        self._room[self._first_leaf : self._first_leaf + num_lines] = [width] * num_lines
        for node in reversed(range(1, self._first_leaf)):
            self._room[node] = max(self._room[2 * node : 2 * node + 2])

    @property
    def most_room(self) -> int:
        """Free space on the line that has the most."""
        return self._room[1]

    def place(self, length: int) -> Place | None:
        """Take `length` places on the first line with enough room and return the position.

        None if no line has room.
        """
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
