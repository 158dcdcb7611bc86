"""Whatever a sandboxed function or program does, the call comes back and says so."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from pace import at_some_pace

from vla_rl.errors import ConfigError
from vla_rl.sandbox import CallResult, ProcessLimits, Sandbox, SandboxConfig, descendants, function_path, keeper_process
from vla_rl.sandbox import sandbox as sandbox_module
from vla_rl.sandbox.descendants import descendants_of, kill_all_below, kill_with_all_below
from vla_rl.sandbox.keeper_process import KeeperProcess
from vla_rl.sandbox.protocol import Ended


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    async with asyncio.timeout(110), Sandbox() as sandbox:
        yield sandbox


def children_of_keeper(sandbox: Sandbox) -> list[int]:
    assert sandbox.keeper_pid is not None
    return descendants_of(sandbox.keeper_pid)


async def until(is_so: Callable[[], bool]) -> None:
    """Other processes tell nobody when they begin or end."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def said_by(program: str, *arguments: object) -> str:
    """What a program of its own prints: one that forks, as a keeper does, has no threads."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_gone(pid: int) -> bool:
    """Dead; somebody else may have to reap it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_function_is_called_with_values_and_gives_one_back(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:add", {"left": 2, "right": 3})
    assert (result.value, result.fault) == (5, None)


async def test_what_a_function_raises_is_told_in_words(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:raises")
    assert (result.fault, result.text) == ("raised", "ValueError: seven is no colour")
    left = await sandbox.call("misbehaving:asks_to_exit")
    assert (left.fault, left.text) == ("raised", "SystemExit: enough")


async def test_what_cannot_be_sent_is_told_in_words(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:add", {"left": 10**30, "right": 1})
    assert (result.fault, result.text[:28]) == ("raised", "its arguments cannot be sent")
    program = await sandbox.run_program("print('\ud800')")
    assert (program.fault, program.text[:26]) == ("raised", "the program cannot be sent")


async def test_many_calls_at_a_time_each_have_their_own_streams() -> None:
    programs = [f"import time; time.sleep(1.5); print({number})" for number in range(30)]
    limits = ProcessLimits(timeout_s=60.0, network=False)
    async with asyncio.timeout(100), Sandbox(SandboxConfig(max_calls=32)) as sandbox:
        results = await asyncio.gather(*(sandbox.run_program(program, limits=limits) for program in programs))
    assert [(result.fault, result.stdout) for result in results] == [(None, f"{number}\n") for number in range(30)]


async def test_a_module_or_function_that_is_not_there_is_told(sandbox: Sandbox) -> None:
    assert (await sandbox.call("no_such_module:f")).text == "ModuleNotFoundError: No module named 'no_such_module'"
    assert "AttributeError" in (await sandbox.call("misbehaving:no_such_function")).text


async def test_a_hung_function_is_killed_at_its_deadline_and_others_go_on(sandbox: Sandbox) -> None:
    async def at(scale: float) -> None:
        hung = asyncio.create_task(sandbox.call("misbehaving:hangs", {}, ProcessLimits(timeout_s=scale)))
        answer = await sandbox.call("misbehaving:add", {"left": 1, "right": 1})
        was_hung, result = not hung.done(), await hung
        assert (answer.value, was_hung) == (2, True)
        assert (result.fault, result.text) == ("timed_out", f"it took longer than {scale:g} s and was stopped")
        assert children_of_keeper(sandbox) == []

    await at_some_pace(at)


async def test_a_gigabyte_of_output_is_cut_off_and_its_beginning_kept(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:prints_a_gigabyte", {}, ProcessLimits(output_kb=8))
    assert result.fault == "printed_too_much"
    assert result.stdout == "x" * 8192
    assert result.text == "it printed more than 8 KiB and was stopped"


async def test_an_answer_that_is_too_large_is_a_fault_too(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:returns_a_lot")
    assert (result.fault, result.text) == ("printed_too_much", "it returned more than 1024 KiB and was stopped")


async def test_output_that_is_no_text_is_replaced(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:prints_bytes_that_are_no_text")
    assert (result.value, result.stdout) == ("done", "�� fine")


async def test_an_answer_that_no_message_can_have_is_an_error(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:returns_something_strange")
    assert result.fault == "raised"
    assert "object" in result.text


async def test_a_function_that_forks_without_end_is_stopped_early(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:forks_without_end", {}, ProcessLimits(timeout_s=30.0, max_processes=8))
    assert result.fault in ("raised", "too_many_processes")
    assert len(children_of_keeper(sandbox)) == 0


async def test_a_call_may_have_as_many_processes_as_it_is_told(sandbox: Sandbox) -> None:
    limits = ProcessLimits(max_processes=4)
    within = await sandbox.call("misbehaving:forks", {"times": 3}, limits)
    assert (within.value, within.fault) == (4, None)
    beyond = await sandbox.call("misbehaving:forks", {"times": 4, "seconds": 100.0}, limits)
    assert beyond.fault in ("raised", "too_many_processes")


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


@pytest.mark.parametrize(("num_refusals", "fault"), [(2, None), (100, "not_isolated")])
async def test_a_call_that_was_not_isolated_is_tried_again_for_a_while(
    num_refusals: int, fault: str | None, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, asked = KeeperProcess.answer, list[int]()

    async def refused(keeper: KeeperProcess, number: int, message: bytes, within_s: float) -> Ended:
        asked.append(number)
        ended = await answer(keeper, number, message, within_s)
        return msgspec.structs.replace(ended, fault="not_isolated") if len(asked) <= num_refusals else ended

    monkeypatch.setattr(KeeperProcess, "answer", refused)
    monkeypatch.setattr(sandbox_module, "RETRIES_AFTER_S", (0.0, 0.0, 0.0))
    result = await sandbox.run_program("print(5)")
    assert (result.fault, result.stdout, len(asked)) == (fault, "5\n", min(num_refusals + 1, 4))


async def test_what_a_call_left_behind_is_killed_with_it(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:leaves_a_process_behind", {"seconds": 7654.25})
    assert result.fault is None
    assert children_of_keeper(sandbox) == []
    assert not [process for process in psutil.process_iter(["cmdline"]) if "7654.25" in (process.info["cmdline"] or [])]


async def test_memory_files_and_exit_codes_have_limits_or_names(sandbox: Sandbox) -> None:
    assert (await sandbox.call("misbehaving:eats_memory", {}, ProcessLimits(memory_mb=512))).text == "MemoryError: "
    too_large = await sandbox.call("misbehaving:fills_a_file", {"megabytes": 4}, ProcessLimits(file_mb=2))
    assert "File too large" in too_large.text
    assert (await sandbox.call("misbehaving:fills_a_file", {"megabytes": 4})).value == "written"
    assert (await sandbox.call("misbehaving:exits", {"code": 7})).text == "its process ended with exit code 7"


async def test_a_function_works_in_a_folder_of_its_own_that_is_gone_afterwards(sandbox: Sandbox) -> None:
    first, files = (await sandbox.call("misbehaving:folder")).value
    second, _ = (await sandbox.call("misbehaving:folder")).value
    assert first != second
    assert files == ["stdin"]
    assert not os.path.exists(first)  # noqa: ASYNC240


async def test_secrets_of_our_environment_stay_here(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    seen = (await sandbox.call("misbehaving:environment")).value
    assert "HF_TOKEN" not in seen
    assert "PATH" in seen


async def test_what_is_asked_for_is_in_the_environment() -> None:
    async with Sandbox(SandboxConfig(environment={"SEARCH_KEY": "42"})) as sandbox:
        assert (await sandbox.call("misbehaving:environment")).value["SEARCH_KEY"] == "42"


async def test_no_other_process_can_be_killed_from_inside(sandbox: Sandbox) -> None:
    look = "import os\nif os.getpid() != 1:\n    raise SystemExit('not isolated')\n"
    result = await sandbox.run_program(
        look + "try:\n    os.kill(-1, 9)\nexcept ProcessLookupError:\n    print('nobody is there')"
    )
    if "not isolated" in result.text:
        pytest.skip("this kernel gives no namespaces to us")
    assert result.stdout == "nobody is there\n"


async def test_a_program_reads_its_input_and_says_how_it_ended(sandbox: Sandbox) -> None:
    assert (await sandbox.run_program("print(int(input()) * 2)", "21\n")).stdout == "42\n"
    failed = await sandbox.run_program("raise KeyError('x')")
    assert (failed.fault, failed.text) == ("died", "its process ended with exit code 1: KeyError: 'x'")


async def test_a_program_has_no_network(sandbox: Sandbox) -> None:
    program = "import socket\nprint(socket.create_connection(('127.0.0.1', 9), timeout=1))"
    result = await sandbox.run_program(program)
    if not result.is_offline:
        pytest.skip("this kernel gives no namespaces to us")
    assert "Network is unreachable" in result.text or "Connection refused" in result.text
    listed = await sandbox.run_program("import socket\nprint([name for _, name in socket.if_nameindex()])")
    assert listed.stdout == "['lo']\n"


async def test_cpu_time_is_limited_as_well(sandbox: Sandbox) -> None:
    result = await sandbox.run_program("while True: pass", "", ProcessLimits(timeout_s=100.0, cpu_s=1))
    assert (result.fault, result.text) == ("timed_out", "it took longer than 1 s of CPU time and was stopped")


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


async def test_a_cancelled_call_ends_its_process(sandbox: Sandbox) -> None:
    task = asyncio.create_task(sandbox.call("misbehaving:sleeps", {"seconds": 1000.0}, ProcessLimits(timeout_s=1000.0)))
    await until(lambda: sandbox.keeper_pid is not None and bool(children_of_keeper(sandbox)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not children_of_keeper(sandbox))


async def test_calls_beyond_the_limit_wait_and_their_deadline_has_not_begun() -> None:
    async def at(scale: float) -> None:
        async with Sandbox(SandboxConfig(max_calls=1)) as sandbox:
            holder = sandbox.call("misbehaving:sleeps", {"seconds": 1.2 * scale}, ProcessLimits(timeout_s=60.0))
            waiter = sandbox.call("misbehaving:add", {"left": 1, "right": 2}, ProcessLimits(timeout_s=scale))
            assert [result.value for result in await asyncio.gather(holder, waiter)] == ["awake", 3]

    await at_some_pace(at)


async def test_faults_cost_no_place() -> None:
    async with Sandbox(SandboxConfig(max_calls=2)) as sandbox:
        for _ in range(10):
            await asyncio.gather(*(sandbox.call("misbehaving:exits", {"code": 1}) for _ in range(2)))
        assert sandbox.counts == {"died": 20}
        both = asyncio.gather(*(sandbox.call("misbehaving:sleeps", {"seconds": 0.1}) for _ in range(2)))
        assert [result.value for result in await both] == ["awake", "awake"]


async def test_a_keeper_that_dies_is_replaced_and_its_calls_are_told(sandbox: Sandbox) -> None:
    folder, _ = (await sandbox.call("misbehaving:folder")).value
    hung = asyncio.create_task(sandbox.call("misbehaving:sleeps", {"seconds": 1000.0}))
    await until(lambda: sandbox.keeper_pid is not None and bool(children_of_keeper(sandbox)))
    assert sandbox.keeper_pid is not None
    os.kill(sandbox.keeper_pid, signal.SIGKILL)
    assert (await hung).text == "the process that keeps it died"
    assert (await sandbox.call("misbehaving:add", {"left": 1, "right": 2})).value == 3
    assert not Path(folder).parent.exists()


async def stuck_keeper(sandbox: Sandbox) -> tuple["asyncio.Task[CallResult]", list[int], Path]:
    """A call of a thousand seconds, the processes behind it, and the keeper's folder; the keeper answers no more."""
    folder, _ = (await sandbox.call("misbehaving:folder")).value
    running = asyncio.create_task(
        sandbox.call("misbehaving:sleeps", {"seconds": 1000.0}, ProcessLimits(timeout_s=1000))
    )
    await until(lambda: bool(children_of_keeper(sandbox)))
    assert sandbox.keeper_pid is not None
    os.kill(sandbox.keeper_pid, signal.SIGSTOP)
    return running, [sandbox.keeper_pid, *children_of_keeper(sandbox)], Path(folder).parent


async def test_a_keeper_that_is_stuck_is_replaced_with_all_that_it_ran_and_its_calls_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with asyncio.timeout(60), Sandbox(SandboxConfig(keeper_grace_s=1.0)) as sandbox:
        running, processes, folder = await stuck_keeper(sandbox)
        call = await sandbox.call("misbehaving:add", {"left": 1, "right": 2}, ProcessLimits(timeout_s=1.5))
        assert (call.fault, call.text) == (
            "died",
            "the process that keeps it did not answer within 2.5 s and was killed",
        )
        assert await running == call
        assert all(map(is_gone, processes))
        assert not folder.exists()
        assert f"the keeper of a sandbox (pid {processes[0]}) did not answer within 2.5 s" in caplog.text
        assert (await sandbox.call("misbehaving:add", {"left": 1, "right": 2})).value == 3
        assert sandbox.counts == {"done": 2, "died": 2}


async def test_nothing_is_left_of_a_keeper_that_is_stuck_when_its_sandbox_is_closed() -> None:
    async with asyncio.timeout(60):
        async with Sandbox() as sandbox:
            running, processes, folder = await stuck_keeper(sandbox)
        assert (await running).fault == "died"
    assert all(map(is_gone, processes))
    assert not folder.exists()


async def test_a_call_that_is_cancelled_while_its_stuck_keeper_ends_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill, is_cancelled, killed = keeper_process.kill_with_all_below, threading.Event(), list[int]()

    def kill_later(pid: int) -> None:
        is_cancelled.wait(60)
        time.sleep(1.0)
        kill(pid)
        killed.append(pid)

    monkeypatch.setattr(keeper_process, "kill_with_all_below", kill_later)
    async with asyncio.timeout(100), Sandbox(SandboxConfig(keeper_grace_s=0.5)) as sandbox:
        running, processes, folder = await stuck_keeper(sandbox)
        call = asyncio.create_task(sandbox.call("misbehaving:raises", {}, ProcessLimits(timeout_s=0.5)))
        assert (await running).fault == "died"  # told as soon as the keeper is given up
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        is_cancelled.set()
        assert (await sandbox.call("misbehaving:add", {"left": 1, "right": 2})).value == 3
        assert killed == processes[:1]
        assert all(map(is_gone, processes))
        assert not folder.exists()


async def test_a_keeper_that_imports_is_not_stuck() -> None:
    async with asyncio.timeout(100), Sandbox(SandboxConfig(keeper_grace_s=5.0)) as sandbox:
        await sandbox.call("misbehaving:folder")
        hung = asyncio.create_task(sandbox.call("misbehaving:hangs", {}, ProcessLimits(timeout_s=1.0)))
        await until(lambda: bool(children_of_keeper(sandbox)))
        keeper = sandbox.keeper_pid
        assert (await sandbox.call("slow_to_import:answer", {}, ProcessLimits(timeout_s=30.0))).value == 42
        assert (await hung).fault == "timed_out"
        assert sandbox.keeper_pid == keeper


async def test_a_keeper_that_is_asked_for_an_import_in_the_last_look_is_not_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = asyncio.wait
    async with asyncio.timeout(100), Sandbox(SandboxConfig(keeper_grace_s=0.5)) as sandbox:
        await sandbox.call("misbehaving:folder")
        keeper = sandbox.keeper_pid
        assert keeper is not None

        async def look(answers: set[asyncio.Future[Ended]], timeout: float) -> object:
            found = await wait(answers, timeout=timeout)
            if timeout == keeper_process._LAST_LOOK_S:
                await sandbox.preload("colorsys")
                os.kill(keeper, signal.SIGCONT)
            return found

        monkeypatch.setattr(asyncio, "wait", look)
        os.kill(keeper, signal.SIGSTOP)
        limits = ProcessLimits(timeout_s=0.25)
        assert (await sandbox.call("misbehaving:sleeps", {"seconds": 1000.0}, limits)).fault == "timed_out"
        assert sandbox.keeper_pid == keeper


async def test_nothing_is_left_after_a_sandbox_is_closed() -> None:
    async with Sandbox() as sandbox:
        task = asyncio.create_task(
            sandbox.call("misbehaving:sleeps", {"seconds": 1000.0}, ProcessLimits(timeout_s=1000))
        )
        await until(lambda: sandbox.keeper_pid is not None and bool(children_of_keeper(sandbox)))
        keeper, children = sandbox.keeper_pid, children_of_keeper(sandbox)
        assert keeper is not None
    assert (await task).fault == "died"
    assert all(map(is_gone, (keeper, *children)))
    with pytest.raises(RuntimeError, match="not open"):
        await sandbox.call("misbehaving:raises")


def test_nothing_is_left_after_our_own_process_is_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio\nfrom vla_rl.sandbox import *\nasync def main():\n    async with Sandbox() as sandbox:\n"
        "        task = asyncio.create_task(sandbox.run_program('import time; time.sleep(4321.5)', '', "
        "ProcessLimits(timeout_s=1000)))\n"
        "        while sandbox.keeper_pid is None: await asyncio.sleep(0.01)\n"
        "        print(sandbox.keeper_pid, flush=True)\n        await task\nasyncio.run(main())"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        keeper = psutil.Process(int(process.stdout.readline()))
        assert list(tmp_path.iterdir())
        process.kill()
    psutil.wait_procs([keeper], timeout=60)
    assert not keeper.is_running()
    assert not list(tmp_path.iterdir())


FAMILY = """
import os, sys, time
from vla_rl.sandbox.descendants import become_subreaper
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
    with subprocess.Popen([sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        parent, grandchild = descendants_of(process.pid)
        yield process.pid, parent, grandchild
        kill_with_all_below(process.pid)


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
        kill_all_below(pid)
    for timer in timers.values():
        timer.cancel()
    assert all(map(is_gone, below))


def test_an_orphan_of_one_that_dies_as_we_look_is_killed_too(
    family: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, parent, grandchild = family
    children_of = descendants.children_of

    def too_late(pid: int) -> list[int]:
        if pid == parent and not is_gone(parent):
            os.kill(parent, signal.SIGKILL)
            while not is_gone(parent):
                time.sleep(0.001)
        return children_of(pid)

    monkeypatch.setattr(descendants, "children_of", too_late)
    kill_all_below(pid)
    assert is_gone(grandchild)


def test_a_function_that_no_other_process_can_find_is_refused() -> None:
    with pytest.raises(TypeError, match="put the function at the top of a module, or make it `async def`"):
        function_path(lambda: None)
    assert function_path(subprocess.run) == "subprocess:run"


def test_limits_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"ProcessLimits.timeout_s is 0, expected > 0 seconds"):
        ProcessLimits(timeout_s=0)
    with pytest.raises(ConfigError, match=r"ProcessLimits.max_processes is 0"):
        ProcessLimits(max_processes=0)
    with pytest.raises(ConfigError, match=r"SandboxConfig.max_calls is 0"):
        SandboxConfig(max_calls=0)
    with pytest.raises(ConfigError, match=r"SandboxConfig.keeper_grace_s is 0, expected > 0 seconds"):
        SandboxConfig(keeper_grace_s=0)
