"""A call runner that dies or is stuck is replaced, its calls are told, and it leaves nothing."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import is_gone

from vla_rl.actors.processes import liveness
from vla_rl.sandbox import (
    CallResult,
    ProcessLimits,
    Sandbox,
    SandboxConfig,
    runner_process,
)
from vla_rl.sandbox.linux import get_descendants
from vla_rl.sandbox.protocol import Ended

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(110)]


def runner_children(sandbox: Sandbox) -> list[int]:
    assert sandbox.runner_pid is not None
    return get_descendants(sandbox.runner_pid)


async def until(is_so: Callable[[], bool]) -> None:
    """Other processes tell nobody when they begin or end."""
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_cancelled_call_ends_its_process(sandbox: Sandbox) -> None:
    task = asyncio.create_task(
        sandbox.call("misbehaving:sleeps", {"seconds": 1000.0}, ProcessLimits(timeout_s=1000.0))
    )
    await until(lambda: sandbox.runner_pid is not None and bool(runner_children(sandbox)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not runner_children(sandbox))


async def test_a_call_runner_that_dies_is_replaced_and_its_calls_are_told(sandbox: Sandbox) -> None:
    folder, _ = (await sandbox.call("misbehaving:folder")).value
    hung = asyncio.create_task(sandbox.call("misbehaving:sleeps", {"seconds": 1000.0}))
    await until(lambda: sandbox.runner_pid is not None and bool(runner_children(sandbox)))
    assert sandbox.runner_pid is not None
    os.kill(sandbox.runner_pid, signal.SIGKILL)
    assert (await hung).text == "the process that runs it died"
    assert (await sandbox.call("misbehaving:add", {"left": 1, "right": 2})).value == 3
    assert not Path(folder).parent.exists()


async def stuck_runner(sandbox: Sandbox) -> tuple["asyncio.Task[CallResult]", list[int], Path]:
    """A call of a thousand seconds, the processes behind it, and the call runner's folder.

    The call runner answers no more.
    """
    folder, _ = (await sandbox.call("misbehaving:folder")).value
    running = asyncio.create_task(
        sandbox.call("misbehaving:sleeps", {"seconds": 1000.0}, ProcessLimits(timeout_s=1000))
    )
    await until(lambda: bool(runner_children(sandbox)))
    assert sandbox.runner_pid is not None
    os.kill(sandbox.runner_pid, signal.SIGSTOP)
    return running, [sandbox.runner_pid, *runner_children(sandbox)], Path(folder).parent


@pytest.mark.parametrize(
    ("grace_s", "looks", "words"),
    [
        (1000.0, True, "was stopped by a signal for some 2 s"),
        (1.0, False, "did not answer within 2.5 s"),
    ],
    ids=["its state shows it", "its deadline passes"],
)
async def test_a_call_runner_that_is_stuck_is_replaced_with_all_that_it_ran_and_its_calls_are_told(
    grace_s: float,
    looks: bool,
    words: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not looks:
        monkeypatch.setattr(liveness, "LOOK_EVERY_S", 1000.0)
    async with asyncio.timeout(60), Sandbox(SandboxConfig(runner_grace_s=grace_s)) as sandbox:
        running, processes, folder = await stuck_runner(sandbox)
        call = await sandbox.call(
            "misbehaving:add", {"left": 1, "right": 2}, ProcessLimits(timeout_s=1.5)
        )
        assert (call.fault, call.text) == (
            "died",
            f"the process that runs it {words} and was killed",
        )
        assert await running == call
        assert f"the call runner of a sandbox (pid {processes[0]}) {words}" in caplog.text
        assert (await sandbox.call("misbehaving:add", {"left": 1, "right": 2})).value == 3
        assert all(map(is_gone, processes))
        assert not folder.exists()
        assert sandbox.counts == {"done": 2, "died": 2}


async def test_nothing_is_left_of_a_call_runner_that_is_stuck_when_its_sandbox_is_closed() -> None:
    async with asyncio.timeout(60):
        async with Sandbox() as sandbox:
            running, processes, folder = await stuck_runner(sandbox)
        assert (await running).fault == "died"
    assert all(map(is_gone, processes))
    assert not folder.exists()


async def test_a_call_that_is_cancelled_while_its_stuck_call_runner_ends_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill, is_cancelled, killed = runner_process.kill_tree, threading.Event(), list[int]()

    def kill_later(pid: int) -> None:
        is_cancelled.wait(60)
        time.sleep(1.0)
        kill(pid)
        killed.append(pid)

    monkeypatch.setattr(liveness, "LOOK_EVERY_S", 1000.0)
    monkeypatch.setattr(runner_process, "kill_tree", kill_later)
    async with asyncio.timeout(100), Sandbox(SandboxConfig(runner_grace_s=0.5)) as sandbox:
        running, processes, folder = await stuck_runner(sandbox)
        call = asyncio.create_task(
            sandbox.call("misbehaving:raises", {}, ProcessLimits(timeout_s=0.5))
        )
        assert (await running).fault == "died"  # told as soon as the call runner is given up
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        is_cancelled.set()
        assert (await sandbox.call("misbehaving:add", {"left": 1, "right": 2})).value == 3
        assert len(killed) == 1
        assert all(map(is_gone, processes))
        assert not folder.exists()


async def test_a_call_runner_that_imports_is_not_stuck_and_goes_on_ending_calls() -> None:
    async with asyncio.timeout(100), Sandbox(SandboxConfig(runner_grace_s=1.0)) as sandbox:
        await sandbox.call("misbehaving:folder")
        hung = asyncio.create_task(
            sandbox.call("misbehaving:hangs", {}, ProcessLimits(timeout_s=1.0))
        )
        await until(lambda: bool(runner_children(sandbox)))
        runner, processes = sandbox.runner_pid, runner_children(sandbox)
        answer = asyncio.create_task(
            sandbox.call("slow_to_import:answer", {}, ProcessLimits(timeout_s=30.0))
        )
        await until(lambda: all(map(is_gone, processes)))
        assert not answer.done()
        assert (await answer).value == 42
        assert (await hung).fault == "timed_out"
        assert sandbox.runner_pid == runner


async def test_a_call_runner_that_is_asked_for_an_import_in_the_last_look_is_not_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = asyncio.wait
    # the stop of this test is shorter than the one that is killed, also on a busy machine
    monkeypatch.setattr(runner_process, "STOPPED_AFTER_S", 60.0)
    async with asyncio.timeout(100), Sandbox(SandboxConfig(runner_grace_s=0.5)) as sandbox:
        await sandbox.call("misbehaving:folder")
        runner = sandbox.runner_pid
        assert runner is not None

        async def look(answers: set[asyncio.Future[Ended]], timeout: float) -> object:
            found = await wait(answers, timeout=timeout)
            if timeout == runner_process._LAST_LOOK_S:
                await sandbox.preload("colorsys")
                os.kill(runner, signal.SIGCONT)
            return found

        monkeypatch.setattr(asyncio, "wait", look)
        os.kill(runner, signal.SIGSTOP)
        limits = ProcessLimits(timeout_s=0.25)
        assert (
            await sandbox.call("misbehaving:sleeps", {"seconds": 1000.0}, limits)
        ).fault == "timed_out"
        assert sandbox.runner_pid == runner


async def test_nothing_is_left_after_a_sandbox_is_closed() -> None:
    async with Sandbox() as sandbox:
        task = asyncio.create_task(
            sandbox.call("misbehaving:sleeps", {"seconds": 1000.0}, ProcessLimits(timeout_s=1000))
        )
        await until(lambda: sandbox.runner_pid is not None and bool(runner_children(sandbox)))
        runner, children = sandbox.runner_pid, runner_children(sandbox)
        assert runner is not None
    assert (await task).fault == "died"
    assert all(map(is_gone, (runner, *children)))
    with pytest.raises(RuntimeError, match="not open"):
        await sandbox.call("misbehaving:raises")
