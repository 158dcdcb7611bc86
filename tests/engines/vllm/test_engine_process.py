"""The end of an engine's process is seen at once, with how it ended."""

import asyncio
import subprocess
import sys

import pytest

from vla_rl.engines.vllm.process import EngineProcess


@pytest.mark.parametrize(
    ("code", "is_killed", "told"),
    [
        ("import sys; sys.exit(3)", False, "its process ended with status 3"),
        ("import time; time.sleep(60)", True, "its process was killed by SIGKILL"),
    ],
)
async def test_how_a_process_ended_is_told_once_it_has(
    code: str, is_killed: bool, told: str
) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as started:  # noqa: ASYNC220
        process, ended = EngineProcess(), asyncio.Event()
        assert process.how_it_ended() == "its process is gone"  # no process was started yet
        process.watch(started.pid, ended.set)
        if is_killed:
            process.kill()
        async with asyncio.timeout(60):
            await ended.wait()
        assert process.how_it_ended() == told
        process.close()
        process.kill()  # its number may be another process's by now: nothing is done
