"""A file is the old one or the new one, and a failure leaves the old one alone."""

import os
from pathlib import Path

import pytest

from vla_rl.reporting.whole_file import write_whole


def test_the_new_file_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    for content in (b"first", b"2"):
        write_whole(file, content)
        assert file.read_bytes() == content
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_leaves_the_old_file_and_no_part_of_the_new_one(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state.json"
    write_whole(file, b"first")

    def fail(*arguments: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="no space left"):
        write_whole(file, b"second")
    assert file.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [file]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "state.json", b"")
