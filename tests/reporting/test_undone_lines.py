"""Lines that a resume undoes move to a file beside theirs, and none is lost."""

import json
import os
from pathlib import Path

import pytest

from vla_rl.reporting.undone_lines import set_aside_lines


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
