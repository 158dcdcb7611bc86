"""One process at a time owns what it writes, however the one before it ended."""

import errno
import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from vla_rl.errors import ConfigError
from vla_rl.util.sole_owner import Owner, beside, sole_owner

OWNS = """
import os, subprocess, sys
from pathlib import Path
from vla_rl.util.sole_owner import sole_owner

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
    with sole_owner(beside(tmp_path / "base"), "the checkpoint base"):
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
