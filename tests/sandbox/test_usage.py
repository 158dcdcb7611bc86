"""The sums that bound a call: files that have a name or had one, and memory that its processes
share.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vla_rl.sandbox.linux import disk_used, get_descendants, holds_more_memory, memory_held

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
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(50):
        os.mkdir("d" * 200, dir_fd=here)
        here, above = os.open("d" * 200, os.O_RDONLY, dir_fd=here), here
        os.close(above)
    os.close(here)
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
