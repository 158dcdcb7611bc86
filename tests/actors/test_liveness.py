"""A process is frozen, or it is not: by its beat, by its state, by the time that was seen."""

import ctypes
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, strategies as st

from vla_rl.actors.processes.liveness import (
    FreezeDetector,
    HeartbeatPage,
    ObservedTime,
    ProcessReader,
    ProcessState,
    Verdict,
    find_stopped,
)

LOOK_EVERY_S = 0.5
STOPPED_AFTER_S, SILENT_AFTER_S = 2.0, 10.0
MOST_COUNTED_S = 2 * LOOK_EVERY_S

states = st.sampled_from(ProcessState)
quiet_states = st.sampled_from([ProcessState.STOPPED, ProcessState.ASLEEP])
gaps = st.floats(0.0, 1e6)


def heartbeat() -> FreezeDetector:
    return FreezeDetector(
        look_every_s=LOOK_EVERY_S, stopped_after_s=STOPPED_AFTER_S, silent_after_s=SILENT_AFTER_S
    )


def verdicts(
    *, seconds: float, state: ProcessState, every_s: float = LOOK_EVERY_S
) -> list[Verdict]:
    """Looks at a process that beats no more, from its last beat on."""
    heart = heartbeat()
    return [
        heart.observe(number * every_s, 1, state) for number in range(int(seconds / every_s) + 1)
    ]


def test_a_stopped_process_is_frozen_when_it_was_seen_so_for_long_enough() -> None:
    seen = verdicts(seconds=2.0, state=ProcessState.STOPPED)
    assert seen == [Verdict.ALIVE, Verdict.QUIET, Verdict.QUIET, Verdict.QUIET, Verdict.STOPPED]


def test_a_process_that_sleeps_without_a_beat_has_longer() -> None:
    seen = verdicts(seconds=10.0, state=ProcessState.ASLEEP)
    assert seen[:-1] == [Verdict.ALIVE] + 19 * [Verdict.QUIET]
    assert seen[-1] is Verdict.SILENT


def test_a_process_without_a_beat_of_its_own_is_frozen_only_where_it_is_stopped() -> None:
    heart = FreezeDetector(look_every_s=0.5, stopped_after_s=2.0)
    asleep = [heart.observe(number * 0.5, 0, ProcessState.ASLEEP) for number in range(1000)]
    assert not any(verdict.is_frozen for verdict in asleep)
    stopped = [heart.observe(500.0 + number * 0.5, 0, ProcessState.STOPPED) for number in range(4)]
    assert stopped[-1] is Verdict.STOPPED


@pytest.mark.parametrize("state", [ProcessState.RUNNING, ProcessState.TRACED])
def test_a_process_that_works_or_is_debugged_is_never_frozen(state: ProcessState) -> None:
    assert not any(verdict.is_frozen for verdict in verdicts(seconds=3600.0, state=state))


def test_a_process_that_stops_and_goes_on_again_and_again_is_not_frozen() -> None:
    heart = heartbeat()
    for number in range(1000):  # such as one whose CPU time somebody limits with signals
        state = ProcessState.STOPPED if number % 4 else ProcessState.RUNNING
        assert not heart.observe(number * 0.5, number // 8, state).is_frozen


def test_one_look_after_a_long_absence_of_the_observer_freezes_nothing() -> None:
    heart = heartbeat()
    heart.observe(0.0, 1, ProcessState.RUNNING)
    assert heart.observe(3600.0, 1, ProcessState.STOPPED) is Verdict.QUIET
    assert heart.stopped_s == MOST_COUNTED_S


@given(st.lists(st.tuples(gaps, states), max_size=50))
def test_a_process_that_beats_between_any_two_looks_is_alive(
    looks: list[tuple[float, ProcessState]],
) -> None:
    heart, now = heartbeat(), 0.0
    for beat, (gap, state) in enumerate(looks):
        now += gap
        assert heart.observe(now, beat, state) is Verdict.ALIVE


@given(st.lists(st.tuples(gaps, states), min_size=1, max_size=60))
def test_no_process_is_frozen_in_fewer_looks_than_the_limit_holds_however_late_they_come(
    looks: list[tuple[float, ProcessState]],
) -> None:
    heart, now, without_a_beat = heartbeat(), 0.0, 0
    heart.observe(now, 1, ProcessState.RUNNING)
    for gap, state in looks:
        now, without_a_beat = now + gap, without_a_beat + 1
        verdict = heart.observe(now, 1, state)
        if verdict is Verdict.STOPPED:
            assert without_a_beat >= STOPPED_AFTER_S / MOST_COUNTED_S
            return
        if verdict is Verdict.SILENT:
            assert without_a_beat >= SILENT_AFTER_S / MOST_COUNTED_S
            return


@given(st.lists(st.floats(0.0, MOST_COUNTED_S), min_size=1, max_size=200), quiet_states)
def test_a_process_that_stands_still_is_frozen_in_time_by_an_observer_that_looks(
    looks: list[float], state: ProcessState
) -> None:
    heart = heartbeat()
    heart.observe(0.0, 1, ProcessState.RUNNING)
    limit = STOPPED_AFTER_S if state is ProcessState.STOPPED else SILENT_AFTER_S
    for now in itertools.accumulate(looks):
        assert heart.observe(now, 1, state).is_frozen == (heart.silent_s >= limit)
        assert math.isclose(heart.silent_s, now, abs_tol=1e-9)


@given(st.lists(st.tuples(gaps, states, st.booleans()), max_size=60))
def test_what_was_counted_is_never_more_than_what_the_observer_saw(
    looks: list[tuple[float, ProcessState, bool]],
) -> None:
    heart, now, beat = heartbeat(), 0.0, 0
    heart.observe(now, beat, ProcessState.RUNNING)
    for gap, state, has_beaten in looks:
        now, beat = now + gap, beat + has_beaten
        before = heart.silent_s
        heart.observe(now, beat, state)
        assert 0.0 <= heart.stopped_s <= heart.silent_s <= before + min(gap, MOST_COUNTED_S) + 1e-9


def test_the_time_that_an_observer_missed_does_not_pass() -> None:
    time = ObservedTime(LOOK_EVERY_S)
    assert [time.pass_time(now) for now in (5.0, 5.25, 605.25, 605.5)] == [
        0.0,
        0.25,
        MOST_COUNTED_S,
        0.25,
    ]
    assert time.total_s == 0.5 + MOST_COUNTED_S


def test_a_starved_observer_needs_several_looks() -> None:
    heart = heartbeat()
    heart.observe(0.0, 0, ProcessState.RUNNING)
    seen = [heart.observe(now, 0, ProcessState.STOPPED) for now in (40.0, 80.0)]
    assert seen == [Verdict.QUIET, Verdict.STOPPED]


PTRACE_ATTACH, PTRACE_DETACH = 16, 17


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "3600"]) as process:
        yield process
        process.kill()


def until(eye: ProcessReader, state: ProcessState) -> None:
    """Look until that is seen; the first looks may meet a process that is still starting."""
    for _ in range(3000):
        if eye.read_state() is state:
            return
        time.sleep(0.01)
    pytest.fail(f"{eye.read_state()}, expected {state}")


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
            assert {eye.read_state() for _ in range(200)} == {ProcessState.RUNNING}
        finally:
            process.kill()


COMPUTES_IN_A_THREAD = """
import threading
import time

def compute():
    while time.process_time() < 0.3:  # until the first thread waits for this one and hands nothing over
        pass
    print(flush=True)
    while True:
        pass

threading.Thread(target=compute).start()
"""


def test_a_process_whose_second_thread_computes_is_running() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMPUTES_IN_A_THREAD], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        eye = ProcessReader(process.pid)
        try:
            assert {eye.read_state() for _ in range(100)} == {ProcessState.RUNNING}
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
    assert eye.read_state() is ProcessState.RUNNING
    sleeper.wait()
    assert eye.read_state() is ProcessState.RUNNING


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


BEATS = """
import sys
from vla_rl.actors.processes.liveness import start_heartbeat
start_heartbeat(int(sys.argv[1]))
sys.stdin.read()
"""


def until_above(heartbeat: HeartbeatPage, beats: int) -> int:
    """Wait for a later beat; return its number."""
    deadline = time.monotonic() + 60
    while heartbeat.beats <= beats:
        assert time.monotonic() < deadline, f"no beat after {beats}"
        time.sleep(0.01)
    return heartbeat.beats


def test_a_parent_counts_the_beats_of_its_child_until_the_child_is_stopped() -> None:
    heartbeat = HeartbeatPage()
    assert heartbeat.beats == 0
    command = [sys.executable, "-c", BEATS, str(heartbeat.fd)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[heartbeat.fd]) as child:
        try:
            os.close(heartbeat.fd)
            until_above(heartbeat, until_above(heartbeat, 0))
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            stopped_at = heartbeat.beats
            time.sleep(0.6)  # two beats of one that runs
            assert heartbeat.beats == stopped_at
            child.send_signal(signal.SIGCONT)
            until_above(heartbeat, stopped_at)
        finally:
            child.kill()
