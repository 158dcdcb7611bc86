"""The watch over an engine: what stands still is found, and what only seems to is left alone."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from vla_rl.actors.processes.liveness import find_stopped
from vla_rl.engines.vllm.process import EngineThread, EngineWatch

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]

SLEEPER = [sys.executable, "-c", "import time; time.sleep(3600)"]

DEADLINE_S = 2.0

OBSERVER = """
import asyncio, signal, subprocess, sys
from vla_rl.engines.vllm import watch

watch.LOOK_EVERY_S, watch.STOPPED_AFTER_S = 0.01, 0.1

async def main():
    engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    resumed, looked, frozen, looks_left = asyncio.Event(), asyncio.Event(), [], 10

    def processes():
        nonlocal looks_left
        looks_left -= resumed.is_set()
        if looks_left == 0:
            looked.set()
        return [engine.pid]

    asyncio.get_running_loop().add_signal_handler(signal.SIGCONT, resumed.set)
    observer = watch.EngineWatch(processes, frozen.append)
    observer.start()
    try:
        async with observer.limit(float(sys.argv[1])):
            print(engine.pid, flush=True)
            await looked.wait()
        print("alarm" if frozen else "calm", flush=True)
    except TimeoutError:
        print("too late", flush=True)
    observer.end()
    engine.kill()
    engine.wait()

asyncio.run(main())
"""


@pytest_asyncio.fixture
async def thread() -> AsyncIterator[EngineThread]:
    thread = EngineThread("engine")
    yield thread
    await thread.close()


def start_sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(SLEEPER)


async def test_a_process_that_is_stopped_is_named_and_one_that_sleeps_is_not(
    thread: EngineThread,
) -> None:
    with await thread.run(start_sleeper) as sleeps, await thread.run(start_sleeper) as stopped:
        assert sorted(thread.processes()) == sorted([sleeps.pid, stopped.pid])
        frozen: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        watch = EngineWatch(thread.processes, lambda pid: (watch.end(), frozen.set_result(pid))[1])
        watch.start()
        stopped.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with watch.limit(None):  # for as long as it lives
                await asyncio.Event().wait()
        assert await frozen == stopped.pid
        with pytest.raises(TimeoutError):
            async with watch.limit(3600.0):
                await asyncio.Event().wait()
        thread.kill()


async def test_ctrl_z_and_fg_of_observer_and_engine_raise_no_alarm_and_use_up_no_deadline() -> None:
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", OBSERVER, str(DEADLINE_S)],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as observer:
        assert observer.stdout is not None
        engine = int(observer.stdout.readline())
        os.killpg(observer.pid, signal.SIGSTOP)
        while not (find_stopped([observer.pid]) and find_stopped([engine])):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(1.2 * DEADLINE_S)
        os.killpg(observer.pid, signal.SIGCONT)
        assert observer.stdout.read() == "calm\n"
