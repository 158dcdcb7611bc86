"""The thread that starts an engine ends what it has started."""

import asyncio
import signal
import subprocess
import sys

import pytest

from vla_rl.engines.vllm.process import EngineThread

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


def start_sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])


async def test_cancelling_work_that_waits_for_its_process_kills_that_and_waits_for_both() -> None:
    thread = EngineThread("engine")
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    loop, ended = asyncio.get_running_loop(), []

    def start_and_wait() -> None:
        for _ in range(2):  # what begins after the first kill is killed as well
            with start_sleeper() as process:
                if not started.done():
                    loop.call_soon_threadsafe(started.set_result, process.pid)
                ended.append(process.wait())

    working = asyncio.create_task(thread.run(start_and_wait))
    await started
    working.cancel()
    await asyncio.wait([working])
    assert working.cancelled()
    assert ended == [-signal.SIGKILL, -signal.SIGKILL]
    assert thread.processes() == []
    await thread.close()
