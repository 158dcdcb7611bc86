"""A process that was stopped by a signal is noticed, and none is taken for stopped because its observer was."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from vla_rl.sandbox.descendants import state_of
from vla_rl.sandbox.stopped import StoppedProcesses


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process.pid
        process.kill()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while state_of(pid) != "T":
        pass


def resume(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
    while state_of(pid) == "T":
        pass


def test_a_process_that_stays_stopped_is_noticed_within_two_and_a_half_seconds(pid: int) -> None:
    looks = StoppedProcesses()
    assert not looks.look([pid], 0.0)
    stop(pid)
    assert [looks.look([os.getpid(), pid], now) for now in (0.5, 1.0, 1.5, 2.0)] == [False, False, False, True]


def test_a_process_that_goes_on_in_between_is_not_stopped(pid: int) -> None:
    looks = StoppedProcesses()
    looks.look([pid], 0.0)
    stop(pid)
    assert not any(looks.look([pid], now) for now in (0.5, 1.0, 1.5))
    resume(pid)
    assert not looks.look([pid], 2.0)
    stop(pid)
    assert not looks.look([pid], 2.5)


def test_an_observer_that_was_held_up_begins_again(pid: int) -> None:
    """It and what it observes were stopped together for an hour; it goes on first."""
    looks = StoppedProcesses()
    looks.look([pid], 0.0)
    stop(pid)
    assert not any(looks.look([pid], now) for now in (0.5, 1.0, 1.5, 3601.5, 3602.0, 3602.5, 3603.0))
    assert looks.look([pid], 3603.5)


def test_a_process_that_is_gone_is_not_stopped() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    looks = StoppedProcesses()
    assert not any(looks.look([process.pid], now / 2) for now in range(10))
