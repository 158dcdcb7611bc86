"""Lines that a resume undoes move to a file beside theirs, and none is lost."""

import os
from pathlib import Path

import pytest

from vla_rl.observe.undone_lines import set_aside_lines


def small(line: bytes) -> bool:
    return int(line) < 3


def test_lines_that_are_not_kept_move_beside_the_file(tmp_path: Path) -> None:
    file, undone = tmp_path / "metrics.jsonl", tmp_path / "metrics-undone.jsonl"
    file.write_bytes(b"1\n3\n2\n4\n")
    set_aside_lines(file, small)
    assert file.read_bytes() == b"1\n2\n"
    assert undone.read_bytes() == b"3\n4\n"


def test_an_incomplete_last_line_moves_too_and_becomes_whole(tmp_path: Path) -> None:
    file, undone = tmp_path / "metrics.jsonl", tmp_path / "metrics-undone.jsonl"
    file.write_bytes(b"1\n2")
    set_aside_lines(file, small)
    assert file.read_bytes() == b"1\n"
    assert undone.read_bytes() == b"2\n"


def test_lines_of_a_second_resume_stand_below_those_of_the_first(tmp_path: Path) -> None:
    file, undone = tmp_path / "metrics.jsonl", tmp_path / "metrics-undone.jsonl"
    for line in (b"7\n", b"8\n"):
        file.write_bytes(b"1\n" + line)
        set_aside_lines(file, small)
    assert undone.read_bytes() == b"7\n8\n"


def test_where_nothing_is_undone_there_is_no_second_file(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    set_aside_lines(file, small)
    file.write_bytes(b"1\n2\n")
    set_aside_lines(file, small)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_failure_leaves_the_file_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b"1\n3\n")

    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        set_aside_lines(file, small)
    assert file.read_bytes() == b"1\n3\n"
