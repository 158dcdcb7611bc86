"""Figures that the benchmarks of driving make of finished runs, of other senses, of drivers that see nothing."""

import json
import os
import sys
from datetime import datetime
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import vla_rl.envs  # noqa: F401  # registers ours
from benchmarks import driving_result
from benchmarks.driving_blind import above_blind
from benchmarks.driving_blind_loop import FULL_PULL, drive, pull_towards
from benchmarks.driving_senses import with_other_image, with_other_motion
from vla_rl.envs.driving.world import draw_world
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.grpo_driving import GrpoDrivingConfig
from vla_rl.recipes.srpo_driving_loop import SrpoDrivingLoopConfig
from vla_rl.reporting import RunDirectory


def a_finished_run(root: Path, seed: int = 0, versions: tuple[int, ...] = (0, 60)) -> Path:
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
        run = str(a_finished_run(tmp_path, seed))
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
    run, kept = str(a_finished_run(tmp_path)), str(tmp_path / "driving.jsonl")
    monkeypatch.setattr(sys, "argv", ["driving_result", run, "--keep", kept])
    assert driving_result.main() == 0
    assert driving_result.main() == 2
    assert "a run with seed 0, reward total" in capsys.readouterr().err
    unfinished = str(a_finished_run(tmp_path, seed=1, versions=(0,)))
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


@pytest.mark.parametrize(("speed", "arrives"), [(3.5, True), (1.0, False)])
def test_a_slow_driver_arrives_on_a_straight_road_if_its_speed_is_enough(
    speed: float, arrives: bool
) -> None:
    env = gymnasium.make(
        "vla_rl/driving_waypoints-v0",
        split="held_out",
        kind="straight",
        action="along_route",
        image_size=16,
    ).unwrapped
    score, is_success = drive(env, 0, speed)
    assert is_success == arrives
    assert (score == 1.0) == arrives
