"""Figures that the benchmarks of results make of finished runs, of runs that are drawn, of drivers that see nothing."""

import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from toy_runs import evaluated, write_records

import vla_rl.envs  # noqa: F401  # registers ours
from benchmarks import demo_result, driving_result, held_out_report, rollout_result
from benchmarks.driving_blind import above_blind
from benchmarks.driving_blind_loop import FULL_PULL, drive, pull_towards
from benchmarks.driving_senses import with_other_image, with_other_motion
from benchmarks.held_out_report import bias_points, coverage, report_of, stop_after
from benchmarks.kept_runs import kept_lines
from vla_rl.envs.driving.world import draw_world
from vla_rl.evaluation import EpisodeRecord
from vla_rl.evaluation.held_out import conditions_path
from vla_rl.evaluation.held_out_curve import CurvePoint, make_curve, write_curve
from vla_rl.evaluation.records import SUCCESSES
from vla_rl.evaluation.tables import compute_mean
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.grpo_driving import GrpoDrivingConfig
from vla_rl.recipes.srpo_driving_loop import SrpoDrivingLoopConfig
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


def a_finished_drive(root: Path, seed: int = 0, versions: tuple[int, ...] = (0, 60)) -> Path:
    """Six held-out scenes; the last one ended nine minutes after the start."""
    config = GrpoDrivingConfig(run=RunConfig(name="driving", seed=seed))
    run = RunDirectory.create(root, f"driving{seed}", config, {})
    lines = [
        {"weights": version, "start": scene, "total": 0.5 + 0.25 * (version > 0),
         "ego_progress": 0.4, "epdms_v2": 0.3}
        for version in versions
        for scene in range(6)
    ]  # fmt: skip
    scores = run.path / "held_out_scores.jsonl"
    scores.write_text("".join(json.dumps(line) + "\n" for line in lines))
    began = datetime.fromisoformat(
        json.loads((run.path / "versions.json").read_text())["started_at"]
    )
    os.utime(scores, (began.timestamp() + 540,) * 2)
    return run.path


def test_a_kept_run_is_a_row_for_each_score_and_each_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "driving.jsonl"
    for seed in (0, 1):
        run = str(a_finished_drive(tmp_path, seed))
        monkeypatch.setattr(sys, "argv", ["driving_result", run, "--keep", str(kept)])
        assert driving_result.main() == 0
    monkeypatch.setattr(sys, "argv", ["driving_result", "--table", str(kept)])
    capsys.readouterr()
    assert driving_result.main() == 0
    *lines, figures = capsys.readouterr().out.splitlines()
    assert "| total | 0.500 ± 0.000 | 0.750 ± 0.000 | 0.750 ± 0.000 |" in lines
    assert "| ego progress | 0.400 ± 0.000 | 0.400 ± 0.000 | 0.400 ± 0.000 |" in lines
    for kind in {draw_world(scene, "held_out").kind for scene in range(6)}:
        assert any(line.startswith(f"| {kind.replace('_', ' ')} |") for line in lines)
    found = json.loads(figures)
    assert (found["seed"], found["gain"], found["minutes"]) == ([0, 1], [0.25] * 2, [9.0] * 2)


def test_a_run_of_srpo_has_its_own_layouts_and_no_reward_to_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ("tee", "straight")
    config = SrpoDrivingLoopConfig(run=RunConfig(name="closed"), kinds=kinds)
    run = RunDirectory.create(tmp_path, "closed", config, {})
    lines = [
        {"weights": version, "start": drive, "total": 0.5 + 0.25 * (version > 0)}
        for version in (0, 40)
        for drive in range(5)
    ]
    scores = run.path / "held_out_scores.jsonl"
    scores.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["driving_result", str(run.path)])
    assert driving_result.main() == 0
    *table, figures = capsys.readouterr().out.splitlines()
    assert "| tee | 3 | 0.500 ± 0.000 | 0.750 ± 0.000 |" in table
    assert "| straight | 2 | 0.500 ± 0.000 | 0.750 ± 0.000 |" in table
    assert json.loads(figures)["reward"] == "srpo"


def test_a_repeated_seed_and_an_unfinished_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, kept = str(a_finished_drive(tmp_path)), str(tmp_path / "driving.jsonl")
    monkeypatch.setattr(sys, "argv", ["driving_result", run, "--keep", kept])
    assert driving_result.main() == 0
    assert driving_result.main() == 2
    assert "a run with seed 0, reward total" in capsys.readouterr().err
    unfinished = str(a_finished_drive(tmp_path, seed=1, versions=(0,)))
    monkeypatch.setattr(sys, "argv", ["driving_result", unfinished])
    assert driving_result.main() == 2
    assert "expected the first and the last" in capsys.readouterr().err


def test_a_sense_of_another_scene_leaves_the_others_alone() -> None:
    env = gymnasium.make("vla_rl/driving-v0", split="held_out", image_size=32, route_points=2)
    own, other = (env.reset(options={"init_state_id": number})[0] for number in (0, 7))
    image_changed, moved = with_other_image(own, other), with_other_motion(own, other)
    np.testing.assert_array_equal(image_changed["image"], other["image"])
    np.testing.assert_array_equal(image_changed["state"], own["state"])
    np.testing.assert_array_equal(moved["image"], own["image"])
    np.testing.assert_array_equal(moved["state"][:10], other["state"][:10])
    np.testing.assert_array_equal(moved["state"][10:], own["state"][10:])
    assert moved["instruction"] == other["instruction"]


def a_line(after: list[float], reward: str = "total") -> dict[str, object]:
    """A kept run, as far as the comparison reads it."""
    return {
        "seed": 3,
        "updates": 60,
        "version": "pdms_v1",
        "reward": reward,
        "after": {"total": after},
    }


def test_runs_are_compared_scene_by_scene() -> None:
    # the scenes differ by 1, the difference from the blind plan is the same in both
    lines = [a_line([1.0, 0.0]), a_line([0.0], "ego_progress"), a_line([1.5, 0.5], "srpo")]
    assert above_blind(lines, [0.75, -0.25, 0.5]) == {
        "seed": [3, 3], "updates": [60, 60], "above_blind": [0.25, 0.75], "above_blind_half": [0.0] * 2
    }  # fmt: skip


def test_a_run_on_more_scenes_than_the_blind_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="2 scenes, expected at most 1; raise --scenes"):
        above_blind([a_line([1.0, 0.0])], [0.5])


def test_a_driver_brakes_above_the_speed_and_pulls_below_it() -> None:
    assert pull_towards(4.0, 7.0) == -2.0
    assert pull_towards(4.0, 2.5) == 1.0
    assert pull_towards(3.0, 15.0) == -FULL_PULL


@pytest.mark.parametrize(("speed", "reaches_goal"), [(3.5, True), (1.0, False)])
def test_a_slow_driver_arrives_on_a_straight_road_if_its_speed_is_enough(
    speed: float, reaches_goal: bool
) -> None:
    env = gymnasium.make(
        "vla_rl/driving_waypoints-v0",
        split="held_out",
        kind="straight",
        action="along_route",
        image_size=16,
    ).unwrapped
    score, is_success = drive(env, 0, speed)
    assert is_success == reaches_goal
    assert (score == 1.0) == reaches_goal
