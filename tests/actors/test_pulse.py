"""The counter that a child increments and its parent reads."""

import os
import signal
import subprocess
import sys
import time

from vla_rl.actors.processes.liveness import HeartbeatPage

BEATS = """
import sys
from vla_rl.actors.processes.liveness import start_heartbeat
start_heartbeat(int(sys.argv[1]))
sys.stdin.read()
"""


def until_above(pulse: HeartbeatPage, beats: int) -> int:
    """Wait for a later beat; return its number."""
    deadline = time.monotonic() + 60
    while pulse.beats <= beats:
        assert time.monotonic() < deadline, f"no beat after {beats}"
        time.sleep(0.01)
    return pulse.beats


def test_a_parent_counts_the_beats_of_its_child_until_the_child_is_stopped() -> None:
    pulse = HeartbeatPage()
    assert pulse.beats == 0
    command = [sys.executable, "-c", BEATS, str(pulse.fd)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[pulse.fd]) as child:
        try:
            os.close(pulse.fd)
            until_above(pulse, until_above(pulse, 0))
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)
            stopped_at = pulse.beats
            time.sleep(0.6)  # two beats of one that runs
            assert pulse.beats == stopped_at
            child.send_signal(signal.SIGCONT)
            until_above(pulse, stopped_at)
        finally:
            child.kill()
