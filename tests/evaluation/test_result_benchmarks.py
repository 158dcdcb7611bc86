"""Figures that the benchmarks of results make of finished runs, and of runs that are drawn."""

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluated import evaluated, write_records

from benchmarks import demo_result, held_out_report, rollout_result
from benchmarks.held_out_report import bias_points, coverage, report_of, stop_after
from benchmarks.kept_runs import kept_lines
from vla_rl.evaluation import EpisodeRecord
from vla_rl.evaluation.held_out import conditions_path
from vla_rl.evaluation.held_out_curve import CurvePoint, make_curve, write_curve
from vla_rl.evaluation.records import SUCCESSES
from vla_rl.evaluation.tables import compute_mean
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.train_toy import TrainToyConfig
from vla_rl.reporting import RunDirectory
from vla_rl.types import Config


def a_finished_run(root: Path, records: list[EpisodeRecord], assets: str = "wheels") -> Path:
    """A run whose last held-out episode ended nine minutes after its start."""
    run = RunDirectory.create(root, "demo", Config(), {"assets": assets})
    write_records(run.path / SUCCESSES.file, records)
    conditions_path(run).write_text('{"physics": "exact", "quality": "fast"}')
    update = {
        "update": 1, "wall_time_s": 60.0, "time/update_s": 30.0, "rollout/success_rate": 0.5,
        "simulation/leases": len(records) + 32.0,
    }  # fmt: skip
    run.metrics.write_text(json.dumps(update) + "\n")
    began = datetime.fromisoformat(
        json.loads((run.path / "versions.json").read_text())["started_at"]
    )
    os.utime(run.path / SUCCESSES.file, (began.timestamp() + 540,) * 2)
    return run.path


def result_of(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    monkeypatch.setattr(sys, "argv", ["demo_result", str(run)])
    assert demo_result.main() == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_points_of_a_run_are_gained_on_the_starts_that_both_policies_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [evaluated(start=start, is_success=start < 30, weights=0) for start in range(100)]
    results += [evaluated(start=start, is_success=start < 75, weights=20) for start in range(100)]
    results += [
        evaluated(start=100, is_success=True, weights=20)
    ]  # which the base policy was not tried from
    found = result_of(a_finished_run(tmp_path, results), monkeypatch, capsys)
    assert found == {
        "before": 30.0, "after": 75.0, "points_gained": 45.0, "starts": 100, "updates": 20, "minutes": 9.0,
        "assets": "package", "quality": "fast", "physics": "exact", "seed": None,
    }  # fmt: skip


def test_the_best_checkpoint_has_its_report_first_and_what_chose_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [
        evaluated(start=40, is_success=version > 0, weights=version) for version in (0, 10, 20)
    ]
    run = a_finished_run(tmp_path, results)

    def point(version: int, *outcomes: float) -> CurvePoint:
        return CurvePoint(version, compute_mean(outcomes, "success_rate"), {})

    chose = [point(0, 0, 0), point(10, 1, 1), point(20, 1, 0)]
    curve = make_curve("success_rate", chose, [point(10, 1, 0), point(20, 1, 1)])
    write_curve(RunDirectory(run), curve)
    found = result_of(run, monkeypatch, capsys)
    assert (found["best_weights"], found["best"], found["best_chose"]) == (10, 50.0, 100.0)
    assert list(found)[-3:] == ["best_weights", "best", "best_chose"]


def test_placeholder_assets_are_never_called_packaged_assets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [evaluated(start=40, is_success=True, weights=version) for version in (0, 20)]
    run = a_finished_run(tmp_path, results, assets="stand-ins")
    assert result_of(run, monkeypatch, capsys)["assets"] == "stand-ins"


def test_the_minutes_of_a_resumed_run_are_unknown_because_it_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [evaluated(start=40, is_success=True, weights=version) for version in (0, 20)]
    run = a_finished_run(tmp_path, results)
    RunDirectory.resume(run)
    assert result_of(run, monkeypatch, capsys)["minutes"] is None


def test_few_starts_are_told_with_what_their_rates_are_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [
        evaluated(start=start, is_success=True, weights=version)
        for version in (0, 20)
        for start in range(30)
    ]
    monkeypatch.setattr(sys, "argv", ["demo_result", str(a_finished_run(tmp_path, results))])
    assert demo_result.main() == 0
    assert "30 held-out starts are few: each rate is known to within 17 points" in (
        capsys.readouterr().out
    )


def test_a_run_that_was_evaluated_once_has_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_finished_run(tmp_path, [evaluated(start=40, is_success=True, weights=0)])
    monkeypatch.setattr(sys, "argv", ["demo_result", str(run)])
    assert demo_result.main() == 2
    assert "1 weight versions were evaluated, expected the first and the last" in (
        capsys.readouterr().err
    )


def test_a_kept_run_is_in_the_table_with_every_outcome_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [
        evaluated(start=start, is_success=start == 41, weights=0) for start in (43, 41, 42, 40)
    ]
    results += [
        evaluated(start=start, is_success=start != 43, weights=20) for start in (40, 41, 42, 43)
    ]
    run, data = a_finished_run(tmp_path, results), tmp_path / "demo.jsonl"
    arguments = ["demo_result", str(run), "--keep", str(data), "--note", "alone"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert demo_result.main() == 0
    (line,) = kept_lines(data)
    assert (line["outcomes_before"], line["outcomes_after"], line["note"]) == (
        {"libero_goal/7": "0100"}, {"libero_goal/7": "1110"}, "alone",
    )  # fmt: skip
    assert line["success"] == [0.5]
    assert line["training_minutes"] == 0.5
    assert line["versions"]["torch"]
    assert line["versions"]["hf-libero"]
    capsys.readouterr()

    assert demo_result.main() == 2  # the same seed once more
    assert "expected each once" in capsys.readouterr().err

    monkeypatch.setattr(sys, "argv", ["demo_result", "--table", str(data)])
    assert demo_result.main() == 0
    output = capsys.readouterr().out
    assert "| None | 9 | 25 (5 to 70) | 75 (30 to 95) | 1 to 3 of 4 |" in output
    assert json.loads(output.splitlines()[-1])["points_gained"] == [50.0]

    monkeypatch.setattr(sys, "argv", ["demo_result", "--table", str(data), "--by-task"])
    assert demo_result.main() == 0
    assert capsys.readouterr().out.splitlines()[:4] == [
        "| task | starts | before, % (95 %) | after, % (95 %) |",
        "| --- | --- | --- | --- |",
        "| libero_goal/7 | 4 | 25 (5 to 70) | 75 (30 to 95) |",
        "| **all** | 4 | 25 (5 to 70) | 75 (30 to 95) |",
    ]


def a_run_of_speeds(root: Path, name: str, *steps_per_s: float) -> str:
    """A run with an update for each of these speeds."""
    run = RunDirectory.create(root, name, TrainToyConfig(run=RunConfig(name=name)), {})
    lines = [
        {"update": number, "rollout/env_steps_per_s": speed, "rollout/decisions_per_s": 2.0,
         "rollout/episodes_per_s": 0.5, "rollout/policy_busy_share": 0.25}
        for number, speed in enumerate(steps_per_s, start=1)
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(run.path)


def rollout_status(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rollout_result", *arguments])
    return rollout_result.main()


def test_kept_runs_are_columns_of_the_first_updates_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = str(tmp_path / "kept.jsonl")
    for name, speeds in (("before", (50.0, 9.0)), ("after", (104.5, 9.0))):
        run = a_run_of_speeds(tmp_path, name, *speeds)
        assert rollout_status(monkeypatch, run, "--keep", kept, "--note", name) == 0
    capsys.readouterr()
    assert rollout_status(monkeypatch, "--table", kept) == 0
    *lines, figures = capsys.readouterr().out.splitlines()
    assert lines[0] == "|  | before | after |"
    assert "| control steps/s | 50 | 104 |" in lines
    assert json.loads(figures)["env_steps_per_s"] == [50.0, 104.5]


def test_a_run_that_is_kept_already_or_has_no_update_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = str(tmp_path / "kept.jsonl")
    run = a_run_of_speeds(tmp_path, "one", 50.0)
    assert rollout_status(monkeypatch, run, "--keep", kept) == 0
    assert rollout_status(monkeypatch, run, "--keep", kept) == 2
    assert "already, expected each once" in capsys.readouterr().err
    assert rollout_status(monkeypatch, a_run_of_speeds(tmp_path, "none")) == 2
    assert "no update of" in capsys.readouterr().err


def test_what_chose_is_too_high_and_what_is_reported_is_not() -> None:
    draw = np.random.default_rng(1)
    found = [report_of(9, 40, draw) for _ in range(1500)]
    # 0.063 / sqrt(1500): 0.16 points
    assert abs(bias_points([each.report for each in found])) < 0.7
    assert coverage([each.report for each in found]) > 0.91
    assert 8.0 < bias_points([each.chose for each in found]) < 10.0
    assert coverage([each.chose for each in found]) < 0.80


def test_a_policy_that_always_solves_as_much_is_stopped_and_one_that_gains_is_not() -> None:
    draw = np.random.default_rng(1)
    assert stop_after([0.8] * 21, 500, 5, draw) == 6
    assert stop_after([0.1 + 0.04 * number for number in range(21)], 500, 5, draw) is None


def test_its_last_line_has_the_figures_of_the_worst_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["held_out_report", "--runs", "20"])
    assert held_out_report.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["runs"] == 20
    assert set(found) == {
        "bias_points", "coverage", "chose_bias_points", "chose_coverage", "healthy_runs_stopped",
        "plateau_stopped_in_time", "runs",
    }  # fmt: skip
    assert found["plateau_stopped_in_time"] > 0.6
