"""The curve of held-out episodes has means over all starts, their intervals, and the best."""

import json
from pathlib import Path

import pytest

from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out_book import HeldOutRow
from vla_rl.evaluation.held_out_curve import (
    choose,
    curve_path,
    make_curve,
    points_of,
    read_curve,
    write_curve,
)
from vla_rl.evaluation.held_out_results import SUCCESSES
from vla_rl.evaluation.scored import SCORES
from vla_rl.reporting import RunDirectory
from vla_rl.types import Config

KEYS = [("toy/0", start, 0) for start in range(4)]


def rows(version: int, *values: float) -> list[HeldOutRow]:
    return [HeldOutRow(version, key, value) for key, value in zip(KEYS, values, strict=False)]


def test_scores_have_the_mean_and_the_normal_interval_of_their_total() -> None:
    lines = [
        json.dumps({"weights": 4, "start": start, "total": total, "comfort": 1.0}).encode()
        for start, total in enumerate((0.0, 0.5, 0.5, 1.0))
    ]
    found = [SCORES.row_in(line) for line in lines]
    (point,) = points_of(found, [row.key for row in found], SCORES)
    curve = make_curve("score", [point])
    # deviation sqrt(1/6) = .408, over sqrt(4), times 1.96
    assert (point.all.mean, point.all.high - 0.5) == (0.5, pytest.approx(0.400, abs=1e-3))
    assert curve.describe(point.all) == "score 0.500 ± 0.400 over 4 starts"
    assert curve.metrics_of(point)["held_out/score"] == 0.5
    with pytest.raises(ValueError, match="expected weights, start and total"):
        SCORES.row_in(b'{"weights": 4}')


def test_the_earliest_of_equals_is_the_best() -> None:
    found = [*rows(0, 1, 0, 0, 0), *rows(2, 1, 1, 0, 0), *rows(4, 0, 0, 1, 1), *rows(6, 1, 0, 0, 0)]
    best = choose(points_of(found, KEYS, SUCCESSES))
    assert best is not None
    assert best.weights == 2


def test_the_best_has_its_report_first_and_what_chose_it_beside_it() -> None:
    chose = points_of([*rows(0, 1, 0, 0, 0), *rows(4, 1, 1, 1, 1)], KEYS, SUCCESSES)
    report = points_of([*rows(0, 0, 0, 0, 0), *rows(4, 1, 1, 0, 0)], KEYS, SUCCESSES)
    best = make_curve("success_rate", chose, report).best
    assert best is not None
    assert best.report is not None
    assert (best.weights, best.report.mean, best.chose.mean) == (4, 0.5, 1.0)
    unreported = make_curve("success_rate", chose, report[:1]).best
    assert unreported is not None
    assert unreported.report is None


def test_only_the_first_weights_the_best_and_the_newest_are_reported() -> None:
    every = [row for version in (0, 2, 4, 6) for row in rows(version, 1, 0, 0, version == 4)]
    points = points_of(every, KEYS, SUCCESSES)
    curve = make_curve("success_rate", points, points)
    assert [point.weights for point in curve.report] == [0, 4, 6]


def test_episodes_that_are_not_held_out_any_more_do_not_count() -> None:
    found = rows(0, 1, 1, 0, 0)
    (point,) = points_of(found, KEYS[:2], SUCCESSES)
    assert (point.all.episodes, point.all.mean) == (2, 1.0)
    assert points_of(found, [*KEYS, ("toy/0", 9, 0)], SUCCESSES) == ()
    assert choose(points_of([], [], SUCCESSES)) is None


def test_a_curve_is_read_as_it_was_written_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "curve", Config())
    assert read_curve(run) is None
    points = points_of(rows(0, 1, 1, 0, 0), KEYS, SUCCESSES)
    curve = make_curve("success_rate", points, points, skipped=[2])
    write_curve(run, curve)
    assert read_curve(run) == curve
    curve_path(run).write_text("{")
    with pytest.raises(ConfigError, match=r"held_out_curve.json cannot be read.*remove it"):
        read_curve(run)
