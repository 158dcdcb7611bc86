"""The first lines of an engine's process, as Python runs them before anything else."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from vla_rl.engines.vllm.launch import STARTUP_PATH
from vla_rl.engines.vllm.preload.sitecustomize import PARENT
from vla_rl.engines.vllm.process import EngineThread

LOOK_AROUND = """
import json, os, signal, tempfile
blocked = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
print(json.dumps([os.getpid(), int(os.environ["VLA_RL_ENGINE_PARENT"]), tempfile.gettempdir(), blocked]), flush=True)
input()
"""
AS_ENGINE = "--multiprocessing-fork"  # an argument by which multiprocessing starts a process


def start(folder: Path, *arguments: str, parent: int | None = None) -> "subprocess.Popen[str]":
    own = {
        "PYTHONPATH": str(STARTUP_PATH),
        PARENT: str(parent or os.getpid()),
        "VLLM_RPC_BASE_PATH": str(folder),
    }
    return subprocess.Popen(
        [sys.executable, "-c", LOOK_AROUND, *arguments],
        env={**os.environ, **own},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_an_engine_process_keeps_its_files_in_the_folder_and_leaves_signals_of_the_terminal_to_its_parent(
    tmp_path: Path,
) -> None:
    with start(tmp_path, AS_ENGINE) as process:
        out, _ = process.communicate("\n")
    # processes that it starts have it as their parent
    assert json.loads(out) == [
        process.pid,
        process.pid,
        str(tmp_path),
        [signal.SIGHUP, signal.SIGINT],
    ]


def test_a_process_that_vllm_did_not_start_is_left_as_it_is(tmp_path: Path) -> None:
    with start(tmp_path) as process:
        out, _ = process.communicate("\n")
    assert json.loads(out) == [process.pid, os.getpid(), tempfile.gettempdir(), []]


def test_an_engine_process_whose_parent_died_before_its_first_line_runs_no_other(
    tmp_path: Path,
) -> None:
    with start(tmp_path, AS_ENGINE, parent=os.getppid()) as process:  # not the one that it has
        assert process.communicate("\n") == ("", None)
    assert process.returncode == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("is_stopped", [False, True])
async def test_an_engine_process_is_killed_with_the_thread_that_started_it(
    tmp_path: Path, is_stopped: bool
) -> None:
    thread = EngineThread("engine")
    with await thread.run(lambda: start(tmp_path, AS_ENGINE)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert thread.processes() == [process.pid]
        if is_stopped:
            process.send_signal(signal.SIGSTOP)
        await thread.close()
        assert process.wait() == -signal.SIGKILL
