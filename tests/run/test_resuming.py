"""A run goes on from its newest complete checkpoint; one process at a time owns its files."""

import ast
import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from toy_runs import (
    COMMAND,
    SHARES_SERVERS,
    SMALL,
    evaluated,
    get_servers,
    of_updates as pole_run,
    small_mlp_run,
    write_records,
)

from vla_rl.actors import LastingForkServers
from vla_rl.cli.command_line import Command, TrainingLaunch, parse_command
from vla_rl.cli.report import write_report
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.evaluation import read_records
from vla_rl.evaluation.held_out import HeldOutEvaluator
from vla_rl.evaluation.records import SUCCESSES
from vla_rl.evaluation.validation import Validation
from vla_rl.graph import Node, Pipeline
from vla_rl.learner import list_checkpoints, verify_checkpoint
from vla_rl.learner.checkpoint.folders import set_best
from vla_rl.recipes.train_toy import TrainToyConfig, main, new_policy, training_starts
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.waits import ask_run
from vla_rl.rollout import chat_agent
from vla_rl.run.recording import owned_recording
from vla_rl.run.resuming import checkpoint_to_resume, load_resumable, verify_resumable
from vla_rl.run.supervised import train_supervised
from vla_rl.run.train import Outcome, train
from vla_rl.types import Config, Sampling
from vla_rl.util.atomic_files import FileEntry, digest_file
from vla_rl.util.ownership import name_lock_file, sole_owner

pytestmark = SHARES_SERVERS


def of_updates(updates: int, root: Path) -> TrainToyConfig:
    return small_mlp_run(root, "embodied_srpo", updates=updates)


async def train_toy(config: TrainToyConfig, **options: Any) -> Outcome:
    async with asyncio.timeout(100):
        return await train(
            config,
            training_starts(config),
            new_policy(config),
            fork_servers=get_servers(),
            **options,
        )


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def run_of_two_updates(
    tmp_path_factory: pytest.TempPathFactory, servers: LastingForkServers
) -> Path:
    config = of_updates(2, tmp_path_factory.mktemp("runs"))
    async with asyncio.timeout(100):
        done = await train(
            config, training_starts(config), new_policy(config), fork_servers=servers
        )
    return done.run.path


@pytest.fixture
def run(run_of_two_updates: Path, tmp_path: Path) -> RunDirectory:
    """A copy of a run of two updates with a checkpoint of each."""
    return RunDirectory(Path(shutil.copytree(run_of_two_updates, tmp_path / "run")))


def damage(folder: Path) -> None:
    tensors = folder / "policy" / "model.safetensors"
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)


def names_in(run: RunDirectory) -> set[str]:
    return {path.name for path in run.checkpoints.iterdir()}


def updates_in(run: RunDirectory) -> list[int]:
    return [json.loads(line)["update"] for line in run.metrics.read_text().splitlines()]


async def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_its_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = of_updates(1, tmp_path)
    killed = RunDirectory.create(tmp_path, "killed", config)
    killed.metrics.write_bytes(
        b'{"update":1,"wall_time_s":1.0,"train/loss":9.0}\n{"update":2,"wall'
    )
    killed.trace().write_text("[\n")
    (killed.checkpoints / ".writing-update-000001-17").mkdir()
    outcome = await train_toy(config, resume=RunDirectory.resume(killed.path))
    assert (
        f"{killed.path} has no checkpoint, but made updates (1): "
        "starting from its beginning" in capsys.readouterr().out
    )
    assert outcome.run == killed
    assert names_in(killed) == {"update-000001"}
    assert updates_in(killed) == [1]
    assert "train/loss" not in killed.metrics.read_text()
    assert killed.trace().read_text() == "[\n"
    assert json.loads((killed.path / "trace-from-000000-2.json").read_text())


async def test_instead_of_a_damaged_checkpoint_the_older_whole_one_is_taken_with_one_line(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run.checkpoints / "update-000002")
    await train_toy(of_updates(3, run.path), resume=run)
    said = [line for line in capsys.readouterr().out.splitlines() if "update-000002" in line]
    assert len(said) == 2
    assert "digest differs" in said[0]
    assert "Resuming from the older update-000001 instead" in said[0]
    assert said[1] == f"update-000002 is kept as {run.checkpoints / 'aside-update-000002'}"
    assert names_in(run) == {"aside-update-000002", "update-000002", "update-000003"}
    assert updates_in(run) == [1, 2, 3]


async def test_a_newest_checkpoint_without_its_manifest_is_named_and_kept(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run.checkpoints / "update-000002"
    (newest / "manifest.json").unlink()
    await train_toy(of_updates(3, run.path), resume=run)
    said = [line for line in capsys.readouterr().out.splitlines() if "update-000002" in line]
    assert said == [
        f"{newest} is not used: it has no manifest.json, so it is not complete",
        f"update-000002 is kept as {run.checkpoints / 'aside-update-000002'}",
    ]
    assert names_in(run) == {"aside-update-000002", "update-000002", "update-000003"}
    assert updates_in(run) == [1, 2, 3]


def sign_again(folder: Path) -> None:
    """Write a manifest that agrees with the files as they are."""
    entries = {
        path.relative_to(folder).as_posix(): FileEntry(path.stat().st_size, digest_file(path))
        for path in folder.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    (folder / "manifest.json").write_bytes(msgspec.json.encode(entries))


SCHEDULER = "parts/scheduler.msgpack"
DAMAGED_PARTS: dict[str, tuple[Callable[[RunDirectory, Path], Any], str]] = {
    "missing": (lambda run, part: part.unlink(), "has no part 'scheduler'"),
    "cut": (lambda run, part: os.truncate(part, 40), "part 'scheduler' of"),
    "of another update": (
        lambda run, part: shutil.copy(run.checkpoints / "update-000001" / SCHEDULER, part),
        "is of update 1, expected 2 as its weights",
    ),
    "of another kind": (lambda run, part: part.write_bytes(b"\x80"), "part 'scheduler' of"),
}


@pytest.mark.parametrize("damage", DAMAGED_PARTS)
async def test_a_scheduler_that_cannot_be_restored_leads_to_the_older_checkpoint_with_one_line(
    damage: str, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = run.checkpoints / "update-000002"
    change, message = DAMAGED_PARTS[damage]
    change(run, newest / SCHEDULER)
    sign_again(newest)
    for read in (load_resumable, verify_resumable):
        folder, _ = await checkpoint_to_resume(run, None, read) or (None, None)
        assert folder == run.checkpoints / "update-000001"
        (line,) = capsys.readouterr().out.splitlines()
        assert line.endswith("Resuming from the older update-000001 instead")
        if damage != "missing" or read is load_resumable:
            assert message in line
    with pytest.raises(CheckpointError, match=message):
        await checkpoint_to_resume(run, "update-000002", load_resumable)


async def test_a_run_goes_on_from_before_a_scheduler_that_cannot_be_restored(
    run: RunDirectory,
) -> None:
    newest = run.checkpoints / "update-000002"
    os.truncate(newest / SCHEDULER, 40)
    sign_again(newest)
    await train_toy(of_updates(3, run.path), resume=run)
    assert names_in(run) == {"aside-update-000002", "update-000002", "update-000003"}
    assert updates_in(run) == [1, 2, 3]


PAGE = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()


async def test_a_run_goes_on_from_the_checkpoint_that_is_named_as_the_page_shows(
    run: RunDirectory,
) -> None:
    names: dict[str, Any] = {}
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(snippet, "docs/runs.md", "exec"), names)
    async with asyncio.timeout(100):
        await names["go_on"](run.path, of_updates(2, run.path))
    assert names_in(run) == {"update-000001", "aside-update-000002", "update-000002"}
    assert updates_in(run) == [1, 2]
    assert [
        json.loads(line)["update"]
        for line in (run.path / "metrics-undone.jsonl").read_text().splitlines()
    ] == [2]


async def test_the_best_checkpoint_is_gone_on_from_by_its_name(run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match="has no checkpoint 'best'; it has: update-000001"):
        await checkpoint_to_resume(run, "best", verify_checkpoint)
    set_best(run.checkpoints, run.checkpoints / "update-000001")
    found = await checkpoint_to_resume(run, "best", verify_checkpoint)
    assert found == (run.checkpoints / "update-000001", 1)


async def test_a_checkpoint_that_is_named_and_is_damaged_or_not_there_is_refused(
    run: RunDirectory,
) -> None:
    damage(run.checkpoints / "update-000001")
    with pytest.raises(CheckpointError, match="digest differs"):
        await train_toy(of_updates(3, run.path), resume=run, resume_from="update-000001")
    with pytest.raises(
        ConfigError, match=r"no checkpoint 'update-000007'; it has: update-000001, update-000002"
    ):
        await train_toy(of_updates(3, run.path), resume=run, resume_from="update-000007")


async def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_again_without_a_word(
    run: RunDirectory,
) -> None:
    for folder in list_checkpoints(run.checkpoints):
        damage(folder)
    with pytest.raises(
        CheckpointError, match=r"no complete checkpoint.*update-000002.*update-000001"
    ):
        await train_toy(of_updates(3, run.path), resume=run)


async def test_a_checkpoint_under_another_name_is_not_gone_on_from(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run.checkpoints / "update-000001", run.checkpoints / "update-000099")
    outcome = await train_toy(of_updates(3, run.path), resume=run)
    assert (
        "update-000099 is not used: its content "
        "is of update 1, unlike its name" in capsys.readouterr().out
    )
    assert outcome.progress.update == 3
    assert names_in(run) == {"update-000002", "update-000003", "update-000099"}


def test_results_of_weights_that_are_made_anew_are_set_aside(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "evaluated", Config())
    held_out, validation = run.path / "held_out.jsonl", run.path / "validation.jsonl"
    write_records(held_out, [evaluated(weights=0), evaluated(weights=20)])
    tries = [evaluated(weights=version, parts={"success": 1.0}) for version in (0, 20)]
    write_records(validation, tries)
    HeldOutEvaluator([]).set_later_aside(run, 12)
    Validation([], 1, chat_agent, Sampling()).set_later_aside(run, 12)
    for path in (held_out, validation):
        undone = path.with_name(f"{path.stem}-undone.jsonl")
        assert [record.weights for record in read_records(path)] == [0]
        assert [record.weights for record in read_records(undone)] == [20]


def command_of(*arguments: str) -> Command[TrainingLaunch, TrainToyConfig]:
    return parse_command(TrainingLaunch, TrainToyConfig, "", list(arguments))


async def test_the_command_line_names_the_checkpoint_to_resume_from(run: RunDirectory) -> None:
    async with asyncio.timeout(100):
        status = await main(command_of("--resume", str(run.path), "--resume-from", "update-000001"))
    assert status == 0
    assert names_in(run) == {"update-000001", "aside-update-000002", "update-000002"}
    with pytest.raises(ConfigError, match="--resume-from is 'update-000001', expected --resume"):
        command_of("--resume-from", "update-000001")


async def test_a_report_that_cannot_be_written_is_one_line_and_no_exit_status(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / SUCCESSES.file).write_bytes(b'{"weight_version": "\xff"}\n')
    async with asyncio.timeout(100):
        assert await main(command_of("--resume", str(run.path), "--run.updates", "2")) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "report" in line]
    assert len(told) == 1
    assert "the report could not be written (ConfigError: " in told[0]
    assert "held_out.jsonl, line 1 is not a result" in told[0]
    assert told[0].endswith(f"python -m vla_rl.cli.report {run.path}")


def test_a_configuration_with_a_flipped_bit_is_not_believed_unless_it_never_had_a_digest(
    run: RunDirectory,
) -> None:
    run.config.write_bytes(run.config.read_bytes().replace(b'"updates": 2', b'"updates": 3'))
    with pytest.raises(
        ConfigError, match=r"config.json is not what was written \(its digest differs"
    ):
        command_of("--resume", str(run.path))
    # as in a run that was made before there were digests
    (run.path / "config.json.sha256").unlink()
    assert command_of("--resume", str(run.path)).config.run.updates == 3


async def test_a_damaged_line_of_metrics_is_named_and_a_whole_last_one_stays(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = run.metrics.read_bytes().splitlines(keepends=True)
    run.metrics.write_bytes(first.replace(b'"update"', b'"upd\xffte"') + second.rstrip(b"\n"))
    await train_toy(of_updates(3, run.path), resume=run)
    assert updates_in(run) == [2, 3]
    said = capsys.readouterr().out.splitlines()
    assert f"{run.metrics}: line 1 is damaged, moved to metrics-undone.jsonl" in said
    missing = f"{run.metrics} has no line for update 1; these updates are not made again"
    assert missing in said


PACKAGE = Path(__file__).parents[2] / "vla_rl"


async def test_a_running_run_is_refused_to_a_resume_and_open_to_readers(tmp_path: Path) -> None:
    met: list[str] = []

    async def wait_for_update(update: int, snapshot: object) -> None:
        (path,) = _folders_in(tmp_path)
        run = RunDirectory.existing(path)
        with pytest.raises(
            ConfigError, match=rf"the run directory {re.escape(str(path))} is in use by"
        ):
            RunDirectory.resume(path)
        with pytest.raises(
            ConfigError, match=rf"the run directory {re.escape(str(path))} is in use by"
        ):
            await train_toy(pole_run(tmp_path, 4), resume=run)
        met.append(await asyncio.to_thread(lambda: f"asked {ask_run(run).pid}"))
        met.append(await asyncio.to_thread(lambda: write_report(run).name))

    def watched(pipeline: Pipeline) -> Pipeline:
        node = Node.declare("meet", wait_for_update, reads=("update", "snapshot"))
        return pipeline.insert_after("update", node)

    outcome = await train_toy(pole_run(tmp_path, 2), customise=watched)
    assert met == [f"asked {os.getpid()}", "report.html"] * 2
    assert not list(outcome.run.path.glob("versions-*.json"))  # a refused resume writes nothing
    assert not (outcome.run.path / "owner.json").exists()
    rest = await train_toy(pole_run(tmp_path, 3), resume=RunDirectory.resume(outcome.run.path))
    assert _updates_in(rest.run) == [1, 2, 3]


async def test_of_two_resumes_of_a_killed_run_one_goes_on_and_one_is_refused(
    tmp_path: Path,
) -> None:
    half = await train_toy(pole_run(tmp_path, 1))
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
    "run/offline.py": ["RunDirectory"],
    "run/recording.py": ["LeRobotWriter"],
    "run/supervised.py": ["checkpoint"],
    "cli/evaluate.py": ["LeRobotWriter", "RunDirectory"],
    "recipes/record_demonstrations.py": ["demonstrations"],
    "replay/exporting.py": ["LeRobotWriter"],
    "replay/segment_folder.py": ["ReplayBuffer"],
    "reporting/run_directory.py": ["RunDirectory"],
}
"""Modules that own what they write, and what it is."""

WITHOUT = {
    "cli/launch.py": "resumes for `train`, which owns",
    "evaluation/held_out.py": "in the folder of a run, which `train` owns",
    "evaluation/validation.py": "reads alone",
}
"""Modules that open what may be continued without owning it, and why."""

OPENS = {"RunDirectory.create", "RunDirectory.resume", "LeRobotWriter", "RecordFile"}
OWNS = {"owned", "owned_recording", "sole_owner"}


def calls_in(path: Path) -> set[str]:
    """Return the functions that a module calls, methods of classes with the class's name."""
    found, text = set(), path.read_text()
    if not any(name in text for name in OPENS | OWNS):
        return found
    for node in ast.walk(ast.parse(text)):
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
