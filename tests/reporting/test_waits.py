"""A running run answers what it waits for, and one that cannot is told apart."""

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from vla_rl.actors import waiting
from vla_rl.reporting import RunDirectory, waits
from vla_rl.reporting.waits import NoAnswer, RunningProcess, WaitsSocket, ask_run
from vla_rl.types import Config
from vla_rl.util.ownership import PREFIXES, OwnedFolder


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "why", Config())


def names_of_sockets() -> str:
    """What the kernel lists."""
    return Path("/proc/net/unix").read_text()


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
    (location,) = [task.at for task in waits.tasks if task.name == "episode 12"]
    assert location.startswith("Event.wait (")
    assert "hold_on (tests/reporting/test_waits.py:" in location
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
        assert process.socket in names_of_sockets()
    assert process.socket not in names_of_sockets()
    with pytest.raises(NoAnswer, match="has ended, or has not started yet"):
        ask_run(run)


async def test_a_run_of_another_machine_is_named(run: RunDirectory) -> None:
    with WaitsSocket(run.path):
        running = msgspec.json.decode((run.path / "process.json").read_bytes(), type=RunningProcess)
        note(run, msgspec.structs.replace(running, host="node7"))
        with pytest.raises(NoAnswer, match=f"runs on 'node7' and this is '{socket.gethostname()}'"):
            ask_run(run)


async def test_a_run_that_was_killed_has_ended(run: RunDirectory) -> None:
    with WaitsSocket(run.path):
        running = msgspec.json.decode((run.path / "process.json").read_bytes(), type=RunningProcess)
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    note(run, msgspec.structs.replace(running, pid=ended.pid))
    with pytest.raises(NoAnswer, match=f"its process {ended.pid} was killed"):
        ask_run(run)


async def test_a_process_that_gives_no_answer_is_named_with_its_state(run: RunDirectory) -> None:
    with WaitsSocket(run.path):
        running = msgspec.json.decode((run.path / "process.json").read_bytes(), type=RunningProcess)
    with socket.socket(socket.AF_UNIX) as silent:
        name = f"@vla_rl-test-{os.getpid()}"
        silent.bind(f"\0{name[1:]}")
        silent.listen()
        note(run, msgspec.structs.replace(running, socket=name))
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


async def test_only_the_user_of_a_run_and_root_get_an_answer(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WaitsSocket(run.path):
        monkeypatch.setattr(waits, "_peer_uid", lambda _: os.getuid() + 1)
        with pytest.raises(NoAnswer, match="answers only the user who started it and root"):
            await asyncio.to_thread(ask_run, run)
        monkeypatch.undo()
        assert (await asyncio.to_thread(ask_run, run)).pid == os.getpid()


KILLED = """
import asyncio, sys
from pathlib import Path
from vla_rl.reporting.waits import WaitsSocket

async def main():
    with WaitsSocket(Path(sys.argv[1])):
        print("open", flush=True)
        sys.stdin.read()

asyncio.run(main())
"""


@pytest.mark.parametrize("name", [b"caf\xe9", b"x" * 180], ids=["not UTF-8", "180 letters"])
def test_nothing_is_left_of_the_socket_of_a_run_that_was_killed(
    run: RunDirectory, tmp_path: Path, name: bytes
) -> None:
    temporary = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    temporary.mkdir()
    command = [sys.executable, "-c", KILLED, str(run.path)]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"open\n"
        assert ask_run(run).pid == killed.pid
        killed.kill()
    process = msgspec.json.decode((run.path / "process.json").read_bytes(), type=RunningProcess)
    assert process.socket not in names_of_sockets()
    assert not list(temporary.iterdir())


async def test_the_next_run_removes_what_killed_ones_left_in_the_temporary_folder(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = [tmp_path / f"{prefix}abcd" for prefix in PREFIXES]
    for folder in left:
        (folder / "engine").mkdir(parents=True)
        (folder / "engine" / "socket").touch()
    others = [OwnedFolder(PREFIXES[0]).path, tmp_path / "vla_rl-0"]
    others[1].mkdir()
    with WaitsSocket(run.path):
        await asyncio.to_thread(ask_run, run)  # answered by the thread that sweeps first
        assert not [folder for folder in left if folder.exists()]
        assert all(folder.exists() for folder in others)
