"""Everything below a process is killed and waited for, whatever it does meanwhile."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from processes import is_gone

from vla_rl.sandbox import linux
from vla_rl.sandbox.linux import get_descendants, kill_descendants, kill_tree

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
