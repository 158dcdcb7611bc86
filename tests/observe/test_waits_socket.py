"""A running run answers what it waits for, and one that cannot is told apart."""

import asyncio
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from vla_rl.actors import waiting
from vla_rl.observe import RunDirectory
from vla_rl.observe.waits_socket import NoAnswer, RunningProcess, WaitsSocket, ask_run
from vla_rl.types import Config


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "why", Config())


def note(run: RunDirectory, process: RunningProcess) -> None:
    (run.path / "process.json").write_bytes(msgspec.json.encode(process))


async def test_a_run_lists_its_waits_and_the_place_of_each_task(run: RunDirectory) -> None:
    never = asyncio.Event()

    async def hold_on() -> None:
        with waiting("episode 12", on="the referee"):
            await never.wait()

    task = asyncio.create_task(hold_on(), name="episode 12")
    await asyncio.sleep(0)
    with WaitsSocket(run.path):
        waits = await asyncio.to_thread(ask_run, run)
    task.cancel()
    assert [wait.on for wait in waits.waits if wait.who == "episode 12"] == ["the referee"]
    (place,) = [task.at for task in waits.tasks if task.name == "episode 12"]
    assert place.startswith("Event.wait (")
    assert "hold_on (tests/observe/test_waits_socket.py:" in place
    assert waits.pid == os.getpid()
    assert waits.blocked_at is None


async def test_a_run_whose_loop_is_blocked_answers_with_the_line_that_blocks_it(
    run: RunDirectory,
) -> None:
    with WaitsSocket(run.path), ThreadPoolExecutor() as threads:
        waits = threads.submit(ask_run, run).result(20)  # this very line blocks the loop
    assert waits.blocked_at is not None
    assert "# this very line blocks the loop" in waits.blocked_at


async def test_nothing_is_left_once_a_run_has_ended(run: RunDirectory) -> None:
    with WaitsSocket(run.path):
        process = msgspec.json.decode((run.path / "process.json").read_bytes(), type=RunningProcess)
        folder = Path(process.socket).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    with pytest.raises(NoAnswer, match="has ended, or has not started yet"):
        ask_run(run)


async def test_a_run_of_another_machine_is_named(run: RunDirectory) -> None:
    with WaitsSocket(run.path):
        here = msgspec.json.decode((run.path / "process.json").read_bytes(), type=RunningProcess)
        note(run, msgspec.structs.replace(here, host="node7"))
        with pytest.raises(NoAnswer, match=f"runs on 'node7' and this is '{socket.gethostname()}'"):
            ask_run(run)


async def test_a_run_that_was_killed_has_ended(run: RunDirectory) -> None:
    with WaitsSocket(run.path):
        here = msgspec.json.decode((run.path / "process.json").read_bytes(), type=RunningProcess)
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    note(run, msgspec.structs.replace(here, pid=ended.pid))
    with pytest.raises(NoAnswer, match=f"its process {ended.pid} was killed"):
        ask_run(run)


async def test_a_process_that_gives_no_answer_is_named_with_its_state(run: RunDirectory) -> None:
    with WaitsSocket(run.path):
        here = msgspec.json.decode((run.path / "process.json").read_bytes(), type=RunningProcess)
    with socket.socket(socket.AF_UNIX) as silent:
        path = str(run.path.parent / "silent")
        silent.bind(path)
        silent.listen()
        note(run, msgspec.structs.replace(here, socket=path))
        with pytest.raises(
            NoAnswer, match=f"process {os.getpid()}, which gave no answer within 0.1 s .*running"
        ):
            ask_run(run, within_s=0.1)


async def test_a_run_directory_without_room_costs_the_answers_and_not_the_run(
    run: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    with WaitsSocket(run.path / "gone"):
        pass
    assert "cannot ask this run what it waits for" in caplog.text
