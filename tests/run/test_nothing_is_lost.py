"""A run that is killed, resumed, or whose simulators and agents fail loses no episode and no update."""

import asyncio
import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from disks import SmallDisk, tmpfs
from toy_runs import SHARES_SERVERS, SMALL, get_servers, of_updates, small_run

from vla_rl.env_workers import SimulatorConfig
from vla_rl.errors import CheckpointError
from vla_rl.graph import Node, NodeFailed, Pipeline
from vla_rl.learner import latest_checkpoint, list_checkpoints
from vla_rl.recipes.srpo_toy import new_policy as reach_policy, training_starts as reach_starts
from vla_rl.recipes.train_toy import TrainToyConfig, new_policy, training_starts
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.reporting.run_directory import RunDirectoryGone
from vla_rl.rollout import embodied_agent
from vla_rl.run.train import Outcome, TrainingRun, train
from vla_rl.types import Env, Policy, Trajectory

pytestmark = SHARES_SERVERS


async def train_toy(config: TrainToyConfig, **options: Any) -> Outcome:
    async with asyncio.timeout(100):
        return await train(
            config,
            training_starts(config),
            new_policy(config),
            fork_servers=get_servers(),
            **options,
        )


def once_learnt(does: Callable[[int], Any]) -> Callable[[Pipeline], Pipeline]:
    """A node that is run after the policy has learnt, with the index of the update."""

    async def node(update: int, snapshot: Any) -> None:
        answer = does(update)
        if asyncio.iscoroutine(answer):
            await answer

    return lambda pipeline: pipeline.insert_after(
        "update", Node.declare("fault", node, reads=("update", "snapshot"))
    )


def only_run(root: Path) -> RunDirectory:
    (path,) = root.iterdir()
    return RunDirectory(path)


def lines_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def updates_in(run: RunDirectory) -> list[int]:
    return [line["update"] for line in lines_of(run)]


def newest_in(run: RunDirectory) -> str:
    folder = latest_checkpoint(run.checkpoints)
    return "none" if folder is None else folder.name


async def test_a_full_disk_costs_the_trace_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = SmallDisk(monkeypatch)

    def fill(update: int) -> None:
        disk.room = {1: 700, 3: None}.get(update, disk.room)  # half of a line, or of a trace

    with caplog.at_level(logging.WARNING):
        outcome = await train_toy(of_updates(tmp_path, 5), customise=once_learnt(fill))
    assert outcome.progress.update == 5
    assert updates_in(outcome.run) == [1, 2, 3, 4, 5]
    events = json.loads(outcome.run.trace().read_text())
    assert [event["id"] for event in events if event["ph"] == "b"] == [0, 1, 2, 3, 4]
    for name in ("metrics.jsonl", "trace.json", "tfevents"):
        reports = [
            record.getMessage() for record in caplog.records if f"{name}" in record.getMessage()
        ]
        assert (
            len([text for text in reports if "[Errno 28] No space left on device" in text]) == 1
        ), reports


@pytest.fixture
def small_disk() -> Iterator[Path]:
    with tmpfs("56m") as mount:
        yield mount


def fill_up(mount: Path) -> Path:
    ballast = mount / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return ballast


@pytest.mark.needs_root
async def test_a_disk_that_is_full_for_two_updates_delays_checkpoints_and_loses_nothing(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (small_disk / "runs").mkdir()

    def fill(update: int) -> None:
        if update == 1:
            fill_up(small_disk)
        elif update == 3:
            (small_disk / "ballast").unlink()

    config = of_updates(small_disk / "runs", 5, checkpoint_every=2, keep_checkpoints=1)
    with caplog.at_level(logging.WARNING):
        outcome = await train_toy(config, customise=once_learnt(fill))
    assert updates_in(outcome.run) == [1, 2, 3, 4, 5]
    assert newest_in(outcome.run) == "update-000005"
    reports = [record.getMessage() for record in caplog.records]
    assert len([text for text in reports if "update-000002 could not be written" in text]) == 1
    assert [
        text for text in reports if "could not be written" in text and "update-000003" in text
    ] == []
    assert (
        len([text for text in reports if text.startswith("checkpoints can be written again")]) == 1
    )


@pytest.mark.needs_root
async def test_the_last_checkpoint_on_a_full_disk_is_an_error_and_an_older_one_is_kept(
    small_disk: Path,
) -> None:
    (small_disk / "runs").mkdir()

    def fill(update: int) -> None:
        if update == 1:
            fill_up(small_disk)

    config = of_updates(small_disk / "runs", 2, checkpoint_every=1)
    with pytest.raises(
        CheckpointError, match=r"update-000002 could not be written: .* bytes are needed"
    ):
        await train_toy(config, customise=once_learnt(fill))
    run = only_run(small_disk / "runs")
    (small_disk / "ballast").unlink()
    assert newest_in(run) == "update-000001"
    again = await train_toy(config, resume=RunDirectory.resume(run.path))
    assert updates_in(again.run) == [1, 2]


async def test_a_node_that_fails_after_the_policy_learnt_costs_nothing_that_was_learnt(
    tmp_path: Path,
) -> None:
    def fail(update: int) -> None:
        if update == 1:
            raise RuntimeError("a mistake in a node")

    with pytest.raises(NodeFailed, match="a mistake in a node") as caught:
        await train_toy(of_updates(tmp_path, 4), customise=once_learnt(fail))
    run = only_run(tmp_path)
    assert (
        f"saved in {run.checkpoints / 'update-000002'}; "
        f"continue with --resume {shlex.quote(str(run.path))}" in "".join(caught.value.__notes__)
    )
    assert updates_in(run) == [1, 2]
    again = await train_toy(of_updates(tmp_path, 3), resume=RunDirectory.resume(run.path))
    assert updates_in(again.run) == [1, 2, 3]
    assert again.progress.num_episodes == 4


async def test_an_agent_that_fails_costs_nothing_that_was_learnt(tmp_path: Path) -> None:
    async def agent(env: Env, policy: Policy) -> Trajectory:
        if env.episode.episode_id >= 8:  # of the third update
            raise ValueError("a mistake in an agent")
        return await embodied_agent(env, policy)

    with pytest.raises(ValueError, match="a mistake in an agent") as caught:
        await train_toy(of_updates(tmp_path, 4), agent=agent)
    assert "was saved in" in "".join(caught.value.__notes__)
    assert newest_in(only_run(tmp_path)) == "update-000002"
    assert updates_in(only_run(tmp_path)) == [1, 2]


async def test_after_a_failure_of_the_learner_itself_nothing_is_saved_and_the_newest_checkpoint_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = of_updates(tmp_path, 3, checkpoint_every=1)
    training = TrainingRun(
        config, training_starts(config), new_policy(config), fork_servers=get_servers()
    )
    learner = training._parts.learner
    update = learner.update

    async def diverge(*arguments: Any) -> Any:
        if learner.weight_version == 1:
            raise FloatingPointError("not finite")
        return await update(*arguments)

    monkeypatch.setattr(learner, "update", diverge)
    with pytest.raises(NodeFailed, match="not finite") as caught:
        async with asyncio.timeout(100):
            await training.execute(RunDirectory.create(tmp_path, "diverged", config))
    run = only_run(tmp_path)
    assert [folder.name for folder in list_checkpoints(run.checkpoints)] == ["update-000001"]
    assert f"the newest checkpoint is: {run.checkpoints / 'update-000001'}" in "".join(
        caught.value.__notes__
    )


async def test_an_update_that_was_learnt_has_its_line_even_if_the_run_is_stopped_in_it(
    tmp_path: Path,
) -> None:
    async def stop(update: int) -> None:
        if update == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()  # the update is never handed to the loop

    outcome = await train_toy(of_updates(tmp_path, 5), customise=once_learnt(stop))
    assert (outcome.was_stopped, outcome.stopped_by) == (True, signal.SIGTERM)
    assert newest_in(outcome.run) == "update-000002"
    assert updates_in(outcome.run) == [1, 2]
    first, second = lines_of(outcome.run)
    of_other_nodes = {"time/node/fault_s"}
    assert set(first) - of_other_nodes <= set(second)
    assert outcome.progress.update == 2


async def test_a_run_directory_that_is_removed_ends_the_run_with_one_error_and_what_was_learnt_is_saved(
    tmp_path: Path,
) -> None:
    def remove(update: int) -> None:
        if update == 1:
            shutil.rmtree(only_run(tmp_path).path)

    with pytest.raises(
        RunDirectoryGone, match="was removed during the run, and its files are lost"
    ) as caught:
        await train_toy(of_updates(tmp_path, 5), customise=once_learnt(remove))
    run = only_run(tmp_path)
    assert "the progress until then was saved in" in "".join(caught.value.__notes__)
    assert newest_in(run) == "update-000002"
    assert updates_in(run) == [2]
    again = await train_toy(of_updates(tmp_path, 3), resume=RunDirectory.resume(run.path))
    assert updates_in(again.run) == [2, 3]


KILLED = """
    import asyncio, os, signal, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from toy_runs import of_updates
    from vla_rl.learner import latest_checkpoint
    from vla_rl.util import appended_file
    # its policy imports no transformers
    from vla_rl.recipes.train_toy import new_policy, training_starts
    from vla_rl.run.train import train

    write = appended_file._write

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def half_a_line(descriptor, data):
        if data[:11] == b'{"update":2':
            write(descriptor, data[:40])
            die()
        return write(descriptor, data)

    def at_rename(event, arguments):
        if event == "os.rename" and str(arguments[1]).endswith("update-000002"):
            die()

    def after_rename(event, arguments):
        if event == "open" and str(arguments[0]).endswith("checkpoints") and latest(Path(arguments[0])) == 2:
            die()

    def latest(root):
        folder = latest_checkpoint(root)
        return 0 if folder is None else int(folder.name[-6:])

    async def run(config):
        async with asyncio.timeout(60):
            await train(config, training_starts(config), new_policy(config))

    points = {"half a line": half_a_line, "at the rename": at_rename, "after the rename": after_rename}
    configs = {
        point: of_updates(Path(sys.argv[1]) / point, 4, checkpoint_every=1) for point in points
    }
    # no forked run has to import again what the policy, the optimizer and the metrics import
    new_policy(configs["half a line"])
    import tensorboard.compat.proto.event_pb2, torch._dynamo
    for point, fault in points.items():
        pid = os.fork()
        if pid == 0:
            if fault in (at_rename, after_rename):
                sys.addaudithook(fault)
            else:
                appended_file._write = fault
            asyncio.run(run(configs[point]))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == signal.SIGKILL, (point, status)
"""


def progress_of(run: RunDirectory) -> tuple[str, list[int]]:
    """The newest checkpoint, and the updates of the lines that are complete."""
    lines = run.metrics.read_bytes().splitlines(keepends=True)
    complete = [json.loads(line)["update"] for line in lines if line.endswith(b"\n")]
    return newest_in(run), complete


async def test_a_run_killed_at_any_point_of_a_save_has_a_line_for_each_update_of_its_checkpoint(
    tmp_path: Path,
) -> None:
    folders = [str(Path(__file__).parents[1] / "support")]
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), *folders]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    points = ("half a line", "at the rename", "after the rename")
    killed = {point: progress_of(only_run(tmp_path / point)) for point in points}
    assert killed == {
        "half a line": ("update-000001", [1]),
        "at the rename": ("update-000001", [1, 2]),
        "after the rename": ("update-000002", [1, 2]),
    }
    for point in killed:
        root = tmp_path / point
        config = of_updates(root, 3, checkpoint_every=1)
        await train_toy(config, resume=RunDirectory.resume(only_run(root).path))
        assert progress_of(only_run(root)) == ("update-000003", [1, 2, 3]), point


@pytest.mark.parametrize(
    ("updates", "least_faults"), [(3, 2), pytest.param(8, 5, marks=pytest.mark.proof)]
)
async def test_killed_and_frozen_simulators_cost_time_and_nothing_else(
    updates: int, least_faults: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_run(tmp_path)
    config = msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, updates=updates, chaos_every_s=0.3),
        group_size=8,
        simulators=SimulatorConfig(
            num_envs=3, step_timeout_s=1.0, reset_timeout_s=3.0, max_restarts=1000
        ),
        scheduler=msgspec.structs.replace(config.scheduler, max_staleness=1, max_attempts=50),
    )
    run = TrainingRun(config, reach_starts(config), reach_policy(config))
    async with asyncio.timeout(110):
        outcome = await run.execute(RunDirectory.create(tmp_path, "chaos", config))
    num_faults = sum("chaos: SIG" in message for message in caplog.messages)
    metrics = read_metrics(outcome.run.metrics)
    assert [line["update"] for line in metrics] == list(range(1, updates + 1))
    assert outcome.progress.num_episodes == updates * 2 * 8
    assert num_faults >= least_faults
    replaced = metrics[-1]["simulation/replaced/died"] + metrics[-1]["simulation/replaced/frozen"]
    assert replaced >= least_faults // 2
    assert metrics[-1]["rollout/staleness/max"] <= 1


PROGRAM = Path(__file__).parents[1] / "support" / "stubborn_agents.py"


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("goes on", 130, "did not end within 5 s of being cancelled"),
        ("its task goes on", 130, "after they were cancelled, and are left: episode"),
        ("exits", 1, "AgentError: the agent raised SystemExit: 3 while running episode"),
    ],
)
def test_a_run_ends_with_its_checkpoint_whatever_its_agents_do(
    tmp_path: Path, how: str, status: int, said: str
) -> None:
    options = [*SMALL, "--run.updates", "3", "--run.root", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), how, *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr.partition("because of")[0]
    assert list(tmp_path.glob("*/checkpoints/update-*"))
