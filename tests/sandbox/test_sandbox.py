"""Whatever a sandboxed function or program does, the call comes back and says so."""

import asyncio
import os
import subprocess

import msgspec
import psutil
import pytest
from durations import at_some_pace

from vla_rl.sandbox import (
    ProcessLimits,
    Sandbox,
    SandboxConfig,
    function_path,
    sandbox as sandbox_module,
)
from vla_rl.sandbox.linux import get_descendants
from vla_rl.sandbox.protocol import Ended, Means
from vla_rl.sandbox.runner_process import CallRunnerProcess

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(110)]


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
        results = await asyncio.gather(
            *(sandbox.run_program(program, limits=limits) for program in programs)
        )
    assert [(result.fault, result.stdout) for result in results] == [
        (None, f"{number}\n") for number in range(30)
    ]


async def test_a_module_or_function_that_is_not_there_is_told(sandbox: Sandbox) -> None:
    assert (
        await sandbox.call("no_such_module:f")
    ).text == "ModuleNotFoundError: No module named 'no_such_module'"
    assert "AttributeError" in (await sandbox.call("misbehaving:no_such_function")).text


async def test_a_hung_function_is_killed_at_its_deadline_and_others_go_on(sandbox: Sandbox) -> None:
    async def at(scale: float) -> None:
        hung = asyncio.create_task(
            sandbox.call("misbehaving:hangs", {}, ProcessLimits(timeout_s=scale))
        )
        answer = await sandbox.call("misbehaving:add", {"left": 1, "right": 1})
        was_hung, result = not hung.done(), await hung
        assert (answer.value, was_hung) == (2, True)
        assert (result.fault, result.text) == (
            "timed_out",
            f"it took longer than {scale:g} s and was stopped",
        )
        assert sandbox.runner_pid is not None
        assert get_descendants(sandbox.runner_pid) == []

    await at_some_pace(at)


async def test_a_gigabyte_of_output_is_cut_off_and_its_beginning_kept(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:prints_a_gigabyte", {}, ProcessLimits(output_kb=8))
    assert result.fault == "printed_too_much"
    assert result.stdout == "x" * 8192
    assert result.text == "it printed more than 8 KiB and was stopped"


async def test_an_answer_that_is_too_large_is_a_fault_too(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:returns_a_lot")
    assert (result.fault, result.text) == (
        "printed_too_much",
        "it returned more than 1024 KiB and was stopped",
    )


async def test_output_that_is_no_text_is_replaced(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:prints_bytes_that_are_no_text")
    assert (result.value, result.stdout) == ("done", "�� fine")


async def test_an_answer_that_no_message_can_have_is_an_error(sandbox: Sandbox) -> None:
    result = await sandbox.call("misbehaving:returns_something_strange")
    assert result.fault == "raised"
    assert "object" in result.text


WITH_AND_WITHOUT_NAMESPACES = pytest.mark.parametrize("without", [(), ("namespaces",)])


@WITH_AND_WITHOUT_NAMESPACES
async def test_a_function_that_forks_without_end_is_stopped_early(
    without: tuple[Means, ...],
) -> None:
    async with asyncio.timeout(110), Sandbox(SandboxConfig(without=without)) as sandbox:
        result = await sandbox.call(
            "misbehaving:forks_without_end", {}, ProcessLimits(timeout_s=30.0, max_processes=8)
        )
        assert result.fault in ("raised", "too_many_processes")
        assert sandbox.runner_pid is not None
        assert get_descendants(sandbox.runner_pid) == []


@WITH_AND_WITHOUT_NAMESPACES
async def test_a_call_may_have_as_many_processes_as_it_is_told(without: tuple[Means, ...]) -> None:
    limits = ProcessLimits(max_processes=4)
    async with asyncio.timeout(110), Sandbox(SandboxConfig(without=without)) as sandbox:
        within = await sandbox.call("misbehaving:forks", {"times": 3}, limits)
        assert (within.value, within.fault) == (4, None)
        beyond = await sandbox.call("misbehaving:forks", {"times": 4, "seconds": 100.0}, limits)
        assert beyond.fault in ("raised", "too_many_processes")


@pytest.mark.parametrize(("num_refusals", "fault"), [(2, None), (100, "not_isolated")])
async def test_a_call_that_was_not_isolated_is_tried_again_for_a_while(
    num_refusals: int, fault: str | None, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, asked = CallRunnerProcess.answer, list[int]()

    async def refused(
        runner: CallRunnerProcess, number: int, message: bytes, within_s: float
    ) -> Ended:
        asked.append(number)
        ended = await answer(runner, number, message, within_s)
        return (
            msgspec.structs.replace(ended, fault="not_isolated")
            if len(asked) <= num_refusals
            else ended
        )

    monkeypatch.setattr(CallRunnerProcess, "answer", refused)
    monkeypatch.setattr(sandbox_module, "RETRIES_AFTER_S", (0.0, 0.0, 0.0))
    result = await sandbox.run_program("print(5)")
    assert (result.fault, result.stdout, len(asked)) == (fault, "5\n", min(num_refusals + 1, 4))


@WITH_AND_WITHOUT_NAMESPACES
async def test_what_a_call_left_behind_is_killed_with_it(without: tuple[Means, ...]) -> None:
    async with asyncio.timeout(110), Sandbox(SandboxConfig(without=without)) as sandbox:
        result = await sandbox.call("misbehaving:leaves_a_process_behind", {"seconds": 7654.25})
        assert result.fault is None
        assert sandbox.runner_pid is not None
        reaper = psutil.Process(sandbox.runner_pid).ppid()
        assert get_descendants(reaper) == [sandbox.runner_pid]


async def test_memory_files_and_exit_codes_have_limits_or_names(sandbox: Sandbox) -> None:
    assert (
        await sandbox.call("misbehaving:eats_memory", {}, ProcessLimits(memory_mb=512))
    ).text == "MemoryError: "
    too_large = await sandbox.call(
        "misbehaving:fills_a_file", {"megabytes": 4}, ProcessLimits(file_mb=2)
    )
    assert "File too large" in too_large.text
    assert (await sandbox.call("misbehaving:fills_a_file", {"megabytes": 4})).value == "written"
    assert (
        await sandbox.call("misbehaving:exits", {"code": 7})
    ).text == "its process ended with exit code 7"


async def test_a_function_works_in_a_folder_of_its_own_that_is_gone_afterwards(
    sandbox: Sandbox,
) -> None:
    first, files = (await sandbox.call("misbehaving:folder")).value
    second, _ = (await sandbox.call("misbehaving:folder")).value
    assert first != second
    assert files == ["stdin"]
    assert not os.path.exists(first)  # noqa: ASYNC240


async def test_secrets_of_our_environment_stay_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    async with Sandbox() as sandbox:
        seen = (await sandbox.call("misbehaving:environment")).value
    assert "HF_TOKEN" not in seen
    assert "PATH" in seen


async def test_what_is_asked_for_is_in_the_environment() -> None:
    async with Sandbox(SandboxConfig(environment={"SEARCH_KEY": "42"})) as sandbox:
        assert (await sandbox.call("misbehaving:environment")).value["SEARCH_KEY"] == "42"


async def test_a_program_reads_its_input_and_says_how_it_ended(sandbox: Sandbox) -> None:
    assert (await sandbox.run_program("print(int(input()) * 2)", "21\n")).stdout == "42\n"
    failed = await sandbox.run_program("raise KeyError('x')")
    assert (failed.fault, failed.text) == (
        "died",
        "its process ended with exit code 1: KeyError: 'x'",
    )


async def test_a_program_that_aborts_is_reported_as_such(sandbox: Sandbox) -> None:
    result = await sandbox.run_program("import os; os.abort()")
    assert (result.fault, result.text[:36]) == ("died", "its process was killed by SIGABRT; i")


async def test_what_a_program_needs_for_its_work_is_there_though_the_network_is_not(
    sandbox: Sandbox,
) -> None:
    program = (
        "import asyncio, getpass, os, subprocess, tempfile\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "async def one(): return 1\n"
        "def two(): return 2\n"
        "if __name__ == '__main__':\n"
        "    tempfile.TemporaryFile().write(b'3')\n"
        "    open('/dev/null', 'w').write('4')\n"
        "    getpass.getuser()\n"
        "    print(asyncio.run(one()), subprocess.check_output(['echo', '5'], text=True).strip(), "
        "flush=True)\n"
        "    print('6', file=open('/dev/stdout', 'w'))\n"
        "    if os.access('/dev/shm', os.W_OK):\n"
        "        print(ProcessPoolExecutor(1).submit(two).result())\n"
    )
    result = await sandbox.run_program(program)
    assert (result.text, result.stdout) in (("", "1 5\n6\n2\n"), ("", "1 5\n6\n"))


async def test_cpu_time_is_limited_as_well(sandbox: Sandbox) -> None:
    result = await sandbox.run_program(
        "while True: pass", "", ProcessLimits(timeout_s=100.0, cpu_s=1)
    )
    assert (result.fault, result.text) == (
        "timed_out",
        "it took longer than 1 s of CPU time and was stopped",
    )


async def test_calls_beyond_the_limit_wait_and_their_deadline_has_not_begun() -> None:
    async def at(scale: float) -> None:
        async with Sandbox(SandboxConfig(max_calls=1)) as sandbox:
            holder = sandbox.call(
                "misbehaving:sleeps", {"seconds": 1.2 * scale}, ProcessLimits(timeout_s=60.0)
            )
            waiter = sandbox.call(
                "misbehaving:add", {"left": 1, "right": 2}, ProcessLimits(timeout_s=scale)
            )
            assert [result.value for result in await asyncio.gather(holder, waiter)] == ["awake", 3]

    await at_some_pace(at)


async def test_faults_cost_no_place() -> None:
    async with Sandbox(SandboxConfig(max_calls=2)) as sandbox:
        for _ in range(10):
            await asyncio.gather(
                *(sandbox.call("misbehaving:exits", {"code": 1}) for _ in range(2))
            )
        assert sandbox.counts == {"died": 20}
        both = asyncio.gather(
            *(sandbox.call("misbehaving:sleeps", {"seconds": 0.1}) for _ in range(2))
        )
        assert [result.value for result in await both] == ["awake", "awake"]


async def test_a_function_that_no_other_process_can_find_is_refused() -> None:
    with pytest.raises(TypeError, match="put it at the top of a module, or make it `async def`"):
        function_path(lambda: None)
    assert function_path(subprocess.run) == "subprocess:run"
