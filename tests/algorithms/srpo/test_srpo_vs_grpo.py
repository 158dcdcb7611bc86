"""The comparison of SRPO with GRPO: its test on known examples, its data, and what it refuses to
conclude.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from toy_runs import evaluated, write_records

from benchmarks.pipeline_curves import count_first_evaluated
from benchmarks.srpo_vs_grpo import study
from benchmarks.srpo_vs_grpo.__main__ import main, missing_runs
from benchmarks.srpo_vs_grpo.comparison import (
    episode_ratio,
    obstacles,
    paired_bootstrap,
    report_of,
)
from benchmarks.srpo_vs_grpo.lines import ArmRun, append_run, conditions_path, read_runs

ARMS = list(study.ARMS)


def ttest_1samp(values: Any, mean: float) -> Any:
    import scipy.stats  # here: every worker collects this file

    return scipy.stats.ttest_1samp(values, mean)


def a_run(arm: str = "srpo", seed: int = 0, **changed: Any) -> ArmRun:
    """A run from 100 starts, of which 40 are solved before and 80 after."""
    return ArmRun(**{
        "arm": arm, "seed": seed, "config_digest": "one",
        "before": {"libero_object/1": "1" * 20 + "0" * 30, "libero_object/6": "1" * 20 + "0" * 30},
        "after": {"libero_object/1": "1" * 40 + "0" * 10, "libero_object/6": "1" * 40 + "0" * 10},
        "success": (0.4, 0.5, 0.7, 0.7, 0.7), "episodes": (32, 64, 96, 128, 160),
        "training_minutes": 8.0, "minutes": 12.0, "started_at": "2026-01-01T00:00:00+0000",
        "machine": "two cores", "versions": {"commit": "abc"}, **changed,
    })  # fmt: skip


def solved(number: int) -> dict[str, str]:
    return {"libero_object/1": "1" * number + "0" * (50 - number), "libero_object/6": "0" * 50}


def written(data: Path, runs: list[ArmRun]) -> Path:
    data.write_bytes(b"".join(msgspec.json.encode(run) + b"\n" for run in runs))
    return data


def complete(num_seeds: int) -> list[ArmRun]:
    """All arms of these seeds; ours solves between 8 and 12 starts more than binary reward."""
    return [
        a_run(arm, seed, after=solved(30 + (8 + seed % 5 if arm == "srpo" else 0)))
        for seed in range(num_seeds)
        for arm in ARMS
    ]


def report_in(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_the_bootstrap_agrees_with_students_t_where_that_is_exact() -> None:
    values = np.random.default_rng(3).normal(0.4, 1.0, 40)
    exact = ttest_1samp(values, 0.0)
    low, high = exact.confidence_interval()
    found = paired_bootstrap(values.tolist())
    assert found.mean == pytest.approx(values.mean())
    assert found.p_value == pytest.approx(exact.pvalue, abs=0.01)
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.03)


def test_eight_seeds_without_a_difference_are_rarely_called_different() -> None:
    rng = np.random.default_rng(0)
    called = sum(
        paired_bootstrap(rng.normal(0.0, 1.0, 8).tolist()).p_value < 0.05 for _ in range(200)
    )
    assert called <= 18  # 5 % of 200 are 10; the percentile bootstrap calls 20 to 30


def test_swapping_the_arms_changes_the_sign_and_nothing_else() -> None:
    found, swapped = (
        paired_bootstrap([1.0, 2.0, 5.0, -1.0]),
        paired_bootstrap([-1.0, -2.0, -5.0, 1.0]),
    )
    assert swapped.mean == -found.mean
    assert swapped.p_value == found.p_value
    assert (swapped.low, swapped.high) == pytest.approx((-found.high, -found.low), abs=1.0)


def test_differences_that_are_all_equal_are_told_by_their_signs() -> None:
    assert paired_bootstrap([3.0] * 8) == (3.0, 3.0, 3.0, 2**-7)
    assert paired_bootstrap([0.0] * 8).p_value == 1.0
    with pytest.raises(ValueError, match="1 differences, expected at least 2"):
        paired_bootstrap([3.0])


def test_before_eight_seeds_the_report_concludes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "data.jsonl", [*complete(7), a_run("srpo", 7)])
    assert main(["--report", "--data", str(data)]) == 0
    output = capsys.readouterr().out
    assert "7 of at least 8 seeds" in output
    assert "cannot be concluded" in output
    assert json.loads(output.splitlines()[-1]) == {
        "seeds_per_arm": 7, "held_out_starts": 100, "srpo_minus_grpo_points": None, "ci_low": None,
        "ci_high": None, "p_value": None, "episodes_to_plus_20_ratio": None,
    }  # fmt: skip


def test_with_eight_seeds_the_report_has_the_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(tmp_path / "data.jsonl", complete(8))
    assert main(["--report", "--data", str(data)]) == 0
    report = report_in(capsys)
    assert report["seeds_per_arm"] == 8
    assert report["srpo_minus_grpo_points"] == pytest.approx(9.62, abs=0.01)
    assert report["ci_low"] > 7.0
    assert report["ci_high"] < 12.0
    assert report["p_value"] < 0.01
    assert report["episodes_to_plus_20_ratio"] == 1.0


def test_the_table_has_means_with_intervals_of_all_starts_and_of_each_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, image = written(tmp_path / "data.jsonl", complete(8)), tmp_path / "study.png"
    assert main(["--report", "--data", str(data), "--plot", str(image)]) == 0
    rows = {
        line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines()
        if line.startswith("│ mean, ")
    }  # fmt: skip
    exact = ttest_1samp([38, 39, 40, 41, 42, 38, 39, 40], 0).confidence_interval()
    assert f"39.6 ± {exact.high - 39.625:.1f}" in rows["mean, all"]
    assert f"79.2 ± {2 * exact.high - 79.25:.1f}" in rows["mean, libero_object/1"]
    assert "0.0 ± 0.0" in rows["mean, libero_object/6"]
    assert image.read_bytes().startswith(b"\x89PNG")


def test_a_report_of_no_data_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--report", "--data", str(tmp_path / "none.jsonl")]) == 0
    assert report_in(capsys)["seeds_per_arm"] == 0


def test_few_held_out_starts_are_told_with_what_they_allow_to_conclude() -> None:
    (reason,) = obstacles(num_seeds=8, num_starts=30)
    assert reason.startswith("30 of at least 100 held-out starts")
    assert "within 17 points" in reason
    few = [
        msgspec.structs.replace(run, before={"t": "0" * 30}, after={"t": "1" * 30})
        for run in complete(8)
    ]
    assert report_of(few, ARMS)["p_value"] is None


def test_a_run_that_never_rises_counts_with_all_its_episodes() -> None:
    flat = a_run("grpo", success=(0.4,) * 5)
    # updates 2 to 4 together are the first three in a row that are 20 points above the start
    assert episode_ratio([a_run("srpo"), flat], "srpo", "grpo") == 128 / 160
    early = a_run("srpo", success=(0.4, 0.8, 0.8, 0.8, 0.8))
    assert episode_ratio([early, flat], "srpo", "grpo") == 96 / 160
    assert episode_ratio([flat, early], "grpo", "srpo") == 160 / 96


def test_episodes_that_lack_borrowed_held_out_starts_are_read_with_them(tmp_path: Path) -> None:
    short = a_run("srpo", 0, episodes=(-68, -36, -4, 28, 60))
    data = written(tmp_path / "data.jsonl", [short, a_run("grpo", 0)])
    read, right = read_runs(data)
    assert read.episodes == (32, 64, 96, 128, 160) == right.episodes


@pytest.mark.parametrize(("key_value", "expected"), [(None, 2), ("another", 0)])
def test_only_held_out_episodes_that_a_run_ran_itself_are_no_training_episodes(
    tmp_path: Path, key_value: str | None, expected: int
) -> None:
    config = {"held_out": {"first_results_of": key_value}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    records = [
        evaluated(start=start, weights=weights) for start, weights in ((0, 0), (1, 0), (0, 1))
    ]
    write_records(tmp_path / "held_out.jsonl", records)
    assert count_first_evaluated(tmp_path) == expected


def test_arms_are_brought_to_the_same_seeds_before_a_new_one_begins() -> None:
    runs = [a_run("grpo", 0), a_run("srpo", 0), a_run("srpo_released", 0), a_run("srpo", 4)]
    assert missing_runs(runs, ARMS, [1, 4, 0]) == [
        (4, "grpo"), (4, "srpo_released"), (1, "grpo"), (1, "srpo"), (1, "srpo_released"),
    ]  # fmt: skip


def test_what_is_there_is_not_run_again_and_each_finished_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, started = written(tmp_path / "data.jsonl", [a_run("grpo", 0)]), []

    def run_arm(arm: str, seed: int, digest: str, first: Path) -> ArmRun:
        started.append((arm, seed))
        if arm == "srpo_released":
            raise OSError("the machine went away")
        return a_run(arm, seed)

    monkeypatch.setattr(study, "conditions", dict)
    monkeypatch.setattr(study, "run_arm", run_arm)
    assert main(["--seeds", "0", "--data", str(data)]) == 2
    assert main(["--seeds", "0", "--data", str(data)]) == 2
    assert started == [("srpo", 0), ("srpo_released", 0), ("srpo_released", 0)]
    assert [(run.arm, run.seed) for run in read_runs(data)] == [("grpo", 0), ("srpo", 0)]


def test_no_run_begins_that_would_not_fit_into_the_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once_busy = a_run("grpo", 1, minutes=65.0)
    recent = [a_run(arm, 0) for arm in study.ARMS]  # which took 12 minutes each
    data = written(tmp_path / "data.jsonl", [once_busy, *recent])
    monkeypatch.setattr(study, "conditions", dict)
    assert main(["--minutes", "11", "--data", str(data)]) == 0
    assert "11 minutes are left and a run takes 12: stopping" in capsys.readouterr().out


def test_a_study_under_other_conditions_is_not_added_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data.jsonl"
    conditions_path(data).write_text('{"updates": 12}')
    monkeypatch.setattr(study, "conditions", lambda: {"updates": 20})
    assert main(["--data", str(data)]) == 2
    assert "updates is 20 now, but" in capsys.readouterr().err
    assert not data.exists()


def test_seeds_that_repeat_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1", "1"]) == 2
    data = written(tmp_path / "data.jsonl", [a_run("srpo", 3), a_run("srpo", 3)])
    assert main(["--report", "--data", str(data)]) == 2
    assert "srpo with seed 3 twice" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"config_digest": "two"}, r"srpo, seed 1, has other conditions \(two\) than srpo, seed 0"),
        ({"after": {"libero_object/1": "1"}}, "was evaluated from other starts"),
    ],
)
def test_runs_that_cannot_be_compared_are_never_appended(
    other: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    append_run(data, a_run())
    with pytest.raises(ValueError, match=message):
        append_run(data, a_run(seed=1, **other))
    append_run(data, a_run(seed=1))
    assert read_runs(data) == [a_run(), a_run(seed=1)]


def test_every_held_out_start_is_read_once() -> None:
    def line(start: int, version: int, *, success: bool) -> dict[str, Any]:
        return {
            "weight_version": version,
            "task": "t",
            "init_state_id": start,
            "is_success": success,
        }

    records = [line(41, 0, success=False), line(40, 0, success=True), line(40, 12, success=True)]
    assert study.outcomes_of(records, 0) == {"t": "10"}
    with pytest.raises(ValueError, match="start 41 of t occurs twice for weights 0"):
        study.outcomes_of([*records, line(41, 0, success=True)], 0)
    with pytest.raises(ValueError, match="weights 7 have no held-out episodes"):
        study.outcomes_of(records, 7)


def test_the_arms_differ_in_their_reward_and_in_nothing_else() -> None:
    grpo, srpo, released = (study.settings_of(arm) for arm in ("grpo", "srpo", "srpo_released"))
    assert differing(srpo, released) == {"srpo"}
    assert differing(srpo, grpo) == {"pipeline", "filter", "reward"}
    assert srpo["tasks"] == ("libero_object/1,6",)
    assert "policy" not in srpo


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in {**one, **other} if one.get(name) != other.get(name)}
