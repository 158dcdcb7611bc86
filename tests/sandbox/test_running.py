"""One call as its call runner forks it and ends it, in a program of its own: one that forks, as a call runner
does, has no threads.
"""

import signal
from pathlib import Path

import pytest
from programs import said_by

UNISOLATED = """
import errno, select, sys
from pathlib import Path
from vla_rl.sandbox import isolation, running_call as running
from vla_rl.sandbox.protocol import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

def refused(*arguments, **options):
    raise OSError(errno.ENOSPC, "none left")

folder, name, means = sys.argv[1:4]
setattr(isolation, name, refused)
call = ProgramCall(0, f"open({folder + '/ran'!r}, 'w')", "", ProcessLimits(network=False))
running_call = running.RunningCall(call, Path(folder), frozenset([means]))
select.select([running_call.pidfd], [], [])
ended = running_call.reap()
print(ended.fault, "|", ended.words)
"""


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("fork_first_process", "namespaces"),
        ("confine_writing", "landlock"),
        ("refuse_calls", "seccomp"),
    ],
)
def test_a_call_that_lacks_what_others_have_is_not_run(
    name: str, means: str, tmp_path: Path
) -> None:
    words = f"it was not run, as the kernel did not isolate it this time ({means}: none left)"
    assert said_by(UNISOLATED, tmp_path, name, means) == f"not_isolated | {words}\n"
    assert not list(tmp_path.iterdir())


NOBODY_LOOKS_AT_THE_CLOCK = """
import select, sys
from pathlib import Path
from vla_rl.sandbox import running_call as running
from vla_rl.sandbox.protocol import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

call = ProgramCall(0, "while True: pass", "", ProcessLimits(timeout_s=0.5))
busy = running.RunningCall(call, Path(sys.argv[1]), frozenset())
select.select([busy.pidfd], [], [])
ended = busy.reap()
print(ended.fault, "|", ended.words)
"""


def test_a_busy_loop_ends_by_the_clock_also_where_the_kernel_is_first_to_end_it(
    tmp_path: Path,
) -> None:
    assert (
        said_by(NOBODY_LOOKS_AT_THE_CLOCK, tmp_path) == "timed_out | it took longer than 0.5 s "
        "and was stopped\n"
    )


KILLED_BY_SOMEBODY = """
import os, select, sys, types
from pathlib import Path
from vla_rl.sandbox import running_call as running
from vla_rl.sandbox.protocol import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

folder, number, cpu_s, timeout_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
wait4 = os.wait4
os.wait4 = lambda pid, options: (*wait4(pid, options)[:2], types.SimpleNamespace(ru_utime=cpu_s, ru_stime=0.0))
program = f"import os; os.kill(os.getpid(), {number})"
limits = ProcessLimits(timeout_s=timeout_s, cpu_s=1)
call = running.RunningCall(ProgramCall(0, program, "", limits), folder, frozenset())
select.select([call.pidfd], [], [])
ended = call.reap()
print(ended.fault, "|", ended.words)
"""


@pytest.mark.parametrize(
    ("number", "cpu_s", "timeout_s", "told"),
    [
        (
            signal.SIGKILL,
            0.69,
            1000.0,
            "timed_out | it took longer than 1 s of CPU time and was stopped",
        ),
        (
            signal.SIGKILL,
            0.05,
            1000.0,
            "died | its process was killed by SIGKILL; its limit is 2048 MiB of memory",
        ),
        (signal.SIGKILL, 0.05, 1e-6, "timed_out | it took longer than 1e-06 s and was stopped"),
        (
            signal.SIGSEGV,
            1.0,
            1e-6,
            "died | its process was killed by SIGSEGV; its limit is 2048 MiB of memory",
        ),
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
from vla_rl.sandbox import running_call as running
from vla_rl.sandbox.protocol import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

call = running.RunningCall(ProgramCall(0, "print(5)", "", ProcessLimits()), Path(sys.argv[1]), frozenset())
select.select([call.pidfd], [], [])
call.check(call.deadline + 1.0)
ended = call.reap()
print(ended.fault, ended.stdout)
"""


def test_a_call_that_ended_while_its_call_runner_was_at_an_import_keeps_its_answer(
    tmp_path: Path,
) -> None:
    assert said_by(NOBODY_LOOKS_FOR_A_WHILE, tmp_path) == "None b'5\\n'\n"


ORPHANED = """
import os, select, signal, sys, time
from pathlib import Path
from vla_rl.sandbox import isolation, running_call as running
from vla_rl.sandbox.linux import become_subreaper
from vla_rl.sandbox.protocol import ProcessLimits
from vla_rl.sandbox.protocol import ProgramCall

folder, means = Path(sys.argv[1]), frozenset(sys.argv[2].split())
die_with_parent = isolation.die_with_parent

def end_the_parent(pidfd):
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    select.select([pidfd], [], [])
    die_with_parent(pidfd)

isolation.die_with_parent = end_the_parent
become_subreaper()
if os.fork() == 0:
    call = ProgramCall(0, f"open({str(folder / 'ran')!r}, 'w')", "", ProcessLimits())
    running_call = running.RunningCall(call, folder, means)
    select.select([running_call.pidfd], [], [])
    os._exit(0)
try:
    while True:
        os.wait()
except ChildProcessError:
    print("ran" if (folder / "ran").exists() else "not run")
"""


@pytest.mark.parametrize("means", ["", "namespaces"])
def test_a_process_whose_call_runner_died_before_it_could_ask_to_die_with_it_does_not_run(
    means: str, tmp_path: Path
) -> None:
    assert said_by(ORPHANED, tmp_path, means) == "not run\n"
