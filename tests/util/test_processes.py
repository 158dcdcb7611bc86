"""Children get the right variables and memory, and end with their parent."""

import fcntl
import json
import mmap
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vla_rl.util.processes import (
    inherited_environment,
    is_ready,
    list_other_threads,
    make_memory_file,
    overlay_environment,
    refuse_threads,
)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIB_OLD", "before")
    for name in ("LIB_NEW", "BORROWED", "MINE"):
        monkeypatch.delenv(name, raising=False)


def test_borrowed_variables_are_set_here_and_not_inherited() -> None:
    with overlay_environment({"BORROWED": "1", "LIB_OLD": "changed"}, ("LIB_",)):
        assert os.environ["BORROWED"] == "1"
        inherited = inherited_environment()
        assert "BORROWED" not in inherited
        assert inherited["LIB_OLD"] == "before"
    assert "BORROWED" not in os.environ
    assert os.environ["LIB_OLD"] == "before"


def test_what_the_library_sets_itself_goes_with_it_and_what_others_set_stays() -> None:
    with overlay_environment({"BORROWED": "1"}, ("LIB_",)):
        os.environ["LIB_NEW"] = "theirs"
        os.environ["MINE"] = "ours"
        assert "LIB_NEW" not in inherited_environment()
        assert inherited_environment()["MINE"] == "ours"
    assert "LIB_NEW" not in os.environ
    assert os.environ.pop("MINE") == "ours"


def test_variables_are_restored_if_the_block_fails() -> None:
    with pytest.raises(ValueError, match="enough"), overlay_environment({"BORROWED": "1"}, ()):
        raise ValueError("enough")
    assert "BORROWED" not in os.environ


# One program forks a child for each question, because importing the package costs more than the child.
CHILDREN = """
import json, os, signal, time
from vla_rl.util import processes as parent_link

def busy():
    while True:
        pass

def ended(child, closes=False):
    (reads, writes), (told, tells) = os.pipe(), os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(writes)
        child(parent, reads, lambda: os.write(tells, b"!"))
        os._exit(7)
    os.close(reads)
    if closes:
        os.read(told, 1)
        os.close(writes)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def waits_and_is_linked(parent, reads, tell):
    parent_link.die_with_parent(parent, reads)
    tell()
    time.sleep(60)

def is_busy_and_linked_by_the_pipe(parent, reads, tell):
    parent_link.die_with_pipe(reads)
    tell()
    busy()

def asks_too_late(parent, reads, tell):
    tell()
    os.read(reads, 1)  # until the other end is closed
    parent_link.die_with_pipe(reads)

def has_another_parent(parent, reads, tell):
    parent_link.die_with_parent_only(parent + 1)

def ignores_the_terminal(parent, reads, tell):
    parent_link.leave_terminal_to_parent()
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGHUP)


def is_named(parent, reads, tell):
    parent_link.name_process("environment number 7")
    with open("/proc/self/comm") as file:
        os._exit(0 if file.read() == "environment num\\n" else 1)

print(json.dumps({
    "waits": ended(waits_and_is_linked, closes=True),
    "busy": ended(is_busy_and_linked_by_the_pipe, closes=True),
    "late": ended(asks_too_late, closes=True),
    "orphan": ended(has_another_parent),
    "terminal": ended(ignores_the_terminal),
    "named": ended(is_named),
}))
"""


@pytest.fixture(scope="module")
def exits() -> dict[str, int]:
    """Exit status of each child by its name; negative for a signal."""
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN], capture_output=True, text=True, timeout=120, check=True
    )
    return dict(json.loads(done.stdout))


def test_a_child_that_waits_exits_once_its_pipe_is_closed(exits: dict[str, int]) -> None:
    assert exits["waits"] == 1


def test_a_child_that_computes_is_killed_by_the_kernel_once_its_pipe_is_closed(
    exits: dict[str, int],
) -> None:
    assert exits["busy"] == -9


def test_a_child_whose_pipe_or_parent_is_gone_before_it_asks_exits(exits: dict[str, int]) -> None:
    assert (exits["late"], exits["orphan"]) == (1, 1)


def test_signals_of_a_terminal_are_left_to_the_parent(exits: dict[str, int]) -> None:
    assert exits["terminal"] == 7


def test_a_process_is_shown_by_the_first_15_bytes_of_its_name(exits: dict[str, int]) -> None:
    assert exits["named"] == 0


def test_a_descriptor_above_1023_is_ready_once_something_was_written() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this system allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    reading, writing = os.pipe()
    high = fcntl.fcntl(reading, fcntl.F_DUPFD, 1500)
    try:
        assert not is_ready(high)
        os.write(writing, b"!")
        assert is_ready(high)
    finally:
        for fd in (reading, writing, high):
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def running(name: str) -> Iterator[None]:
    may_end = threading.Event()
    thread = threading.Thread(target=may_end.wait, name=name)
    thread.start()
    try:
        yield
    finally:
        may_end.set()
        thread.join()


def test_a_thread_is_named_as_python_names_it_until_it_ends() -> None:
    before = list_other_threads()
    with running("keeps the lock"):
        assert sorted([*before, "keeps the lock"]) == list_other_threads()
    assert "keeps the lock" not in list_other_threads()


def test_threads_before_a_fork_are_refused_with_who_left_them() -> None:
    with (
        running("keeps the lock"),
        pytest.raises(RuntimeError, match=r"my_sim left \d+ threads running .*keeps the lock"),
    ):
        refuse_threads("my_sim")


def test_no_process_can_shorten_or_lengthen_the_memory_of_others() -> None:
    descriptor = make_memory_file("test", 3 * mmap.PAGESIZE)
    try:
        assert os.fstat(descriptor).st_size == 3 * mmap.PAGESIZE
        for size in (0, mmap.PAGESIZE, 4 * mmap.PAGESIZE):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)
        with mmap.mmap(descriptor, 0) as memory:
            memory[-1] = 7
            assert os.pread(descriptor, 1, 3 * mmap.PAGESIZE - 1) == b"\x07"
    finally:
        os.close(descriptor)


def test_a_limit_on_the_size_of_files_is_named_with_what_to_do() -> None:
    script = (
        "import resource\n"
        "from vla_rl.util.processes import make_memory_file\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "try:\n    make_memory_file('test', 1 << 20)\nexcept OSError as error:\n    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == (
        "[Errno 27] 1048576 bytes of memory for processes to share cannot be made: the limit on the "
        "size of files is 65536 bytes and holds for them too, expected none; set `ulimit -f "
        "unlimited`\n"
    )
