"""Who waits for whom in a run: the run answers, `vla-rl why` shows it as a tree.

A run that cannot answer is told apart.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from toy_runs import small_run

from vla_rl.actors import waiting
from vla_rl.cli import main
from vla_rl.cli.why import make_tree, split_names
from vla_rl.env_workers import SimulatorConfig
from vla_rl.recipes.srpo_toy import new_policy, training_starts
from vla_rl.reporting import RunDirectory, waits
from vla_rl.reporting.waits import (
    ListedExit,
    ListedTask,
    ListedWait,
    NoAnswer,
    RunningProcess,
    RunWaits,
    WaitsSocket,
    ask_run,
)
from vla_rl.rollout import embodied_agent
from vla_rl.run.train import TrainingRun
from vla_rl.types import Config, Env, Policy, Trajectory
from vla_rl.util.ownership import PREFIXES, OwnedFolder

EPISODE_12 = ListedWait(
    who="episode 12", on="simulator-0.step_chunk", seconds=9.0, process="pid 7 is asleep"
)
UPDATE = ListedWait(who="update 3", on="1 of 2 groups: episodes 12, 13", seconds=8.0)


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
    assert "hold_on (tests/cli/test_why.py:" in location
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


def made_waits(**others: object) -> RunWaits:
    plain = RunWaits(
        pid=1,
        quiet_s=9.0,
        progress={"episodes": 4},
        blocked_at=None,
        waits=(EPISODE_12, UPDATE),
        tasks=(),
        threads=(),
        exits=(),
    )
    return msgspec.structs.replace(plain, **others)


def lines_of(shown: RunWaits) -> list[str]:
    console = Console(width=200, soft_wrap=True)
    with console.capture() as captured:
        console.print(make_tree(shown, "runs/x"))
    return [line.strip("│├─└ ") for line in captured.get().splitlines()]


def test_who_is_waited_for_is_below_who_waits() -> None:
    lines = lines_of(made_waits())
    at = lines.index("update 3 waits for 1 of 2 groups: episodes 12, 13 since 8.0 s")
    assert lines[at + 1] == "episode 12 waits for simulator-0.step_chunk since 9.0 s"
    assert lines[at + 2] == "pid 7 is asleep"


def test_an_episode_that_reports_no_wait_is_shown_with_the_line_it_stands_at() -> None:
    task = ListedTask(name="episode 13", at="my_agent (agents.py:7)")
    assert "episode 13 is at my_agent (agents.py:7)" in lines_of(made_waits(tasks=(task,)))


def test_tasks_at_one_place_share_a_line() -> None:
    tasks = tuple(ListedTask(name=f"episode {number}", at="act (x.py:1)") for number in range(20))
    shown = ", ".join(f"episode {number}" for number in range(8))
    assert f"{shown} and 12 more: act (x.py:1)" in lines_of(made_waits(tasks=tasks))


def test_two_that_wait_for_each_other_are_both_shown() -> None:
    one = ListedWait(who="episode 1", on="episode 2", seconds=1.0)
    two = ListedWait(who="episode 2", on="episode 1", seconds=1.0)
    lines = lines_of(made_waits(waits=(one, two)))
    assert "episode 1 waits for episode 2 since 1.0 s" in lines
    assert "episode 2 waits for episode 1 since 1.0 s" in lines


def test_last_words_of_dead_processes_and_a_blocked_loop_are_shown() -> None:
    ended = ListedExit(what="actor 'sim-1' (pid 5) died: SIGSEGV\n    its last words", seconds=3.0)
    lines = lines_of(made_waits(exits=(ended,), blocked_at="  File x.py\n    sleep(9)"))
    assert "3.0 s ago: actor 'sim-1' (pid 5) died: SIGSEGV" in lines
    assert "its last words" in lines
    assert "sleep(9)" in lines


def test_several_of_a_kind_are_named_one_by_one() -> None:
    assert split_names("group 7: episodes 12, 13") == ["group 7", "episode 12", "episode 13"]


async def test_a_run_that_a_stopped_simulator_holds_up_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = msgspec.structs.replace(
        small_run(tmp_path), simulators=SimulatorConfig(num_envs=2, frozen_after_s=None)
    )
    stopped: list[int] = []

    async def agent(env: Env, policy: Policy) -> Trajectory:
        if not stopped:
            stopped.append(training.simulator_pids[0])
            os.kill(stopped[0], signal.SIGSTOP)
        return await embodied_agent(env, policy)

    training = TrainingRun(config, training_starts(config), new_policy(config), agent=agent)
    run = RunDirectory.create(tmp_path, "held-up", config)
    task = asyncio.create_task(training.execute(run))
    try:
        async with asyncio.timeout(60):
            while not await _names_a_stopped_process(run):
                assert not task.done(), task.exception()
        monkeypatch.setattr(sys, "argv", [])
        assert await asyncio.to_thread(main.main, ["why", str(run.path)]) == 0
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        task.cancel()
        await asyncio.wait([task])
    shown = capsys.readouterr().out
    lines = [line.strip("│├─└ ") for line in shown.splitlines()]
    at = lines.index(f"pid {stopped[0]} is stopped by a signal (SIGSTOP)")
    assert lines[at - 1].startswith("episode ")
    assert " waits for env-" in lines[at - 1]
    assert any(line.startswith("update 0 waits for ") for line in lines)
    assert any(line.startswith("rollout[0]: ") for line in lines)
    with pytest.raises(NoAnswer, match="has ended"):
        ask_run(run)


async def _names_a_stopped_process(run: RunDirectory) -> bool:
    try:
        waits = await asyncio.to_thread(ask_run, run)
    except NoAnswer:  # it has not opened its socket yet
        await asyncio.sleep(0.05)
        return False
    return any("SIGSTOP" in wait.process for wait in waits.waits)


def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [])
    assert main.main(["why", str(tmp_path)]) == 2
    assert "expected the folder of an earlier run" in capsys.readouterr().err
