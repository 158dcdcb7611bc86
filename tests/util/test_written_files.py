"""Files on a disk that fills up, beside other writers, under a kill: whole, or as they were before."""

import os
from pathlib import Path

import pytest
from disks import SmallDisk

from vla_rl.errors import CheckpointError
from vla_rl.util.appended_file import AppendedFile
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


def test_half_a_record_is_taken_back_and_the_record_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, disk = tmp_path / "records", SmallDisk(monkeypatch, room=10)
    file = AppendedFile(path)
    file.write(b"first;")
    with pytest.raises(OSError, match=r"No space left on device: '.*records'"):
        file.write(b"second;")  # 4 of its 7 bytes find room
    assert path.read_bytes() == b"first;"
    disk.room = None
    file.write(b"second;")
    file.close()
    assert path.read_bytes() == b"first;second;"


def test_a_write_that_comes_back_short_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vla_rl.util import appended_file

    one_byte_at_a_time = appended_file._write
    monkeypatch.setattr(
        appended_file, "_write", lambda descriptor, data: one_byte_at_a_time(descriptor, data[:1])
    )
    file = AppendedFile(tmp_path / "records")
    file.write(b"whole")
    file.close()
    assert (tmp_path / "records").read_bytes() == b"whole"


def test_an_empty_file_begins_with_its_opening_however_often_the_first_record_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, disk = tmp_path / "records", SmallDisk(monkeypatch, room=3)
    file = AppendedFile(path, opening=b"[")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            file.write(b"first;")
        assert path.read_bytes() == b""
    disk.room = None
    file.write(b"first;")
    file.write(b"second;")
    file.close()
    assert path.read_bytes() == b"[first;second;"


@pytest.mark.parametrize("left", [b"one\ntwo\nthr", b"one\ntwo\n", b"one\ntwo\n" + b"x" * 200_000])
def test_half_a_line_that_a_kill_left_is_cut_off(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "lines"
    path.write_bytes(left)
    file = AppendedFile(path, lines=True)
    file.write(b"three\n")
    file.close()
    assert path.read_bytes() == b"one\ntwo\nthree\n"


def test_a_file_without_any_whole_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"half")
    file = AppendedFile(path, lines=True)
    file.write(b"one\n")
    file.close()
    assert path.read_bytes() == b"one\n"


def test_a_file_that_was_removed_is_an_error_once_and_then_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "records"
    file = AppendedFile(path, opening=b"[")
    file.write(b"first;")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"removed while records were written: '.*records'"):
        file.write(b"second;")
    file.write(b"second;")
    file.close()
    assert path.read_bytes() == b"[second;"


def test_without_its_folder_a_file_cannot_be_opened_until_the_folder_is_back(
    tmp_path: Path,
) -> None:
    file = AppendedFile(tmp_path / "gone" / "records")
    with pytest.raises(FileNotFoundError):
        file.write(b"first;")
    (tmp_path / "gone").mkdir()
    file.write(b"first;", sync=True)
    file.close()
    assert (tmp_path / "gone" / "records").read_bytes() == b"first;"
