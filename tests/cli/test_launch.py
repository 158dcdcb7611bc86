"""A recipe as a process: its command line, Ctrl-C, its errors, and what it leaves behind when it is killed."""

import fcntl
import functools
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from processes import named_memory_of, processes_of_session, those_left
from toy_runs import COMMAND, SMALL, run_locally, start_recipe

from vla_rl.errors import CheckpointError, ConfigError, DataError, EnvError, GraphError
from vla_rl.learner import latest_checkpoint
from vla_rl.recipes import train_toy
from vla_rl.reporting import read_metrics
from vla_rl.run.terminal import explain

PATIENCE_S = 150.0
"""Seconds for a run to stop in order: up to a minute on a busy machine, and hangs are for ever."""


def until_line(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(
        f"the recipe ended without {text!r}: {process.stderr.read() if process.stderr else ''}"
    )


def until_gone(session: int) -> None:
    deadline = time.monotonic() + 30
    while processes_of_session(session):
        assert time.monotonic() < deadline, f"still there: {processes_of_session(session)}"
        time.sleep(0.05)


@pytest.mark.timeout(300)
def test_ctrl_c_stops_in_order_and_the_run_can_be_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start_recipe(tmp_path, "--run.updates", "500")
    until_line(process, "update 1/500")
    memory = named_memory_of(processes_of_session(process.pid))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to every process of the group
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGINT, err
    assert "stopping in order" in err
    until_gone(process.pid)
    assert those_left(memory) == []
    (run,) = tmp_path.iterdir()
    checkpoint = latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    reached = int(checkpoint.name.split("-")[1])
    assert reached >= 1
    lines = [line["update"] for line in read_metrics(run / "metrics.jsonl")]
    assert lines == list(range(1, reached + 1))
    assert (run / "report.html").exists()

    assert run_locally(tmp_path, "--resume", str(run), "--run.updates", str(reached + 1)) == 0
    assert f"update {reached + 1}/{reached + 1}" in capsys.readouterr().out


# run/test_terminal.py has every signal in this process, the test above a resume
@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_sigterm_before_the_first_update_leaves_a_run_that_can_be_resumed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = start_recipe(tmp_path, "--run.updates", "500")
    until_line(process, "starting 2 simulators")
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM, err
    until_gone(process.pid)
    (run,) = tmp_path.iterdir()
    assert run_locally(tmp_path, "--resume", str(run), "--run.updates", "1") == 0
    assert "update 1/1" in capsys.readouterr().out


# in the suite: the test above, a signal and a terminal that is gone in run/test_terminal.py, and
# output without a reader in run/test_terminal.py
@pytest.mark.proof
@pytest.mark.timeout(300)
def test_a_terminal_that_closes_stops_the_run_in_order_with_a_checkpoint_and_a_report(
    tmp_path: Path,
) -> None:
    """The kernel sends SIGHUP to every process of the terminal, and nothing can be printed any
    more.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *SMALL, "--run.root", str(tmp_path), "--run.updates", "500"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=functools.partial(own_terminal, theirs),
    )
    os.close(theirs)
    shown = b""
    while b"1/500" not in shown:
        shown = shown[-10_000:] + os.read(ours, 4096)
    os.close(ours)
    assert process.wait(timeout=PATIENCE_S) == 128 + signal.SIGHUP
    until_gone(process.pid)
    (run,) = tmp_path.iterdir()
    checkpoint = latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    reached = int(checkpoint.name.split("-")[1])
    assert [line["update"] for line in read_metrics(run / "metrics.jsonl")] == list(
        range(1, reached + 1)
    )
    assert (run / "report.html").exists()


def own_terminal(descriptor: int) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, with which tests may run, ignores it
    os.setsid()
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)


# run/test_terminal.py has the end at once, the test below that such an end leaves nothing
@pytest.mark.proof
def test_a_second_ctrl_c_stops_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    process = start_recipe(tmp_path, "--run.updates", "500")
    until_line(process, "update 1/500")
    memory = named_memory_of(processes_of_session(process.pid))
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGINT
    until_gone(process.pid)
    assert those_left(memory) == []


def test_kill_9_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    process = start_recipe(tmp_path, "--run.updates", "500")
    until_line(process, "update 1/500")
    assert len(processes_of_session(process.pid)) >= 3
    # an MLP needs neither transformers nor timm, whose imports took as long as the rest of a small run
    loaded = Path(f"/proc/{process.pid}/maps").read_text()
    assert "/torch/" in loaded
    assert "/tokenizers/" not in loaded
    assert "/scipy/" not in loaded
    memory = named_memory_of(processes_of_session(process.pid))
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    until_gone(process.pid)
    assert those_left(memory) == []


def test_a_dry_run_prints_the_plan_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_locally(tmp_path, "--dry-run", "--run.updates", "7") == 0
    printed = " ".join(capsys.readouterr().out.split())
    for phrase in (
        '"updates": 7',
        "simulators",
        "7 updates of 2 groups of 2 episodes = 28 episodes",
        "Memory estimate",
    ):
        assert phrase in printed, phrase
    assert not list(tmp_path.iterdir())


def test_a_dry_run_draws_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "graph.mmd"
    assert run_locally(tmp_path / "runs", "--dry-run", "--draw", str(drawn)) == 0
    assert drawn.read_text().startswith("flowchart")
    assert "everything that the run would read was found" in capsys.readouterr().out


def test_the_graph_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_locally(tmp_path / "runs", "--draw", str(tmp_path / "graph.svg")) == 0
    assert (tmp_path / "graph.svg").exists() or "flowchart" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


def test_a_mistake_on_the_command_line_is_one_message_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [*SMALL, "--run.root", str(tmp_path), "--simulators.num-envs", "99"]
    monkeypatch.setattr(sys, "argv", ["train_toy", *wrong])
    assert train_toy.cli() == 2
    shown = capsys.readouterr().err
    assert "num_envs = 99" in shown
    assert "Traceback" not in shown
    assert not list(tmp_path.iterdir())


def test_a_mistake_in_a_node_is_explained_with_its_own_traceback() -> None:
    try:
        try:
            raise ZeroDivisionError("a mistake")
        except ZeroDivisionError as mistake:
            raise GraphError("node 'reward' failed in update 3") from mistake
    except GraphError as error:
        text = explain(error)
    assert text.startswith("error: GraphError: node 'reward' failed in update 3")
    assert "Traceback" in text
    assert "ZeroDivisionError: a mistake" in text


def test_a_damaged_file_is_explained_in_two_lines() -> None:
    error = CheckpointError("model.safetensors is damaged")
    error.__cause__ = ValueError("header too short")
    assert explain(error).splitlines() == [
        "error: CheckpointError: model.safetensors is damaged",
        "because of: ValueError: header too short",
    ]


@pytest.mark.parametrize(
    "cause", [ValueError("header too short"), FileNotFoundError(2, "header too short", "x.gguf")]
)
def test_a_cause_that_the_error_has_told_is_not_told_again(cause: Exception) -> None:
    error = DataError("x.gguf cannot be read: header too short; download it again")
    error.__cause__ = cause
    assert explain(error) == f"error: DataError: {error}"


def test_one_error_of_many_tasks_is_explained_once() -> None:
    group = ExceptionGroup(
        "tasks", [ExceptionGroup("more", [EnvError("no room")]), EnvError("no room")]
    )
    group.add_note("while starting")
    assert explain(group).splitlines() == [
        "error: EnvError: no room",
        "while starting",
        "1 more task failed in the same way",
    ]


def test_different_errors_of_several_tasks_are_explained_one_after_the_other() -> None:
    text = explain(ExceptionGroup("tasks", [EnvError("no room"), ConfigError("no seed")]))
    assert text.splitlines() == [
        "2 errors:",
        "error: EnvError: no room",
        "error: ConfigError: no seed",
    ]


def test_what_a_node_reports_of_its_cause_is_not_repeated() -> None:
    failed, cause = GraphError("node 'reward' failed: EnvError: no success"), EnvError("no success")
    cause.add_note("while running episode 7")
    failed.__cause__ = cause
    assert explain(failed).splitlines() == [
        "error: GraphError: node 'reward' failed: EnvError: no success",
        "while running episode 7",
    ]


def test_a_deliberate_error_is_explained_without_a_traceback_but_with_its_notes() -> None:
    failed, cause = GraphError("node 'rollout' failed in update 0"), EnvError("my/env: step raised")
    cause.add_note("while running episode 7")
    failed.__cause__ = cause
    assert explain(failed).splitlines() == [
        "error: GraphError: node 'rollout' failed in update 0",
        "because of EnvError: my/env: step raised",
        "while running episode 7",
    ]
