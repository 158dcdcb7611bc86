"""The control process is killed: a resume takes the hosts over, and nothing is left where none comes.

Real processes: `vla-rl host` on this machine, and the recipe as a program.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from processes import processes_of_session
from toy_runs import start_recipe

from vla_rl.evaluation import read_held_out
from vla_rl.learner import load_checkpoint
from vla_rl.reporting import read_metrics
from vla_rl.rollout import SchedulerState

UPDATES = 6
WITHIN_S = 150


class RealHost:
    """`vla-rl host` in a process of its own, and the list that names it."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        keys = folder / "keys"
        command = [sys.executable, "-m", "vla_rl.cli.host", "--keys", str(keys)]
        # a busy machine may hold up any thread for seconds; a closed connection is seen at once
        self.server = subprocess.Popen(
            [*command, "--bind", address, "--lost-after", "30"],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.server.stdout is not None
        for line in self.server.stdout:
            if line.startswith("serving"):
                break
        self.path = folder / "hosts.toml"
        self.path.write_text(
            f'client_key = "keys/client.key"\n[[host]]\nname = "far"\naddress = "{address}"\n'
            'public_key = "keys/server.pub"\nlost_after_s = 20.0\n'
        )

    def processes(self) -> set[int]:
        """Everything that the host has started, also what has lost its parent since."""
        return set(processes_of_session(self.server.pid)) - {self.server.pid}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RealHost]:
    opened = RealHost(tmp_path)
    try:
        yield opened
    finally:
        opened.server.terminate()
        opened.server.communicate(timeout=60)


def until(what: str, is_true: Callable[[], object], process: "subprocess.Popen[str]") -> None:
    """Wait for something that other processes do, while one of them lives."""
    end = time.monotonic() + WITHIN_S
    while not is_true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{what} did not come within {WITHIN_S} s"
        time.sleep(0.02)


def killed_run(root: Path, host: RealHost, *arguments: str) -> Path:
    """Kill a run after it has a checkpoint, while it makes the next update; return its folder."""
    run = start_recipe(
        root,
        *("--cluster.hosts", str(host.path), "--run.updates", str(UPDATES)),
        *("--run.checkpoint-every", "1", "--run.device", "cpu", *arguments),
    )
    try:
        until("a checkpoint", lambda: list(root.glob("*/checkpoints/update-*2")), run)
        # a rollout host, its fork server and its simulators
        assert len(host.processes()) >= 3
    finally:
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
    (folder,) = root.iterdir()
    return folder


@pytest.mark.proof
@pytest.mark.timeout(500)
def test_a_resume_takes_over_the_hosts_of_a_run_that_was_killed(
    host: RealHost, tmp_path: Path
) -> None:
    held_out = ("--success-return", "10", "--held-out.starts", "3")
    folder = killed_run(tmp_path / "runs", host, *held_out)
    resumed = start_recipe(tmp_path / "runs", "--resume", str(folder))
    try:
        out, err = resumed.communicate(timeout=WITHIN_S)
    finally:
        resumed.kill()
    assert resumed.returncode == 0, err
    assert "host far was taken over: 2 environments, its engine and" in out

    # each update once, and each episode in one place
    updates = [line["update"] for line in read_metrics(folder / "metrics.jsonl")]
    assert updates == list(range(1, UPDATES + 1))
    newest = folder / "checkpoints" / f"update-{UPDATES:06}"
    state = asyncio.run(load_checkpoint(newest)).part("scheduler", SchedulerState)
    assert state.ledger.trained == UPDATES * 2 * 2  # groups of an update, and their members
    assert (folder / "hosts_key").stat().st_size > 32
    # held-out episodes ran before the kill and after the resume, on the host: none runs here
    results = read_held_out(folder / "held_out.jsonl")
    assert [each.weight_version for each in results] == [0] * 3 + [UPDATES] * 3
    # the run ended in order, so nothing waits for another resume
    until("the end of all", lambda: not host.processes(), host.server)


# test_host_takeover.py and tests/actors/test_takeover.py have hosts in this process
@pytest.mark.proof
@pytest.mark.timeout(500)
def test_hosts_that_no_resume_takes_over_end_everything(host: RealHost, tmp_path: Path) -> None:
    killed_run(tmp_path / "runs", host, "--cluster.resume-within-s", "0.5")
    until("the end of all", lambda: not host.processes(), host.server)
