"""A whole run with held-out evaluations beside it: what it leaves, and what a kill costs it."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from toy_runs import evaluate_offline, run_locally, start_recipe

from vla_rl.actors import LastingForkServers
from vla_rl.cli.command_line import Command, TrainingLaunch, parse_command
from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out_curve import read_curve
from vla_rl.evaluation.record_file import read_records
from vla_rl.evaluation.records import SUCCESSES, EpisodeRecord
from vla_rl.learner.checkpoint.folders import best_checkpoint, find_checkpoint
from vla_rl.recipes.train_toy import TrainToyConfig, held_out_episodes, main, training_starts
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.run import background_evaluation

REACH = ("--env-id", "vla_rl/toy_reach-v0", "--step-limit", "12")


def command_of(*arguments: str) -> Command[TrainingLaunch, TrainToyConfig]:
    return parse_command(TrainingLaunch, TrainToyConfig, "", [*REACH, *arguments])


def records_in(run: RunDirectory) -> list[EpisodeRecord]:
    return read_records(run.path / SUCCESSES.file)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Command[TrainingLaunch, TrainToyConfig]:
    root = str(tmp_path_factory.mktemp("runs"))
    return command_of(
        *("--run.root", root, "--run.updates", "2", "--run.keep-checkpoints", "9"),
        *("--run.checkpoint-every", "100"),
        *("--group-size", "2", "--scheduler.groups-per-update", "2", "--simulators.num-envs", "2"),
        *("--num-starts", "8", "--held-out.starts", "4", "--held-out.every", "2"),
    )


@pytest.fixture(scope="module")
def run(command: Command[TrainingLaunch, TrainToyConfig]) -> RunDirectory:
    """A run of two updates that was evaluated on four starts before and after them."""
    assert asyncio.run(main(command)) == 0
    (path,) = Path(command.config.run.root).iterdir()
    return RunDirectory(path)


async def test_the_results_beside_training_are_those_of_an_offline_evaluation_to_the_bit(
    run: RunDirectory, command: Command[TrainingLaunch, TrainToyConfig]
) -> None:
    episodes, records = held_out_episodes(command.config), records_in(run)
    versions = {record.weights for record in records}
    assert versions == {0, 2}
    expected = {}
    async with asyncio.timeout(120), LastingForkServers("offline") as servers:
        for version in versions:
            folder = find_checkpoint(run.checkpoints, version)
            assert folder is not None
            expected[version] = await evaluate_offline(
                folder / "policy", episodes, version, servers
            )
    for version in versions:
        found = [record for record in records if record.weights == version]
        assert sorted(found, key=repr) == sorted(expected[version], key=repr)
        assert len({record.episode_key for record in expected[version]}) == 4


def test_the_run_shows_the_curve_wherever_it_shows_others(run: RunDirectory) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    curve = read_curve(run)
    assert curve is not None
    means = {point.weights: point.all.mean for point in curve.report}
    chose = {point.weights: point.all.mean for point in curve.chose}
    (events,) = run.tensorboard.iterdir()
    drawn = {
        (value.tag, event.step): value.tensor.float_val[0]
        for event in EventFileLoader(str(events)).Load()
        for value in event.summary.value
        if value.tag.endswith("/success_rate") and value.tag.startswith("held_out")
    }
    assert drawn == pytest.approx(
        {("held_out/success_rate", version): mean for version, mean in means.items()}
        | {("held_out_choose/success_rate", version): mean for version, mean in chose.items()}
    )
    assert [line["update"] for line in read_metrics(run.metrics)] == [1, 2]
    page = (run.path / "report.html").read_text()
    assert "<h2>Report: starts that chose nothing</h2>" in page
    assert "<h2>Chose: starts that chose the best checkpoint</h2>" in page
    assert "0 (best)" in page or "2 (best)" in page
    best = best_checkpoint(run.checkpoints)
    assert curve.best is not None
    assert best == find_checkpoint(run.checkpoints, curve.best.weights)


# test_background_evaluation.py resumes without a process that is killed
@pytest.mark.proof
def test_after_a_kill_the_resume_finishes_the_evaluation_and_runs_no_start_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = ("--held-out.starts", "50", "--held-out.every", "2")
    killed = start_recipe(tmp_path, *REACH, "--run.updates", "2", *held_out)
    try:
        deadline = time.monotonic() + 100
        while not (paths := list(tmp_path.glob("*/held_out.jsonl"))) or not paths[0].read_bytes():
            assert killed.poll() is None, killed.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
    run = RunDirectory(paths[0].parent)
    before = records_in(run)
    assert 0 < len(before) < 50
    assert run_locally(tmp_path, *REACH, "--resume", str(run.path)) == 0
    records = records_in(run)
    assert records[: len(before)] == before
    assert Counter(record.weights for record in records) == {0: 50, 2: 50}
    assert max(Counter((record.weights, record.episode_key) for record in records).values()) == 1
    curve = json.loads((run.path / "held_out_curve.json").read_text())
    assert [point["weights"] for point in curve["chose"]] == [0, 2]
    assert curve["best"]["report"][0] == curve["best"]["chose"][0] == 50
    assert "held out: final weights 2: " in capsys.readouterr().out


def test_a_run_without_gain_stops_in_order_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_gain(evaluations: Sequence[tuple[float, int]], patience: int) -> bool:
        assert (patience, evaluations[0][1]) == (3, 2)
        return len(evaluations) == 2

    monkeypatch.setattr(background_evaluation, "has_stopped_gaining", no_gain)
    command = command_of(
        *("--run.root", str(tmp_path), "--run.updates", "10000"),
        *("--run.checkpoint-every", "20000", "--held-out.choose-starts", "2"),
        *("--group-size", "2", "--scheduler.groups-per-update", "2", "--simulators.num-envs", "2"),
        *("--num-starts", "8", "--held-out.starts", "3", "--held-out.every", "1"),
        *("--held-out.stop-after", "3"),
    )
    assert asyncio.run(main(command)) == 0
    (path,) = tmp_path.iterdir()
    run = RunDirectory(path)
    last = len(read_metrics(run.metrics))
    curve = read_curve(run)
    assert curve is not None
    assert curve.best is not None
    # the last weights were evaluated by both sets, although the run did not reach its last update
    assert {point.weights for point in curve.report} == {0, last, curve.best.weights}
    assert curve.chose[-1].weights == last < 10000
    assert find_checkpoint(run.checkpoints, last) is not None
    said = capsys.readouterr().out
    assert "stopping: the trend of the newest evaluations is below 2 points" in said
    assert f"held out: final weights {last}: " in said


def test_held_out_seeds_are_not_those_of_training() -> None:
    config = command_of("--held-out.starts", "50").config
    assert not {start.seed for start in training_starts(config)} & {
        episode.seed for episode in held_out_episodes(config)
    }
    with pytest.raises(ConfigError, match="starts is 5, expected 0, or --success-return beside it"):
        parse_command(TrainingLaunch, TrainToyConfig, "", ["--held-out.starts", "5"])


async def test_the_dry_run_says_what_evaluations_beside_training_cost(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("--run.updates", "9", "--held-out.starts", "5", "--held-out.every", "4")
    arguments += ("--held-out.stop-after", "3", "--held-out.choose-starts", "40")
    command = command_of("--dry-run", "--run.root", str(tmp_path), *arguments)
    async with asyncio.timeout(60):
        assert await main(command) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "held out: 5 starts are reported, for weights 0, the best and the last; 40 others choose the "
        "best checkpoint: 4 evaluations at most" in said
    )
    assert "at most 175 greedy episodes" in said
    assert "40 starts are too few to tell within 6 evaluations" in said
    assert "the run stops after 13 evaluations without gain" in said
    assert "held-out evaluator: Python, torch and the weights" in said
