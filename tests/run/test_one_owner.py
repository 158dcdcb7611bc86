"""One process at a time writes into the folder of a run, an evaluation, a checkpoint or a data set."""

import ast
import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from shared_servers import SHARES_SERVERS, servers_of_file
from toy_runs import COMMAND, SMALL, of_updates

from vla_rl.cli.report.page import write_report
from vla_rl.errors import ConfigError
from vla_rl.graph import Node, Pipeline
from vla_rl.recipes.train_toy import TrainToyConfig, policy_of, starts_of
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.waits_socket import ask_run
from vla_rl.run.recording import owned_recording
from vla_rl.run.supervised import train_supervised
from vla_rl.run.train import Outcome, train
from vla_rl.util.ownership import name_lock_file, sole_owner

pytestmark = SHARES_SERVERS
PACKAGE = Path(__file__).parents[2] / "vla_rl"


async def train_toy(config: TrainToyConfig, **options: Any) -> Outcome:
    async with asyncio.timeout(100):
        return await train(
            config, starts_of(config), policy_of(config), fork_servers=servers_of_file(), **options
        )


async def test_a_running_run_is_refused_to_a_resume_and_open_to_readers(tmp_path: Path) -> None:
    met: list[str] = []

    async def meet(update: int, snapshot: object) -> None:
        (path,) = _folders_in(tmp_path)
        run = RunDirectory.existing(path)
        with pytest.raises(
            ConfigError, match=rf"the run directory {re.escape(str(path))} is in use by"
        ):
            RunDirectory.resume(path)
        with pytest.raises(
            ConfigError, match=rf"the run directory {re.escape(str(path))} is in use by"
        ):
            await train_toy(of_updates(tmp_path, 4), resume=run)
        met.append(await asyncio.to_thread(lambda: f"asked {ask_run(run).pid}"))
        met.append(await asyncio.to_thread(lambda: write_report(run).name))

    def watched(pipeline: Pipeline) -> Pipeline:
        node = Node.declare("meet", meet, reads=("update", "snapshot"))
        return pipeline.insert_after("update", node)

    outcome = await train_toy(of_updates(tmp_path, 2), customise=watched)
    assert met == [f"asked {os.getpid()}", "report.html"] * 2
    assert not list(outcome.run.path.glob("versions-*.json"))  # a refused resume writes nothing
    assert not (outcome.run.path / "owner.json").exists()
    rest = await train_toy(of_updates(tmp_path, 3), resume=RunDirectory.resume(outcome.run.path))
    assert _updates_in(rest.run) == [1, 2, 3]


async def test_of_two_resumes_of_a_killed_run_one_goes_on_and_one_is_refused(
    tmp_path: Path,
) -> None:
    half = await train_toy(of_updates(tmp_path, 1))
    path = half.run.path
    # 5000 updates: the one that goes on is still at them when the other is refused
    command = [*COMMAND, *SMALL, "--resume", str(path), "--run.updates", "5000"]
    two = [
        await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        for _ in range(2)
    ]
    ends = [asyncio.create_task(process.communicate()) for process in two]
    done, _ = await asyncio.wait(ends, timeout=100, return_when=asyncio.FIRST_COMPLETED)
    first = 0 if ends[0] in done else 1
    refused, other = two[first], two[1 - first]
    _, said = await ends[first]
    assert refused.returncode == 2, said.decode()
    assert f"error: the run directory {path} is in use by process {other.pid}" in said.decode()
    while not _updates_in(half.run)[1:]:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    other.send_signal(signal.SIGINT)
    async with asyncio.timeout(100):
        await ends[1 - first]
    assert other.returncode == 128 + signal.SIGINT
    updates = _updates_in(half.run)
    assert updates == list(range(1, len(updates) + 1))
    assert not list(half.run.checkpoints.glob("aside-*"))
    assert not list(half.run.checkpoints.glob("update-*-1"))


def _folders_in(root: Path) -> list[Path]:
    return list(root.iterdir())


def _updates_in(run: RunDirectory) -> list[int]:
    return [json.loads(line)["update"] for line in run.metrics.read_text().splitlines()]


async def test_two_supervised_trainings_do_not_write_one_checkpoint(tmp_path: Path) -> None:
    async def nothing(*arguments: object) -> None:
        raise AssertionError("it must not start")

    out = tmp_path / "base"
    refused = pytest.raises(ConfigError, match=f"the checkpoint {out} is in use by this process")
    with sole_owner(name_lock_file(out), "the checkpoint base"), refused:
        await train_supervised(1, nothing, nothing, nothing, out)
    out.mkdir()
    (out / "config.json").touch()
    with pytest.raises(ConfigError, match="exists already"):
        await train_supervised(1, nothing, nothing, nothing, out)


def test_two_runs_do_not_record_into_one_data_set(tmp_path: Path) -> None:
    folder = str(tmp_path / "episodes")
    with owned_recording(folder):
        with pytest.raises(ConfigError, match=f"the data set {re.escape(folder)} is in use by"):
            owned_recording(folder).__enter__()
        assert not Path(folder).exists()
    assert list(tmp_path.iterdir()) == []


OWNERS = {
    "run/train.py": ["LeRobotWriter", "RunDirectory"],
    "run/recording.py": ["LeRobotWriter"],
    "run/supervised.py": ["checkpoint"],
    "cli/evaluating.py": ["LeRobotWriter", "RunDirectory"],
    "recipes/record_demonstrations.py": ["demonstrations"],
    "reporting/run_directory.py": ["RunDirectory"],
}
"""Modules that own what they write, and what it is."""

WITHOUT = {
    "cli/launching.py": "resumes for `train`, which owns",
}
"""Modules that open what may be continued without owning it, and why."""

OPENS = {"RunDirectory.create", "RunDirectory.resume", "LeRobotWriter", "ResultFile"}
OWNS = {"owned", "owned_recording", "sole_owner"}


def calls_in(path: Path) -> set[str]:
    """Return the functions that a module calls, methods of classes with the class's name."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            found |= {name, name.rpartition(".")[2]}
    return found


def test_each_module_that_opens_what_another_process_may_continue_owns_it() -> None:
    calls = {str(path.relative_to(PACKAGE)): calls_in(path) for path in PACKAGE.rglob("*.py")}
    opening = {name for name, called in calls.items() if called & OPENS}
    owning = {name for name, called in calls.items() if called & OWNS}
    assert owning - {"util/ownership.py"} == set(OWNERS)
    assert opening - owning == set(WITHOUT)
