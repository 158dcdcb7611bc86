"""The proofs of the pages of results, with small models: runs that are missing are made, kept ones are compared
in a table."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import flow_libero, flow_reach, language_sums, off_policy_proof
from benchmarks.counted_cpu import CpuLimitExceeded, read_counted, run_counted
from benchmarks.flow_runs import list_outcomes
from benchmarks.kept_runs import keep, kept_lines
from benchmarks.language_sums import gain_over_baseline, outcomes
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cli.evaluate import EvalLaunch
from vla_rl.evaluation import EpisodeRecord
from vla_rl.models.language import TinyConfig, tiny
from vla_rl.recipes.dagger_libero import DaggerLiberoConfig
from vla_rl.recipes.eval_libero import EvalLiberoConfig
from vla_rl.recipes.off_policy_libero import OffPolicyLiberoConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=256,
)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["language_sums", *arguments])
    return language_sums.main()


def test_a_run_that_is_missing_is_made_or_goes_on_is_kept_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny(SHAPE, ["Add or subtract. 20 + 15 = 35"], seed=0).save(tmp_path / "policy")
    kept = tmp_path / "kept.jsonl"
    arguments = (
        f"--runs {tmp_path / 'runs'} --keep {kept} --only form/0 -- --run.updates 1 --run.device cpu "
        f"--policy {tmp_path / 'policy'} --group-size 2 --scheduler.groups-per-update 2 "
        "--text.num-envs 4 --num-validation 3 --engine.max-context 256"
    ).split()
    assert call(monkeypatch, *arguments) == 0
    (line,) = kept_lines(kept)
    assert (line["run"], line["settings"]["scorer"], len(line["success"])) == ("form/0", "form", 1)
    assert len(line["outcomes_before"]) == len(line["outcomes_after"]) == 3
    assert [sorted(each) for each in line["replies"]] == [["after", "before", "problem"]] * 3
    assert all(len(each["after"]) == 1 for each in line["replies"])
    assert line["cpu_seconds"] >= 1
    assert line["machine"]
    assert line["versions"]["torch"]
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert last["runs"] == ["form/0"]
    assert last["gain"] == [None]
    assert call(monkeypatch, *arguments) == 0
    assert kept_lines(kept) == [line]
    kept.unlink()  # as if the command had been stopped before the run was kept
    assert call(monkeypatch, *arguments) == 0
    (again,) = kept_lines(kept)
    assert (again["outcomes_after"], again["replies"]) == (line["outcomes_after"], line["replies"])
    assert again["cpu_seconds"] > line["cpu_seconds"]
    assert again["minutes"] is None, "a pause is no cost of the run"


def test_without_runs_the_table_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.jsonl"
    assert call(monkeypatch, "--table", "--keep", str(kept)) == 2
    assert capfd.readouterr().err == f"error: {kept} has no runs; leave out --table to run them\n"


def make_line(run: str, before: str, after: str) -> dict[str, Any]:
    return {"run": run, "outcomes_before": before, "outcomes_after": after}


def test_the_gain_is_over_the_better_of_base_and_form_baseline_on_the_same_sums() -> None:
    base, form = "0001" * 10, "0011" * 10
    exact = make_line("digits/0", base, "1111" * 10)
    lines = [make_line("form/0", base, form), exact]
    gain = gain_over_baseline(exact, lines)
    assert gain is not None
    assert gain[0] == 50.0
    assert gain[1] < 50.0 < gain[2]
    worse = gain_over_baseline(exact, [make_line("form/0", base, "0000" * 10), exact])
    assert worse is not None
    assert worse[0] == 75.0
    assert gain_over_baseline(exact, [exact]) is None
    assert gain_over_baseline(lines[0], lines) is None


def test_outcomes_are_right_answers_in_the_order_of_the_sums() -> None:
    records = [
        EpisodeRecord(
            task="sum",
            start=start,
            seed=0,
            weights=0,
            member=0,
            value=1.0,
            parts={"success": success},
        )
        for start, success in ((2, 0.0), (0, 1.0), (1, 0.0))
    ]
    assert outcomes(records) == "100"  # the form alone earns 1, and is no success


BUSY = "import time\nwhile time.process_time() < {}: pass"

WITH_CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', '''{BUSY}'''])"


def test_the_seconds_of_children_and_of_earlier_calls_are_counted(tmp_path: Path) -> None:
    counted = tmp_path / "cpu_seconds"
    command = [sys.executable, "-c", WITH_CHILD.format(0.5)]
    first = run_counted(command, counted, limit_s=60.0)
    assert first >= 0.5
    second = run_counted(command, counted, limit_s=60.0)
    assert second >= first + 0.5
    assert read_counted(counted) == pytest.approx(second, abs=0.01)


def test_a_command_above_its_limit_is_stopped_and_one_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.counted_cpu.POLL_S", 0.1)
    with pytest.raises(CpuLimitExceeded, match="expected at most 1; take fewer updates"):
        run_counted([sys.executable, "-c", BUSY.format(600)], tmp_path / "long", limit_s=1.0)
    with pytest.raises(subprocess.CalledProcessError):
        run_counted([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "failed", limit_s=9.0)


TASKS = ("libero_goal/7", "libero_goal/8")


def record(task: str, start: int, value: float) -> EpisodeRecord:
    return EpisodeRecord(
        task=task, start=start, seed=0, weights=0, member=0, value=value, parts={"steps": 80.0}
    )


def keep_run(path: Path, name: str, before: dict[str, str], after: dict[str, str]) -> None:
    line: dict[str, Any] = {
        "run": name,
        "outcomes_before": before,
        "outcomes_after": after,
        "env_steps": 12345,
        "cpu_seconds": 1678,
    }
    keep(path, line, lambda line: str(line["run"]))


def test_outcomes_are_of_each_task_in_the_order_of_its_starts() -> None:
    records = [record(TASKS[0], start, value) for start, value in ((42, 0.0), (40, 1.0), (41, 1.0))]
    records.append(record(TASKS[1], 40, 0.0))
    assert list_outcomes(records) == {TASKS[0]: "110", TASKS[1]: "0"}


def test_the_table_counts_all_starts_of_all_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.jsonl"
    keep_run(kept, "ppo/0", dict.fromkeys(TASKS, "1000"), {TASKS[0]: "1111", TASKS[1]: "1100"})
    monkeypatch.setattr(sys, "argv", ["flow_libero", "--table", "--keep", str(kept)])
    assert flow_libero.main() == 0
    *table, last = capfd.readouterr().out.splitlines()
    assert table[-1].startswith(
        "| ppo/0 | 12,345 | 1,678 | 25.0 (7 to 59) | 75.0 (41 to 93) | +50.0 |"
    )
    assert table[-1].endswith("| 1 to 4 of 4 | 1 to 2 of 4 |")
    figures = json.loads(last)
    assert (figures["before"], figures["after"], figures["gain"]) == ([25.0], [75.0], [50.0])
    assert flow_libero.__doc__ is not None
    assert all(f"`{name}`" in flow_libero.__doc__ for name in figures)


@pytest.mark.parametrize("benchmark", [flow_libero, flow_reach])
def test_without_runs_the_table_of_flow_policies_is_one_error(
    benchmark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    kept = tmp_path / "kept.jsonl"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--table", "--keep", str(kept)])
    assert benchmark.main() == 2
    assert capfd.readouterr().err == f"error: {kept} has no runs; leave out --table to run them\n"


RECIPES: dict[str, Any] = {
    "dagger_libero": DaggerLiberoConfig,
    "off_policy_libero": OffPolicyLiberoConfig,
    "srpo_libero": SrpoLiberoConfig,
}

LINE = {
    "run": "dagger/0",
    "outcomes_before": {"libero_goal/7": "10" * 10, "libero_object/1": "0" * 20},
    "outcomes_after": {"libero_goal/7": "11" * 10, "libero_object/1": "0" * 15 + "1" * 5},
    "env_steps": 23456,
    "cpu_seconds": 1678,
}


@pytest.mark.parametrize("method", off_policy_proof.METHODS)
def test_the_options_of_every_run_are_options_of_its_recipe(method: str) -> None:
    planned = off_policy_proof.METHODS[method]
    samples = ("--replay.from", "data")
    source = samples if planned.learns_from_samples else off_policy_proof.STARTS
    arguments = ["--run.seed", "1", *source, *planned.options]
    config = parse_command(TrainingLaunch, RECIPES[planned.recipe], "", arguments).config
    assert config.run.seed == 1


def test_an_evaluation_is_of_the_demos_tasks_and_a_stopped_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    def run(command: Sequence[str], counted: Path, limit_s: float) -> float:
        called.append(list(command[3:]))
        return 1.0

    monkeypatch.setattr(off_policy_proof, "run_counted", run)
    counted = tmp_path / "cpu_seconds"
    off_policy_proof.evaluate("shipped", tmp_path, off_policy_proof.GREEDY, counted)
    configs = [parse_command(EvalLaunch, EvalLiberoConfig, "", each).config for each in called]
    found = [(*each.suites, each.tasks, each.init_states, each.temperature) for each in configs]
    assert found == [
        ("libero_object", "1,6", "40-49,1000-1023", None),
        ("libero_goal", "7", "40-49,1000-1023", None),
    ]
    for suite in off_policy_proof.SUITES:
        (tmp_path / suite / "eval-1").mkdir(parents=True)
    (tmp_path / "libero_object" / "eval-1" / "results.json").touch()
    called.clear()
    off_policy_proof.evaluate("shipped", tmp_path, off_policy_proof.GREEDY, counted)
    assert called == [["--resume", str(tmp_path / "libero_goal" / "eval-1")]]


def test_a_gain_has_an_interval_over_the_same_starts_and_all_control_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.jsonl"
    keep(kept, LINE, lambda line: str(line["run"]))
    monkeypatch.setattr(sys, "argv", ["off_policy_proof", "--table", "--keep", str(kept)])
    assert off_policy_proof.main() == 0
    *table, last = capfd.readouterr().out.splitlines()
    assert table[-1].startswith(
        "| dagger/0 | 23,456 | 1,678 | 25 (14 to 40) | 62 (47 to 76) | +38 ("
    )
    assert table[-1].endswith("libero_goal/7 10 to 20 of 20, libero_object/1 0 to 5 of 20 |")
    figures = json.loads(last)
    assert figures["gain"] == [37.5]
    assert 15 < figures["gain_low"][0] < 37.5 < figures["gain_high"][0] < 60
    assert off_policy_proof.__doc__ is not None
    assert all(f"`{name}`" in off_policy_proof.__doc__ for name in figures)
