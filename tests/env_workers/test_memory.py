"""How much memory a process holds, and how much is left for a new one, on a machine and in a control
group.
"""

import os
from pathlib import Path
from typing import Never

import pytest

from vla_rl.env_workers import process
from vla_rl.env_workers.process import available_mb, holds_more_than, private_mb

MIB = 2**20


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group that uses 250 MiB, of which 44 are cached files and the like.

    Its test writes the limit.
    """
    monkeypatch.setattr("vla_rl.env_workers.process._CGROUP", tmp_path)
    sizes = {
        "anon": 190,
        "file": 45,  # what tmpfs holds of it cannot be given up
        "shmem": 5,
        "inactive_anon": 3,
        "inactive_file": 32,
        "active_file": 8,
        "slab_reclaimable": 4,
        "slab_unreclaimable": 2,
    }
    (tmp_path / "memory.stat").write_text(
        "".join(f"{name} {size * MIB}\n" for name, size in sizes.items())
    )
    (tmp_path / "memory.current").write_text(f"{250 * MIB}\n")
    return tmp_path


def test_a_control_group_has_what_its_limit_leaves_and_what_the_kernel_can_reclaim(
    cgroup: Path,
) -> None:
    (cgroup / "memory.max").write_text(f"{256 * MIB}\n")
    assert available_mb() == 6 + 32 + 8 + 4


@pytest.mark.parametrize("limit", ["max", str(2**60), None])
def test_without_a_limit_that_counts_it_is_what_the_machine_has(
    cgroup: Path, limit: str | None
) -> None:
    if limit is not None:
        (cgroup / "memory.max").write_text(limit)
    total = next(
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal:")
    )
    assert 50 < available_mb() <= int(total.split()[1]) / 1024


def test_a_process_holds_more_than_a_limit_below_its_own_memory() -> None:
    own = private_mb(os.getpid())
    assert holds_more_than(os.getpid(), own / 2)
    assert not holds_more_than(os.getpid(), own * 100)


def test_shared_memory_does_not_count() -> None:
    pid = os.fork()
    if pid == 0:  # everything of the child is shared with this process, or nearly
        os.kill(os.getpid(), 19)
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    try:
        limit = private_mb(pid) + 1.0
        assert not holds_more_than(pid, limit)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_the_pages_of_a_small_process_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> Never:
        raise AssertionError("counted")

    monkeypatch.setattr(process, "private_mb", refuse)
    assert not holds_more_than(os.getpid(), 1e6)
    with pytest.raises(AssertionError, match="counted"):
        holds_more_than(os.getpid(), 0.001)


def test_an_ended_process_holds_nothing() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert not holds_more_than(pid, 0.0)
