"""The end of an actor's process."""

import subprocess
import sys

import pytest

ENDING = """
import atexit, sys, threading, time
from vla_rl.actors.processes.child import end_process

class Freed:
    def __del__(self):
        print("freed", flush=True)

kept = Freed()
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
print("last words", end=" ")
{before}
end_process(3)
"""


def ended(before: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ENDING.format(before=before)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_ending_process_waits_for_threads_and_exit_functions_and_frees_nothing() -> None:
    found = ended()
    assert (found.returncode, found.stderr) == (3, "")
    assert found.stdout == "last words thread\nat exit\n"


@pytest.mark.parametrize("before", ["sys.stdout = None", "sys.stderr.close()"])
def test_a_stream_that_is_gone_does_not_keep_a_process_from_its_end(before: str) -> None:
    assert ended(before).returncode == 3
