"""Held-out episodes of a run: first results of another run, and the curve with its choice."""

import json
from pathlib import Path

import pytest
from evaluated import as_lines, evaluated, scored, write_records

from vla_rl.errors import ConfigError
from vla_rl.evaluation import EpisodeRecord, HeldOutEvaluator
from vla_rl.evaluation.held_out import conditions_path
from vla_rl.evaluation.held_out_curve import (
    choose,
    curve_path,
    curve_points,
    make_curve,
    read_curve,
    write_curve,
)
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule
from vla_rl.evaluation.records import SCORES
from vla_rl.reporting import RunDirectory
from vla_rl.types import Config, EnvSpec, EpisodeSpec, Sampling


def driving_episodes(num: int = 3, version: str = "epdms_v2") -> list[EpisodeSpec]:
    return [
        EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=EnvSpec(id="vla_rl/driving-v0", kwargs={"version": version}),
            task="driving",
            options={"init_state_id": number},
            sampling=Sampling(greedy=True),
            seed=0,
            policy_seed=0,
        )
        for number in range(num)
    ]


@pytest.fixture
def other_run(tmp_path: Path) -> RunDirectory:
    """A run of policy p whose weights 0 and 4 have run three starts."""
    run = RunDirectory.create(tmp_path, "other", Config(), {"policy_digest": "p"})
    records = [scored(weights, start, 0.1 * start) for weights in (0, 4) for start in (2, 0, 1)]
    write_records(run.path / SCORES.file, records)
    evaluator = HeldOutEvaluator(driving_episodes(), format=SCORES)
    conditions_path(run).write_text(json.dumps(evaluator.conditions))
    return run


def evaluator_with_first_results(
    other_run: RunDirectory, wanted: list[EpisodeSpec] | None = None, policy: str = "p"
) -> HeldOutEvaluator:
    schedule = HeldOutSchedule(first_results_of=str(other_run.path))
    return HeldOutEvaluator(
        wanted or driving_episodes(), schedule=schedule, format=SCORES, policy_digest=policy
    )


def test_a_run_begins_with_the_first_results_of_another(
    other_run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory.create(tmp_path, "new", Config())
    file = evaluator_with_first_results(other_run).open_report(run)
    assert not file.list_missing(driving_episodes(), weights=0)
    assert len(file.list_missing(driving_episodes(), weights=4)) == 3
    assert file.records == [scored(0, start, 0.1 * start) for start in range(3)]
    assert file.path.read_bytes() == as_lines(file.records)
    assert (
        capsys.readouterr().out
        == f"the 3 held-out results of the first weights in {SCORES.file} are those of {other_run.path}\n"
    )


def test_a_resumed_run_keeps_its_own_results(other_run: RunDirectory, tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "new", Config())
    write_records(run.path / SCORES.file, [scored(0, 1, 0.7)])
    file = evaluator_with_first_results(other_run).open_report(run)
    assert file.records == [scored(0, 1, 0.7)]


@pytest.mark.parametrize(
    ("policy", "wanted", "words"),
    [
        ("q", driving_episodes(), "started from the policy with the digest p, expected q"),
        ("", driving_episodes(), "this recipe makes its policy anew in each run"),
        ("p", driving_episodes(version="pdms_v1"), "version is 'pdms_v1' now"),
        ("p", driving_episodes(5), "lacks 2 of 5 held-out episodes of the first weights"),
    ],
    ids=["another policy", "a policy made anew", "other conditions", "other starts"],
)
def test_a_run_that_does_not_fit_is_refused_before_anything_starts(
    other_run: RunDirectory, policy: str, wanted: list[EpisodeSpec], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        evaluator_with_first_results(other_run, wanted, policy)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the folder of a run"):
        evaluator_with_first_results(RunDirectory(tmp_path))


def test_results_without_their_conditions_are_refused(other_run: RunDirectory) -> None:
    conditions_path(other_run).unlink()
    with pytest.raises(ConfigError, match="expected the conditions of the results next to it"):
        evaluator_with_first_results(other_run)


KEYS = [("toy/0", start, 0, 0) for start in range(4)]


def successes(weights: int, *values: float) -> list[EpisodeRecord]:
    return [
        evaluated("toy/0", start, value > 0, weights=weights) for start, value in enumerate(values)
    ]


def test_scores_have_the_mean_and_the_bootstrap_interval_of_their_total() -> None:
    found = [
        scored(4, start, total, comfort=1.0) for start, total in enumerate((0.0, 0.5, 0.5, 1.0))
    ]
    (point,) = curve_points(found, [("", start, 0, 0) for start in range(4)], "score")
    curve = make_curve("score", [point])
    # the means of four drawn from these are k/8; 2.5 % of the 256 draws have at most .125 as theirs
    assert point.all == (4, 0.5, 0.125, 0.875)
    assert curve.describe(point.all) == "score 0.500 (95 %: 0.125 to 0.875) over 4 starts"
    assert curve.metrics_of(point)["held_out/score"] == 0.5


def test_the_earliest_of_equals_is_the_best() -> None:
    found = [
        *successes(0, 1, 0, 0, 0),
        *successes(2, 1, 1, 0, 0),
        *successes(4, 0, 0, 1, 1),
        *successes(6, 1, 0, 0, 0),
    ]
    best = choose(curve_points(found, KEYS, "success_rate"))
    assert best is not None
    assert best.weights == 2


def test_the_best_has_its_report_first_then_what_chose_it() -> None:
    chose = curve_points(
        [*successes(0, 1, 0, 0, 0), *successes(4, 1, 1, 1, 1)], KEYS, "success_rate"
    )
    report = curve_points(
        [*successes(0, 0, 0, 0, 0), *successes(4, 1, 1, 0, 0)], KEYS, "success_rate"
    )
    best = make_curve("success_rate", chose, report).best
    assert best is not None
    assert best.report is not None
    assert (best.weights, best.report.mean, best.chose.mean) == (4, 0.5, 1.0)
    unreported = make_curve("success_rate", chose, report[:1]).best
    assert unreported is not None
    assert unreported.report is None


def test_only_the_first_weights_the_best_and_the_newest_are_reported() -> None:
    every = [
        record for version in (0, 2, 4, 6) for record in successes(version, 1, 0, 0, version == 4)
    ]
    points = curve_points(every, KEYS, "success_rate")
    curve = make_curve("success_rate", points, points)
    assert [point.weights for point in curve.report] == [0, 4, 6]


def test_episodes_that_are_not_held_out_any_more_do_not_count() -> None:
    found = successes(0, 1, 1, 0, 0)
    (point,) = curve_points(found, KEYS[:2], "success_rate")
    assert (point.all.episodes, point.all.mean) == (2, 1.0)
    assert curve_points(found, [*KEYS, ("toy/0", 9, 0, 0)], "success_rate") == ()
    assert choose(curve_points([], [], "success_rate")) is None


def test_a_curve_is_read_as_it_was_written_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "curve", Config())
    assert read_curve(run) is None
    points = curve_points(successes(0, 1, 1, 0, 0), KEYS, "success_rate")
    curve = make_curve("success_rate", points, points, skipped=[2])
    write_curve(run, curve)
    assert read_curve(run) == curve
    curve_path(run).write_text("{")
    with pytest.raises(ConfigError, match=r"held_out_curve.json cannot be read.*remove it"):
        read_curve(run)
