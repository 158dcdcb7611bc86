"""Files of records: whole or not there, in order after a full disk, without the lines that a resume undoes."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vla_rl.reporting.record_files import FailureReporter, RetryingWriter, set_aside_lines
from vla_rl.util.atomic_files import replace_file


def test_the_new_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    for content in (b"first", b"2"):
        replace_file(file, content)
        assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_no_part_of_the_new_one(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state.json"
    replace_file(file, b"first")

    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space left"):
        replace_file(file, b"second")
    assert file.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "none" / "state.json", b"")


class FullDisk:
    """Takes records while it is `open`; `poison` is never taken."""

    def __init__(self) -> None:
        self.is_open = True
        self.taken: list[str] = []

    def take(self, record: str) -> None:
        if record == "poison":
            raise ValueError("not this one")
        if not self.is_open:
            raise OSError(28, "No space left on device", "disk.txt")
        self.taken.append(record)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def test_what_finds_no_room_waits_and_is_written_in_order_when_there_is_some(
    warnings: Callable[[], list[str]],
) -> None:
    disk = FullDisk()
    writer = RetryingWriter("the disk", disk.take)
    writer.put("update 1", "a")
    disk.is_open = False
    writer.put("update 2", "b")
    writer.put("update 3", "c")
    assert (disk.taken, writer.waiting) == (["a"], ["b", "c"])
    disk.is_open = True
    writer.put("update 4", "d")
    assert (disk.taken, writer.waiting) == (["a", "b", "c", "d"], [])
    assert warnings() == [
        "the disk failed at update 2: [Errno 28] No space left on device: 'disk.txt'; it waits "
        "in memory and is "
        "tried again with the next one",
        "the disk works again, after 2 failures",
    ]


def test_a_record_that_would_always_fail_is_left_out_and_holds_up_no_other(
    warnings: Callable[[], list[str]],
) -> None:
    disk = FullDisk()
    writer = RetryingWriter("the disk", disk.take)
    for number, record in enumerate(("a", "poison", "b"), start=1):
        writer.put(f"update {number}", record)
    assert disk.taken == ["a", "b"]
    assert (
        warnings()[0] == "the disk failed at update 2: ValueError('not this one'); it is left out"
    )


def test_the_oldest_are_left_out_when_too_many_wait(warnings: Callable[[], list[str]]) -> None:
    disk = FullDisk()
    disk.is_open = False
    writer = RetryingWriter("the disk", disk.take, most_waiting=2)
    for number in range(1, 6):
        writer.put(f"update {number}", str(number))
    assert writer.waiting == ["4", "5"]
    assert [text for text in warnings() if "update 1 is left out" in text] == [warnings()[1]]
    assert len(warnings()) == 2
    writer.close()
    assert warnings()[-1] == "the disk: 2 records were never written, the first of them update 4"


def test_closing_writes_what_waits_and_reports_what_fails_to_close(
    warnings: Callable[[], list[str]],
) -> None:
    disk = FullDisk()

    def fail() -> None:
        raise ConnectionError("gone")

    writer = RetryingWriter("the disk", disk.take, fail)
    disk.is_open = False
    writer.put("update 1", "a")
    disk.is_open = True
    writer.close()
    assert disk.taken == ["a"]
    assert warnings()[-1].startswith("the disk failed to close")


def test_of_failures_in_a_row_the_first_is_reported_in_one_line_and_then_that_they_are_over(
    warnings: Callable[[], list[str]],
) -> None:
    reporter = FailureReporter("writing videos", "a later one is tried")
    for _ in range(2):
        for number in range(3):
            reporter.failed(f"video {number}", OSError("ffmpeg:\nno room\n"))
        reporter.worked()
        reporter.worked()
    assert reporter.num_failed == 6
    first = "writing videos failed at video 0: ffmpeg: no room; a later one is tried"
    assert warnings() == [first, "writing videos works again, after 3 failures"] * 2


def small(line: bytes) -> bool:
    return int(json.loads(line)["n"]) < 3


def lines(*numbers: int) -> bytes:
    return b"".join(b'{"n": %d}\n' % number for number in numbers)


def test_lines_that_are_not_kept_move_beside_the_file(tmp_path: Path) -> None:
    file, undone = tmp_path / "metrics.jsonl", tmp_path / "metrics-undone.jsonl"
    file.write_bytes(lines(1, 3, 2, 4))
    set_aside_lines(file, small)
    assert file.read_bytes() == lines(1, 2)
    assert undone.read_bytes() == lines(3, 4)


def test_damaged_lines_move_too_and_one_line_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, undone = tmp_path / "metrics.jsonl", tmp_path / "metrics-undone.jsonl"
    file.write_bytes(lines(1) + b'{"n": \xff}\n' + lines(2, 3) + b'{"n": "x"}\n{"n": ')
    set_aside_lines(file, small)
    assert file.read_bytes() == lines(1, 2)
    assert undone.read_bytes() == b'{"n": \xff}\n' + lines(3) + b'{"n": "x"}\n{"n": \n'
    said = f"{file}: lines 2, 5, 6 are damaged, moved to metrics-undone.jsonl\n"
    assert capsys.readouterr().out == said


def test_a_whole_last_line_without_its_newline_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(lines(1, 2).removesuffix(b"\n"))
    set_aside_lines(file, small)
    assert file.read_bytes() == lines(1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert capsys.readouterr().out == ""


def test_lines_of_a_second_resume_stand_below_those_of_the_first(tmp_path: Path) -> None:
    file, undone = tmp_path / "metrics.jsonl", tmp_path / "metrics-undone.jsonl"
    for line in (lines(7), lines(8)):
        file.write_bytes(lines(1) + line)
        set_aside_lines(file, small)
    assert undone.read_bytes() == lines(7, 8)


def test_where_nothing_is_undone_there_is_no_second_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    set_aside_lines(file, small)
    file.write_bytes(lines(1, 2))
    set_aside_lines(file, small)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_failure_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(lines(1, 3))

    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        set_aside_lines(file, small)
    assert file.read_bytes() == lines(1, 3)
