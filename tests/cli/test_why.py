"""`vla-rl why`: who waits for whom in a run that is held up, as a tree."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from toy_runs import small_run

from vla_rl.cli import main
from vla_rl.cli.why import make_tree, split_names
from vla_rl.env_workers import SimulatorConfig
from vla_rl.recipes.srpo_toy import new_policy, training_starts
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.waits import ListedExit, ListedTask, ListedWait, NoAnswer, RunWaits, ask_run
from vla_rl.rollout import embodied_agent
from vla_rl.run.train import TrainingRun
from vla_rl.types import Env, Policy, Trajectory

EPISODE_12 = ListedWait(
    who="episode 12", on="simulator-0.step_chunk", seconds=9.0, process="pid 7 is asleep"
)
UPDATE = ListedWait(who="update 3", on="1 of 2 groups: episodes 12, 13", seconds=8.0)


def waits(**others: object) -> RunWaits:
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
    lines = lines_of(waits())
    at = lines.index("update 3 waits for 1 of 2 groups: episodes 12, 13 since 8.0 s")
    assert lines[at + 1] == "episode 12 waits for simulator-0.step_chunk since 9.0 s"
    assert lines[at + 2] == "pid 7 is asleep"


def test_an_episode_that_reports_no_wait_is_shown_with_the_line_it_stands_at() -> None:
    task = ListedTask(name="episode 13", at="my_agent (agents.py:7)")
    assert "episode 13 is at my_agent (agents.py:7)" in lines_of(waits(tasks=(task,)))


def test_tasks_at_one_place_share_a_line() -> None:
    tasks = tuple(ListedTask(name=f"episode {number}", at="act (x.py:1)") for number in range(20))
    shown = ", ".join(f"episode {number}" for number in range(8))
    assert f"{shown} and 12 more: act (x.py:1)" in lines_of(waits(tasks=tasks))


def test_two_that_wait_for_each_other_are_both_shown() -> None:
    one = ListedWait(who="episode 1", on="episode 2", seconds=1.0)
    two = ListedWait(who="episode 2", on="episode 1", seconds=1.0)
    lines = lines_of(waits(waits=(one, two)))
    assert "episode 1 waits for episode 2 since 1.0 s" in lines
    assert "episode 2 waits for episode 1 since 1.0 s" in lines


def test_last_words_of_dead_processes_and_a_blocked_loop_are_shown() -> None:
    ended = ListedExit(what="actor 'sim-1' (pid 5) died: SIGSEGV\n    its last words", seconds=3.0)
    lines = lines_of(waits(exits=(ended,), blocked_at="  File x.py\n    sleep(9)"))
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
