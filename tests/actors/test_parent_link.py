"""A child ends with its parent, in each way in which it can be linked to it."""

import json
import subprocess
import sys

import pytest

# One program forks a child for each question, because importing the package costs more than the child.
CHILDREN = """
import json, os, signal, time
from vla_rl.actors import parent_link

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
