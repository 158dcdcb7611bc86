"""A process that was stopped is told from an observer that was not there to look."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

from vla_rl.engines.vllm.standstill import Standstill, is_stopped

CTRL_Z_S = 600.0


def looks(*times: float) -> Iterator[float]:
    """A quarter of a second apart from each time, five of them."""
    for start in times:
        yield from (start + number / 4 for number in range(5))


def test_a_process_that_stays_stopped_is_frozen_after_a_second_and_a_half() -> None:
    seen = Standstill()
    assert not seen.observe(0.0, is_stopped=False)
    verdicts = [seen.observe(0.25 * number, is_stopped=True) for number in range(1, 9)]
    assert verdicts == [False] * 6 + [True] * 2  # stopped since 0.25 s; frozen at 1.75 s


def test_a_process_that_is_stopped_and_resumed_again_and_again_is_not_frozen() -> None:
    seen = Standstill()
    assert not any(seen.observe(0.25 * number, is_stopped=number % 5 > 0) for number in range(200))


def test_an_observer_that_was_stopped_with_the_process_raises_no_alarm() -> None:
    seen = Standstill()
    for now in looks(0.0):
        assert not seen.observe(now, is_stopped=False)
    # `fg` resumes the whole group; the observer may see it before the last one is resumed
    assert not seen.observe(CTRL_Z_S, is_stopped=True)
    for now in looks(CTRL_Z_S + 0.25):
        assert not seen.observe(now, is_stopped=False)


def test_a_process_that_nobody_resumes_after_the_observer_was_stopped_is_frozen_all_the_same() -> None:
    seen = Standstill()
    assert not seen.observe(0.0, is_stopped=True)
    verdicts = [seen.observe(now, is_stopped=True) for now in looks(CTRL_Z_S)]
    assert verdicts == [False, False, True, True, True]  # the gap counts as 1 s


def test_an_observer_that_is_starved_needs_three_looks() -> None:
    seen = Standstill()
    assert [seen.observe(now, is_stopped=True) for now in (0.0, 40.0, 80.0)] == [False, False, True]


def test_the_time_that_the_observer_missed_does_not_pass() -> None:
    seen = Standstill()
    seen.pass_time(5.0)
    assert seen.pass_time(5.25) == 0.25
    assert seen.pass_time(5.25 + CTRL_Z_S) == 1.25
    assert seen.pass_time(5.5 + CTRL_Z_S) == 1.5


def test_a_stopped_process_is_seen_whatever_it_calls_itself() -> None:
    script = "open('/proc/self/comm', 'w').write('a) T (b'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)
