"""The benchmark of what held-out evaluations report uses the choice and the stop of a run."""

import json
import sys

import numpy as np
import pytest

from benchmarks import held_out_report
from benchmarks.held_out_report import bias_points, coverage, report_of, stop_after


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
