"""A folder has one writer at a time, and a writer removes only what no other one writes."""

import os
from pathlib import Path

import pytest

from vla_rl.errors import CheckpointError
from vla_rl.util.atomic_files import is_abandoned, writing_folder


def test_two_writers_of_one_name_do_not_remove_each_others_files(tmp_path: Path) -> None:
    target = tmp_path / "base"
    with writing_folder(target, 0) as writer:
        writer.write_bytes("a", b"first")
        refused = pytest.raises(CheckpointError, match="another process or thread is writing it")
        with refused, writing_folder(target, 0):
            pass
    assert (target / "a").read_bytes() == b"first"


def test_a_writer_of_another_process_is_seen_and_refuses_a_second(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:  # it never commits
        with writing_folder(tmp_path / "base", 0):
            (tmp_path / "writes").touch()
            os.kill(os.getpid(), 19)
    os.waitpid(child, os.WUNTRACED)
    (half,) = tmp_path.glob(".writing-base-*")
    try:
        assert not is_abandoned(half)
        with pytest.raises(CheckpointError, match=half.name), writing_folder(tmp_path / "base", 0):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert is_abandoned(half)
    with writing_folder(tmp_path / "base", 0) as writer:
        writer.write_bytes("a", b"second")
    assert not half.exists()
    assert (tmp_path / "base" / "a").read_bytes() == b"second"


def test_what_is_left_of_a_target_with_a_longer_name_stays(tmp_path: Path) -> None:
    (tmp_path / ".writing-base-000500-17").mkdir()
    (tmp_path / ".writing-base-17").mkdir()
    with writing_folder(tmp_path / "base", 0) as writer:
        writer.write_bytes("a", b"1")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".writing-base-000500-17", "base"]
