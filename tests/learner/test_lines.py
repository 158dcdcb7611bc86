"""Rows are placed side by side on the first line with room."""

from hypothesis import given, strategies as st

from vla_rl.learner.plan import Lines, LineSlot


def test_a_row_goes_to_the_first_line_with_room_and_begins_where_it_is_free() -> None:
    lines = Lines(10, 3)
    placed = [lines.add_row(length) for length in (10, 6, 5, 4, 3)]
    assert placed == [
        LineSlot(0, 0),
        LineSlot(1, 0),
        LineSlot(2, 0),
        LineSlot(1, 6),
        LineSlot(2, 5),
    ]
    assert lines.most_free == 2


def test_a_row_that_no_line_has_room_for_is_not_placed_and_takes_nothing() -> None:
    lines = Lines(4, 2)
    assert lines.add_row(3) == LineSlot(0, 0)
    assert lines.add_row(5) is None
    assert lines.most_free == 4
    assert lines.add_row(4) == LineSlot(1, 0)
    assert lines.add_row(1) == LineSlot(0, 3)
    assert lines.add_row(1) is None


def test_a_single_line_is_enough() -> None:
    lines = Lines(2, 1)
    assert [lines.add_row(1), lines.add_row(1), lines.add_row(1)] == [
        LineSlot(0, 0),
        LineSlot(0, 1),
        None,
    ]


@given(st.lists(st.integers(1, 12), max_size=30), st.integers(1, 9))
def test_places_are_those_of_a_search_from_the_first_line(lengths: list[int], num: int) -> None:
    lines, free = Lines(12, num), [12] * num
    for length in lengths:
        line = next((line for line, left in enumerate(free) if left >= length), None)
        expected = None if line is None else LineSlot(line, 12 - free[line])
        assert lines.add_row(length) == expected
        if line is not None:
            free[line] -= length
        assert lines.most_free == max(free)
