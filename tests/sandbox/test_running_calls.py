"""One call as its keeper forks it and ends it, in a program of its own: one that forks, as a keeper does, has no threads."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest


def said_by(program: str, *arguments: object) -> str:
    """What a program prints; one that fails, fails its test."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


UNISOLATED = """
import select, sys
from pathlib import Path
from vla_rl.sandbox import child, running
from vla_rl.sandbox.limits import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

child.try_isolation = lambda *, network: False
folder = sys.argv[1]
call = ProgramCall(0, f"open({folder + '/ran'!r}, 'w')", "", ProcessLimits(network=False))
running_call = running.RunningCall(call, Path(folder), can_isolate=True)
select.select([running_call.pidfd], [], [])
ended = running_call.ended()
print(ended.fault, "|", ended.words)
"""


def test_a_call_that_gets_no_namespaces_where_others_do_is_not_run(tmp_path: Path) -> None:
    assert said_by(UNISOLATED, tmp_path).startswith("not_isolated | the kernel gave it no namespaces of its own")
    assert not list(tmp_path.iterdir())


NAMESPACES_LATER = """
import sys
from vla_rl.sandbox import keeper

def try_isolation(*, network):
    with open(sys.argv[1], "a") as tries:
        tries.write(".")
        return tries.tell() > int(sys.argv[2])

keeper.try_isolation = try_isolation
print(keeper._kernel_isolates())
"""


@pytest.mark.parametrize(("num_refusals", "isolates"), [(0, True), (2, True), (100, False)])
def test_a_kernel_is_taken_for_one_that_never_isolates_only_after_several_tries(
    num_refusals: int, isolates: bool, tmp_path: Path
) -> None:
    assert said_by(NAMESPACES_LATER, tmp_path / "tries", num_refusals) == f"{isolates}\n"


NOBODY_LOOKS_AT_THE_CLOCK = """
import select, sys
from pathlib import Path
from vla_rl.sandbox import running
from vla_rl.sandbox.limits import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

call = ProgramCall(0, "while True: pass", "", ProcessLimits(timeout_s=0.5))
busy = running.RunningCall(call, Path(sys.argv[1]), can_isolate=False)
select.select([busy.pidfd], [], [])
ended = busy.ended()
print(ended.fault, "|", ended.words)
"""


def test_a_busy_loop_ends_by_the_clock_also_where_the_kernel_is_first_to_end_it(tmp_path: Path) -> None:
    assert said_by(NOBODY_LOOKS_AT_THE_CLOCK, tmp_path) == "timed_out | it took longer than 0.5 s and was stopped\n"


KILLED_BY_SOMEBODY = """
import os, select, sys, types
from pathlib import Path
from vla_rl.sandbox import running
from vla_rl.sandbox.limits import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

folder, number, cpu_s, timeout_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
wait4 = os.wait4
os.wait4 = lambda pid, options: (*wait4(pid, options)[:2], types.SimpleNamespace(ru_utime=cpu_s, ru_stime=0.0))
program = f"import os; os.kill(os.getpid(), {number})"
limits = ProcessLimits(timeout_s=timeout_s, cpu_s=1)
call = running.RunningCall(ProgramCall(0, program, "", limits), folder, can_isolate=False)
select.select([call.pidfd], [], [])
ended = call.ended()
print(ended.fault, "|", ended.words)
"""


@pytest.mark.parametrize(
    ("number", "cpu_s", "timeout_s", "told"),
    [
        (signal.SIGKILL, 0.69, 1000.0, "timed_out | it took longer than 1 s of CPU time and was stopped"),
        (signal.SIGKILL, 0.05, 1000.0, "died | its process was killed by SIGKILL; its limit is 2048 MiB of memory"),
        (signal.SIGKILL, 0.05, 1e-6, "timed_out | it took longer than 1e-06 s and was stopped"),
        (signal.SIGSEGV, 1.0, 1e-6, "died | its process was killed by SIGSEGV; its limit is 2048 MiB of memory"),
    ],
)
def test_who_was_killed_by_the_kernel_is_told_why(
    number: int, cpu_s: float, timeout_s: float, told: str, tmp_path: Path
) -> None:
    """The kernel counts CPU time in ticks, and may find a second of it where there were 0.7."""
    assert said_by(KILLED_BY_SOMEBODY, tmp_path, int(number), cpu_s, timeout_s) == f"{told}\n"


NOBODY_LOOKS_FOR_A_WHILE = """
import select, sys
from pathlib import Path
from vla_rl.sandbox import running
from vla_rl.sandbox.limits import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

call = running.RunningCall(ProgramCall(0, "print(5)", "", ProcessLimits()), Path(sys.argv[1]), can_isolate=False)
select.select([call.pidfd], [], [])
call.check(call.deadline + 1.0)
ended = call.ended()
print(ended.fault, ended.stdout)
"""


def test_a_call_that_ended_while_its_keeper_was_at_an_import_keeps_its_answer(tmp_path: Path) -> None:
    assert said_by(NOBODY_LOOKS_FOR_A_WHILE, tmp_path) == "None b'5\\n'\n"


ORPHANED = """
import os, select, signal, sys, time
from pathlib import Path
from vla_rl.sandbox import child, running
from vla_rl.sandbox.descendants import become_subreaper
from vla_rl.sandbox.limits import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

folder, who = Path(sys.argv[1]), sys.argv[2]
fork, fork_as_first_process = os.fork, child._fork_as_first_process

def end_the_keeper():
    keeper = os.getppid()
    os.kill(keeper, signal.SIGKILL)
    while os.getppid() == keeper:
        time.sleep(0.001)

def fork_and_end():
    reading, writing = os.pipe()
    if fork():
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(writing)
    os.read(reading, 1)  # until the other closed it by its end
    time.sleep(0.1)
    return 0

def orphan_the_first_process():
    os.fork = fork_and_end
    fork_as_first_process()

if who == "keeper":
    child.become_subreaper = end_the_keeper
else:
    child._fork_as_first_process = orphan_the_first_process
become_subreaper()
if fork() == 0:
    call = ProgramCall(0, f"open({str(folder / 'ran')!r}, 'w')", "", ProcessLimits())
    running_call = running.RunningCall(call, folder, can_isolate=who != "keeper")
    select.select([running_call.pidfd], [], [])
    os._exit(0)
try:
    while True:
        os.wait()
except ChildProcessError:
    print("ran" if (folder / "ran").exists() else "not run")
"""


@pytest.mark.parametrize("who", ["keeper", "parent of the first process"])
def test_a_process_whose_parent_died_before_it_could_ask_to_die_with_it_does_not_run(who: str, tmp_path: Path) -> None:
    assert said_by(ORPHANED, tmp_path, who) == "not run\n"
