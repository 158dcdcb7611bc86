"""Ways out of a run that fail: nothing is raised, the first failure is reported, and what can wait
waits in its order.
"""

import logging
from collections.abc import Callable

import pytest

from vla_rl.reporting.outlet import FailureStreak, Outlet


class Shelf:
    """Takes records while it is `open`; `poison` is never taken."""

    def __init__(self) -> None:
        self.is_open = True
        self.taken: list[str] = []

    def take(self, record: str) -> None:
        if record == "poison":
            raise ValueError("not this one")
        if not self.is_open:
            raise OSError(28, "No space left on device", "shelf.txt")
        self.taken.append(record)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def test_what_finds_no_room_waits_and_is_written_in_order_when_there_is_some(
    warnings: Callable[[], list[str]],
) -> None:
    shelf = Shelf()
    outlet = Outlet("the shelf", shelf.take)
    outlet.put("update 1", "a")
    shelf.is_open = False
    outlet.put("update 2", "b")
    outlet.put("update 3", "c")
    assert (shelf.taken, outlet.waiting) == (["a"], ["b", "c"])
    shelf.is_open = True
    outlet.put("update 4", "d")
    assert (shelf.taken, outlet.waiting) == (["a", "b", "c", "d"], [])
    assert warnings() == [
        "the shelf failed at update 2: [Errno 28] No space left on device: 'shelf.txt'; it waits "
        "in memory and is "
        "tried again with the next one",
        "the shelf works again, after 2 failures",
    ]


def test_a_record_that_would_always_fail_is_left_out_and_holds_up_no_other(
    warnings: Callable[[], list[str]],
) -> None:
    shelf = Shelf()
    outlet = Outlet("the shelf", shelf.take)
    for number, record in enumerate(("a", "poison", "b"), start=1):
        outlet.put(f"update {number}", record)
    assert shelf.taken == ["a", "b"]
    assert (
        warnings()[0] == "the shelf failed at update 2: ValueError('not this one'); it is left out"
    )


def test_the_oldest_are_left_out_when_too_many_wait(warnings: Callable[[], list[str]]) -> None:
    shelf = Shelf()
    shelf.is_open = False
    outlet = Outlet("the shelf", shelf.take, most_waiting=2)
    for number in range(1, 6):
        outlet.put(f"update {number}", str(number))
    assert outlet.waiting == ["4", "5"]
    assert [text for text in warnings() if "update 1 is left out" in text] == [warnings()[1]]
    assert len(warnings()) == 2
    outlet.close()
    assert warnings()[-1] == "the shelf: 2 records were never written, the first of them update 4"


def test_closing_writes_what_waits_and_reports_what_fails_to_close(
    warnings: Callable[[], list[str]],
) -> None:
    shelf = Shelf()

    def fail() -> None:
        raise ConnectionError("gone")

    outlet = Outlet("the shelf", shelf.take, fail)
    shelf.is_open = False
    outlet.put("update 1", "a")
    shelf.is_open = True
    outlet.close()
    assert shelf.taken == ["a"]
    assert warnings()[-1].startswith("the shelf failed to close")


def test_of_failures_in_a_row_the_first_is_reported_in_one_line_and_then_that_they_are_over(
    warnings: Callable[[], list[str]],
) -> None:
    streak = FailureStreak("writing videos", "a later one is tried")
    for _ in range(2):
        for number in range(3):
            streak.failed(f"video {number}", OSError("ffmpeg:\nno room\n"))
        streak.worked()
        streak.worked()
    assert streak.num_failed == 6
    first = "writing videos failed at video 0: ffmpeg: no room; a later one is tried"
    assert warnings() == [first, "writing videos works again, after 3 failures"] * 2
