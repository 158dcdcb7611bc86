"""One call as its call runner reads, forks, bounds and ends it, with everything below it.

A call runs in a program of its own here: one that forks, as a call runner does, has no threads.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from processes import is_gone, said_by

from vla_rl.sandbox import linux
from vla_rl.sandbox.linux import (
    disk_used,
    get_descendants,
    holds_more_memory,
    kill_descendants,
    kill_tree,
    memory_held,
)
from vla_rl.sandbox.protocol import (
    Cancel,
    FunctionCall,
    Import,
    ProcessLimits,
    Request,
    Unframer,
    frame,
)

UNISOLATED = """
import errno, select, sys
from pathlib import Path
from vla_rl.sandbox import isolation, running_call as running
from vla_rl.sandbox.protocol import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

def refused(*arguments, **options):
    raise OSError(errno.ENOSPC, "none left")

folder, name, means = sys.argv[1:4]
setattr(isolation, name, refused)
call = ProgramCall(0, f"open({folder + '/ran'!r}, 'w')", "", ProcessLimits(network=False))
running_call = running.RunningCall(call, Path(folder), frozenset([means]))
select.select([running_call.pidfd], [], [])
ended = running_call.reap()
print(ended.fault, "|", ended.words)
"""

MESSAGES = [
    Import("math"),
    FunctionCall(1, "math:sqrt", {"x": 4.0}, ProcessLimits(timeout_s=1.0)),
    Cancel(1),
]


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("fork_first_process", "namespaces"),
        ("confine_writing", "landlock"),
        ("refuse_calls", "seccomp"),
    ],
)
def test_a_call_that_lacks_what_others_have_is_not_run(
    name: str, means: str, tmp_path: Path
) -> None:
    words = f"it was not run, as the kernel did not isolate it this time ({means}: none left)"
    assert said_by(UNISOLATED, tmp_path, name, means) == f"not_isolated | {words}\n"
    assert not list(tmp_path.iterdir())


NOBODY_LOOKS_AT_THE_CLOCK = """
import select, sys
from pathlib import Path
from vla_rl.sandbox import running_call as running
from vla_rl.sandbox.protocol import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

call = ProgramCall(0, "while True: pass", "", ProcessLimits(timeout_s=0.5))
busy = running.RunningCall(call, Path(sys.argv[1]), frozenset())
select.select([busy.pidfd], [], [])
ended = busy.reap()
print(ended.fault, "|", ended.words)
"""


def test_a_busy_loop_ends_by_the_clock_also_where_the_kernel_is_first_to_end_it(
    tmp_path: Path,
) -> None:
    assert (
        said_by(NOBODY_LOOKS_AT_THE_CLOCK, tmp_path) == "timed_out | it took longer than 0.5 s "
        "and was stopped\n"
    )


KILLED_BY_SOMEBODY = """
import os, select, sys, types
from pathlib import Path
from vla_rl.sandbox import running_call as running
from vla_rl.sandbox.protocol import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

folder, number, cpu_s, timeout_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
wait4 = os.wait4
os.wait4 = lambda pid, options: (*wait4(pid, options)[:2], types.SimpleNamespace(ru_utime=cpu_s, ru_stime=0.0))
program = f"import os; os.kill(os.getpid(), {number})"
limits = ProcessLimits(timeout_s=timeout_s, cpu_s=1)
call = running.RunningCall(ProgramCall(0, program, "", limits), folder, frozenset())
select.select([call.pidfd], [], [])
ended = call.reap()
print(ended.fault, "|", ended.words)
"""


@pytest.mark.parametrize(
    ("number", "cpu_s", "timeout_s", "told"),
    [
        (
            signal.SIGKILL,
            0.69,
            1000.0,
            "timed_out | it took longer than 1 s of CPU time and was stopped",
        ),
        (
            signal.SIGKILL,
            0.05,
            1000.0,
            "died | its process was killed by SIGKILL; its limit is 2048 MiB of memory",
        ),
        (signal.SIGKILL, 0.05, 1e-6, "timed_out | it took longer than 1e-06 s and was stopped"),
        (
            signal.SIGSEGV,
            1.0,
            1e-6,
            "died | its process was killed by SIGSEGV; its limit is 2048 MiB of memory",
        ),
    ],
)
def test_who_was_killed_by_the_kernel_is_told_why(
    number: int, cpu_s: float, timeout_s: float, told: str, tmp_path: Path
) -> None:
    """The kernel counts CPU time in ticks, and may find a second of it where there were 0.7."""
    assert said_by(KILLED_BY_SOMEBODY, tmp_path, int(number), cpu_s, timeout_s) == f"{told}\n"


NOBODY_LOOKS_FOR_A_WHILE = """
import select, sys
from pathlib import Path
from vla_rl.sandbox import running_call as running
from vla_rl.sandbox.protocol import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

call = running.RunningCall(ProgramCall(0, "print(5)", "", ProcessLimits()), Path(sys.argv[1]), frozenset())
select.select([call.pidfd], [], [])
call.enforce_limits(call.deadline + 1.0)
ended = call.reap()
print(ended.fault, ended.stdout)
"""


def test_a_call_that_ended_while_its_call_runner_was_at_an_import_keeps_its_answer(
    tmp_path: Path,
) -> None:
    assert said_by(NOBODY_LOOKS_FOR_A_WHILE, tmp_path) == "None b'5\\n'\n"


ORPHANED = """
import os, select, signal, sys, time
from pathlib import Path
from vla_rl.sandbox import isolation, running_call as running
from vla_rl.sandbox.linux import become_subreaper
from vla_rl.sandbox.protocol import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

folder, means = Path(sys.argv[1]), frozenset(sys.argv[2].split())
die_with_parent = isolation.die_with_parent

def end_the_parent(pidfd):
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    select.select([pidfd], [], [])
    die_with_parent(pidfd)

isolation.die_with_parent = end_the_parent
become_subreaper()
if os.fork() == 0:
    call = ProgramCall(0, f"open({str(folder / 'ran')!r}, 'w')", "", ProcessLimits())
    running_call = running.RunningCall(call, folder, means)
    select.select([running_call.pidfd], [], [])
    os._exit(0)
try:
    while True:
        os.wait()
except ChildProcessError:
    print("ran" if (folder / "ran").exists() else "not run")
"""


@pytest.mark.parametrize("means", ["", "namespaces"])
def test_a_process_whose_call_runner_died_before_it_could_ask_to_die_with_it_does_not_run(
    means: str, tmp_path: Path
) -> None:
    assert said_by(ORPHANED, tmp_path, means) == "not run\n"


FAMILY = """
import os, sys, time
from vla_rl.sandbox.linux import become_subreaper
become_subreaper()
if os.fork() == 0:
    if os.fork() == 0:
        print("begun", flush=True)
    time.sleep(1000)
time.sleep(1000)
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int, int]]:
    """A process, its child and its grandchild, which is handed to the first if the second dies."""
    with subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        parent, grandchild = get_descendants(process.pid)
        yield process.pid, parent, grandchild
        kill_tree(process.pid)


def test_who_is_killed_and_takes_its_time_to_die_is_waited_for(
    family: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, *below = family
    kill, timers = os.kill, dict[int, threading.Timer]()

    def kill_late(pid: int, number: int) -> None:
        if number == signal.SIGKILL and pid not in timers:
            timers[pid] = threading.Timer(1.5, kill, (pid, number))
            timers[pid].start()

    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", kill_late)
        kill_descendants(pid)
    for timer in timers.values():
        timer.cancel()
    assert all(map(is_gone, below))


def test_an_orphan_of_one_that_dies_as_we_look_is_killed_too(
    family: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, parent, grandchild = family
    children_of = linux.get_children

    def too_late(pid: int) -> list[int]:
        if pid == parent and not is_gone(parent):
            os.kill(parent, signal.SIGKILL)
            while not is_gone(parent):
                time.sleep(0.001)
        return children_of(pid)

    monkeypatch.setattr(linux, "get_children", too_late)
    kill_descendants(pid)
    assert is_gone(grandchild)


MIB = 1 << 20


@contextmanager
def running(program: str, folder: Path) -> Iterator[int]:
    """A program that has said that it holds what it wants to hold."""
    command = [sys.executable, "-c", program + "\nprint('ready', flush=True)\nsys.stdin.read()"]
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process.pid


def test_files_count_once_however_many_names_they_have(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    empty = disk_used(tmp_path, [], 100)
    (tmp_path / "one").write_bytes(os.urandom(MIB))
    (tmp_path / "inside" / "two").write_bytes(os.urandom(2 * MIB))
    os.link(tmp_path / "one", tmp_path / "inside" / "again")
    assert 3 * MIB <= disk_used(tmp_path, [], 100) - empty < 4 * MIB


def test_files_that_were_removed_count_while_they_are_open(tmp_path: Path) -> None:
    program = (
        "import os, sys\nheld = open('part', 'wb', buffering=0)\nheld.write(os.urandom(1 << "
        "20))\nos.remove('part')"
    )
    with running(program, tmp_path) as pid:
        assert MIB <= disk_used(tmp_path, [pid], 100) < 2 * MIB
    assert disk_used(tmp_path, [pid], 100) == 0


def test_too_many_files_or_a_folder_too_deep_to_read_is_more_than_any_limit(tmp_path: Path) -> None:
    for number in range(11):
        (tmp_path / str(number)).touch()
    assert disk_used(tmp_path, [], 11) == 0
    assert disk_used(tmp_path, [], 10) == float("inf")
    folder_fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(50):
        os.mkdir("d" * 200, dir_fd=folder_fd)
        folder_fd, above = os.open("d" * 200, os.O_RDONLY, dir_fd=folder_fd), folder_fd
        os.close(above)
    os.close(folder_fd)
    assert disk_used(tmp_path, [], 1000) == float("inf")


def test_memory_that_a_fork_shares_counts_once(tmp_path: Path) -> None:
    program = "import os, sys, time\nheld = bytearray(b'x') * (40 << 20)\n"
    program += "for _ in range(3):\n    os.fork() or time.sleep(1000)"
    with running(program, tmp_path) as pid:
        family = [pid, *get_descendants(pid)]
        assert len(family) == 4
        assert sum(map(memory_held, family)) >= 160 * MIB
        assert not holds_more_memory(family, 100 * MIB)
        assert holds_more_memory(family, 40 * MIB)
        for child in family[1:]:
            os.kill(child, 9)


def test_shared_memory_without_a_name_counts(tmp_path: Path) -> None:
    program = (
        "import mmap, sys\nheld = mmap.mmap(-1, 40 << 20)\nfor page in range(0, 40 << 20, "
        "4096): held[page] = 1"
    )
    with running(program, tmp_path) as pid:
        assert holds_more_memory([pid], 40 * MIB)
        assert not holds_more_memory([pid], 80 * MIB)


def decoded(parts: list[bytes]) -> list[Request]:
    unframer = Unframer()
    return [
        msgspec.msgpack.decode(body, type=Request) for part in parts for body in unframer.feed(part)
    ]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_stream_in_parts_of_any_size_gives_the_messages(size: int) -> None:
    stream = b"".join(map(frame, MESSAGES))
    parts = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert decoded(parts) == MESSAGES


def test_a_message_that_is_not_complete_waits() -> None:
    unframer, sent = Unframer(), frame(Cancel(7))
    assert unframer.feed(sent[:-1]) == []
    assert unframer.feed(b"") == []
    assert len(unframer.feed(sent[-1:] + sent)) == 2


def test_a_message_of_no_bytes_is_one_too() -> None:
    assert Unframer().feed(b"\0\0\0\0") == [b""]


def test_without_a_limit_of_its_own_cpu_time_ends_after_the_clock() -> None:
    assert ProcessLimits(timeout_s=0.5).most_cpu_s == 2
    assert ProcessLimits(timeout_s=10.0).most_cpu_s == 11
    assert ProcessLimits(timeout_s=10.0, cpu_s=3).most_cpu_s == 3
