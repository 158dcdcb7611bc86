"""States of processes, as the observer reads them from the kernel."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from vla_rl.actors.processes.liveness import ProcessReader, ProcessState, find_stopped

PTRACE_ATTACH, PTRACE_DETACH = 16, 17


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield process
        process.kill()


def until(eye: ProcessReader, state: ProcessState) -> None:
    """Look until that is seen; the first looks may meet a process that is still starting."""
    for _ in range(3000):
        if eye.look() is state:
            return
        time.sleep(0.01)
    pytest.fail(f"{eye.look()}, expected {state}")


def test_a_process_that_waits_is_asleep_and_one_that_a_signal_stopped_is_stopped(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    eye = ProcessReader(sleeper.pid)
    until(eye, ProcessState.ASLEEP)
    os.kill(sleeper.pid, signal.SIGSTOP)
    until(eye, ProcessState.STOPPED)
    os.kill(sleeper.pid, signal.SIGCONT)
    until(eye, ProcessState.ASLEEP)


def test_a_process_that_computes_is_running_although_it_seldom_has_a_core() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        eye = ProcessReader(process.pid)
        try:
            assert {eye.look() for _ in range(200)} == {ProcessState.RUNNING}
        finally:
            process.kill()


def test_a_process_whose_second_thread_computes_is_running() -> None:
    program = (
        "import threading; threading.Thread(target=lambda: [0 for _ in iter(int, "
        "1)]).start(); print(flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        eye = ProcessReader(process.pid)
        try:
            assert {eye.look() for _ in range(100)} == {ProcessState.RUNNING}
        finally:
            process.kill()


def test_a_process_that_a_debugger_holds_is_not_called_stopped(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    if ptrace(PTRACE_ATTACH, sleeper.pid, None, None) != 0:
        pytest.skip(f"no debugger may attach here: {os.strerror(ctypes.get_errno())}")
    eye = ProcessReader(sleeper.pid)
    until(eye, ProcessState.TRACED)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    ptrace(PTRACE_DETACH, sleeper.pid, None, None)
    until(eye, ProcessState.ASLEEP)


def test_a_process_that_is_gone_is_not_called_frozen(sleeper: "subprocess.Popen[bytes]") -> None:
    eye = ProcessReader(sleeper.pid)
    until(eye, ProcessState.ASLEEP)
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)  # ended, and not reaped yet
    assert eye.look() is ProcessState.RUNNING
    sleeper.wait()
    assert eye.look() is ProcessState.RUNNING


def test_the_stopped_one_of_several_processes_is_found_whatever_it_calls_itself() -> None:
    program = "open('/proc/self/comm', 'w').write('a) R (b'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert find_stopped([os.getpid(), process.pid]) is None
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert find_stopped([os.getpid(), process.pid]) == process.pid
        process.kill()
    assert find_stopped([process.pid]) is None


def test_a_process_that_a_debugger_holds_is_not_found_as_stopped(
    sleeper: "subprocess.Popen[bytes]",
) -> None:
    libc = ctypes.CDLL(None)
    assert libc.ptrace(PTRACE_ATTACH, sleeper.pid, 0, 0) == 0
    os.waitpid(sleeper.pid, os.WUNTRACED)
    try:
        assert find_stopped([sleeper.pid]) is None
    finally:
        libc.ptrace(PTRACE_DETACH, sleeper.pid, 0, 0)
