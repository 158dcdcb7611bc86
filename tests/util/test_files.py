"""A file or folder has one writer at a time, whose files are whole or as they were before.

What a killed owner left is cleared away; the disk may fill up, a write may be cut off.
"""

import ast
import errno
import fcntl
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from disks import SmallDisk

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.util import ownership
from vla_rl.util.appended_file import AppendedFile
from vla_rl.util.atomic_files import is_abandoned, writing_folder
from vla_rl.util.ownership import (
    PREFIXES,
    OwnedFolder,
    Owner,
    name_lock_file,
    remove_abandoned_folders,
    remove_tree,
    sole_owner,
)

OWNS = """
import os, subprocess, sys
from pathlib import Path
from vla_rl.util.ownership import sole_owner

with sole_owner(Path(sys.argv[1]), "the run a"):
    if "forks" in sys.argv and (child := os.fork()) == 0:
        import time
        print(os.getpid(), flush=True)  # by itself: it has let go of the lock by now
        time.sleep(60)
    if "execs" in sys.argv:
        child = subprocess.Popen(["sleep", "60"], close_fds=False, stdout=subprocess.DEVNULL).pid
    if "forks" not in sys.argv:
        print(child if "execs" in sys.argv else "owns", flush=True)
    sys.stdin.read()
"""


@contextmanager
def owner_process(file: Path, *how: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a process that owns a file until its input ends, and the first line that it prints."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNS, str(file), *how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_a_second_owner_is_refused_with_the_pid_and_host_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "owner.json"
    refusal = r"the run a is in use by process {} on host '{}' since 20\d\d-.*wait until it has"
    with owner_process(file) as (process, _):
        expected = refusal.format(process.pid, socket.gethostname())
        with pytest.raises(ConfigError, match=expected), sole_owner(file, "the run a"):
            pass


def test_a_second_owner_in_the_same_process_is_refused_too(tmp_path: Path) -> None:
    file = tmp_path / "owner.json"
    with sole_owner(file, "the run a"):
        refused = pytest.raises(ConfigError, match="the run a is in use by this process on host")
        with refused, sole_owner(file, "the run a"):
            pass
    with sole_owner(file, "the run a"):  # and the first one is not disturbed by it
        pass


def test_nothing_is_left_of_an_owner_that_ends_in_order(tmp_path: Path) -> None:
    with sole_owner(name_lock_file(tmp_path / "base"), "the checkpoint base"):
        assert [path.name for path in tmp_path.iterdir()] == [".base.owner.json"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("child", ["forks", "execs"])
def test_a_killed_owner_owns_nothing_even_if_its_children_live(tmp_path: Path, child: str) -> None:
    file = tmp_path / "owner.json"
    with owner_process(file, child) as (process, pid):
        process.kill()
        process.wait()
        try:
            os.kill(int(pid), 0)  # the child lives
            with sole_owner(file, "the run a"):
                assert msgspec.json.decode(file.read_bytes(), type=Owner).pid == os.getpid()
        finally:
            os.kill(int(pid), signal.SIGKILL)


def test_an_owner_that_a_signal_stopped_still_owns(tmp_path: Path) -> None:
    file = tmp_path / "owner.json"
    with owner_process(file) as (process, _):
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(ConfigError, match="is in use by"), sole_owner(file, "the run a"):
            pass


def test_a_file_system_without_locks_gets_one_line_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    file = tmp_path / "owner.json"
    with caplog.at_level(logging.WARNING), sole_owner(file, "the run a"):
        pass
    assert [record.getMessage() for record in caplog.records] == [
        f"{file} cannot be locked (No locks available), so nothing keeps a second process out of "
        "the run a; start none."
    ]


def test_an_owner_on_another_host_that_did_not_end_in_order_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "owner.json"
    earlier = Owner(pid=12, host="elsewhere", since="2026-11-28 04:00:00+00:00")
    file.write_bytes(msgspec.json.encode(earlier))
    with caplog.at_level(logging.WARNING), sole_owner(file, "the run a"):
        pass
    (record,) = caplog.records
    assert "names process 12 on host 'elsewhere', since 2026-11-28 04:00:00" in record.getMessage()


PREFIX = "owned."
OWNER = """
import sys
from vla_rl.util.ownership import OwnedFolder
print(OwnedFolder("owned.").path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_folder_is_swept_once_its_owner_was_killed_though_it_is_empty(temporary: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().decode().strip())
        remove_abandoned_folders(PREFIX)
        assert folder.exists()
        owner.kill()
    remove_abandoned_folders(PREFIX)
    assert not folder.exists()


def test_a_child_that_inherited_the_lock_holds_the_folder_too(temporary: Path) -> None:
    folder = OwnedFolder(PREFIX)
    with subprocess.Popen(["sleep", "1000"], pass_fds=(folder.descriptor,)) as child:
        os.close(folder.descriptor)
        remove_abandoned_folders(PREFIX)
        assert folder.path.exists()
        child.kill()
    remove_abandoned_folders(PREFIX)
    assert not folder.path.exists()


def test_folders_of_another_prefix_are_left_alone(temporary: Path) -> None:
    (temporary / "owners").mkdir()
    remove_abandoned_folders(PREFIX)
    assert (temporary / "owners").exists()


def test_a_folder_that_was_swept_before_it_was_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, names = tempfile.mkdtemp, list[str]()

    def make_and_lose_the_first(**options: str) -> str:
        names.append(make(**options))
        if len(names) == 1:
            remove_abandoned_folders(PREFIX)
        return names[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose_the_first)
    folder = OwnedFolder(PREFIX)
    assert [str(path) for path in temporary.iterdir()] == [str(folder.path)] == names[1:]
    folder.remove_folder()
    assert not list(temporary.iterdir())


def test_a_file_system_without_locks_does_for_a_folder_that_is_then_never_swept(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, lock: int) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = OwnedFolder(PREFIX)
    assert (
        "cannot be locked ([Errno 9] Bad file descriptor), so it stays if this process is "
        "killed" in caplog.text
    )
    remove_abandoned_folders(PREFIX)
    assert folder.path.exists()
    folder.remove_folder()
    assert not folder.path.exists()


def test_folders_without_permissions_or_thousands_deep_are_removed_too(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "closed" / "inside").mkdir(parents=True)
    (folder / "closed").chmod(0)
    folder_fd = os.open(folder, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("deep", dir_fd=folder_fd)
        folder_fd, above = os.open("deep", os.O_RDONLY, dir_fd=folder_fd), folder_fd
        os.close(above)
    os.close(folder_fd)
    remove_tree(folder)
    assert not folder.exists()


def test_every_folder_that_a_kill_leaves_is_swept_by_the_next_run() -> None:
    package, named = Path(ownership.__file__).parents[1], set[str]()
    for path in package.rglob("*.py"):
        text = path.read_text()
        if "OwnedFolder" in text and path.name != "ownership.py":
            found = re.findall(
                r"^_?[A-Z_]*(?:PREFIX|FOLDERS)\b[^=\n]*= (\".*\")$", text, re.MULTILINE
            )
            assert found, f"{path} makes a folder whose prefix is no constant"
            named |= {ast.literal_eval(each) for each in found}
    assert named == set(PREFIXES)


def test_no_other_folder_is_made_that_outlives_a_kill() -> None:
    package = Path(ownership.__file__).parents[1]
    makers = {
        str(path.relative_to(package)): len(found)
        for path in sorted(package.rglob("*.py"))
        if (found := re.findall(r"\b(?:mkdtemp|TemporaryDirectory|mkstemp)\(", path.read_text()))
    }
    assert makers == {
        "util/ownership.py": 1,
        "envs/bench2drive/carla_side/vla_rl_route_server.py": 1,  # on CARLA's side, without vla_rl
        "models/language/tiny.py": 1,  # a tokenizer, read back at once
        "reporting/videos.py": 1,  # one frame, read back at once
        "sandbox/running_call.py": 1,  # inside the folder of the sandbox
    }, "use OwnedFolder, so that the next run removes what a killed one left"


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
