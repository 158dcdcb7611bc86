"""Simulate what a run reports of the checkpoint that it chose, and when it stops early.

    python -m benchmarks.held_out_report [--runs 10000] [--seed 0]

Simulates evaluations of policies whose success rate is known, with outcomes that do not depend on
each other. Choice, report, interval and early stopping are those that a training run uses.

Report: a policy that solves 80 % is evaluated 5, 9 and 17 times on 40 and 102 starts; the best
evaluation chooses, and other starts, as many, report it.

Stop: policies that gain 2 points an evaluation over 20 evaluations after the first one, from several
rates on (47 % is that of the shipped policy), and policies that have stopped gaining: from the first
evaluation on, or after ten evaluations that gained.

Keys of the last line: `bias_points`, the mean of what is reported minus the truth (goal: at most
0.5), and `coverage`, the share of its 95 % intervals that hold the truth (goal: at least 0.925), both
of the worst case; `chose_bias_points` and `chose_coverage`, the same of the evaluation that chose;
`healthy_runs_stopped`, the share of runs that gain and are stopped (goal: at most 0.05), worst over
patience, starts and rates; `plateau_stopped_in_time`, the share of runs without gain that are
stopped within twice their patience with 102 starts and patience 5, and with 40 and 8 (goal: at least
0.8), worst over both, and over rates; `runs`, the number of simulated runs of each case.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from benchmarks.interleaved import print_json_line, print_table
from vla_rl.evaluation.held_out_curve import (
    CurvePoint,
    choose,
    make_curve,
)
from vla_rl.evaluation.held_out_schedule import has_stopped_gaining, trend_window
from vla_rl.evaluation.tables import Mean, compute_mean

MEASURE: Final = "success_rate"
TRUTH: Final = 0.8
EVALUATIONS: Final = (5, 9, 17)
STARTS: Final = (40, 102)

GAIN: Final = 0.02
NUM_GAINS: Final = 20
FIRST_RATES: Final = (0.1, 0.3, 0.47, 0.6)
"""Success rates of the first evaluation; from 60 % on, the last one has 100 %."""

PATIENCES: Final = (1, 2, 3, 5, 8, 12)
SIZES: Final = (20, 40, 102, 200, 500, 2000)
IN_TIME: Final = ((102, 5), (40, 8))
"""Starts and patience of the runs that have to stop within twice their patience."""

PLATEAUS: Final = (0.3, 0.5, 0.67, 0.8, 0.9)


class Reported(NamedTuple):
    """The best checkpoint of one simulated run."""

    report: Mean
    chose: Mean


def evaluation(version: int, rate: float, starts: int, draw: np.random.Generator) -> CurvePoint:
    """Return an evaluation of a policy that solves each start with this chance."""
    outcomes = (draw.random(starts) < rate).astype(float).tolist()
    return CurvePoint(version, compute_mean(outcomes, MEASURE), {})


def report_of(num: int, starts: int, draw: np.random.Generator) -> Reported:
    """Return what a run with `num` evaluations reports of its best checkpoint."""
    chose = [evaluation(version, TRUTH, starts, draw) for version in range(num)]
    chosen = choose(chose)
    assert chosen is not None
    report = [evaluation(chosen.weights, TRUTH, starts, draw)]
    best = make_curve(MEASURE, chose, report).best
    assert best is not None
    assert best.report is not None
    return Reported(best.report, best.chose)


def bias_points(means: Sequence[Mean]) -> float:
    """Return the mean error in points."""
    return 100 * (float(np.mean([each.mean for each in means])) - TRUTH)


def coverage(means: Sequence[Mean]) -> float:
    """Return the share of the intervals that hold the truth."""
    return float(np.mean([each.low <= TRUTH <= each.high for each in means]))


def describe(means: Sequence[Mean]) -> str:
    """Return the error of means and the coverage of their intervals."""
    return f"{bias_points(means):+.2f} points, intervals hold in {coverage(means):.3f}"


def stop_after(
    rates: Sequence[float], starts: int, patience: int, draw: np.random.Generator
) -> int | None:
    """Return the number of evaluations after which a run is stopped; None if it never is."""
    counts = draw.binomial(starts, np.clip(rates, 0.0, 1.0)).tolist()
    found = [(float(count), starts) for count in counts]
    return next(
        (
            num
            for num in range(trend_window(starts, patience), len(found) + 1)
            if has_stopped_gaining(found[:num], patience)
        ),
        None,
    )


def stopped_while_gaining(
    starts: int, patience: int, first: float, runs: int, draw: np.random.Generator
) -> float:
    """Return the share of runs that gain evenly and are stopped."""
    rates = [first + GAIN * number for number in range(NUM_GAINS + 1)]
    stops = [stop_after(rates, starts, patience, draw) for _ in range(runs)]
    return sum(each is not None for each in stops) / runs


def stopped_in_time(
    starts: int, patience: int, rate: float, num_gains: int, runs: int, draw: np.random.Generator
) -> float:
    """Return the share of runs that are stopped within twice their patience after their last gain,
    out of those that were not stopped before.
    """
    gaining = [rate - GAIN * number for number in range(num_gains, 0, -1)]
    rates = [*gaining, *[rate] * (2 * patience + 1)]
    stops = [stop_after(rates, starts, patience, draw) for _ in range(runs)]
    reached = [each for each in stops if each is None or each > num_gains]
    return sum(each is not None for each in reached) / len(reached)


def distinct_cases() -> Iterator[tuple[int, int]]:
    """Yield starts and patience, without those that decide as another patience does, or never within
    the evaluations.
    """
    for starts in SIZES:
        by_window = {trend_window(starts, each): each for each in reversed(PATIENCES)}
        for window, patience in sorted(by_window.items()):
            if window <= NUM_GAINS + 1:
                yield starts, patience


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=10_000, help="simulated runs of each case")
    parser.add_argument("--seed", type=int, default=0, help="seed of the outcomes")
    options = parser.parse_args()
    if options.runs < 1:
        parser.error(f"--runs is {options.runs}, expected at least 1")
    draw, runs = np.random.default_rng(options.seed), options.runs

    reports: dict[str, list[Reported]] = {
        f"{num} evaluations, {starts} starts": [report_of(num, starts, draw) for _ in range(runs)]
        for starts in STARTS
        for num in EVALUATIONS
    }
    rows: dict[str, object] = {
        case: f"report {describe([each.report for each in found])}; "
        f"chose {describe([each.chose for each in found])}"
        for case, found in reports.items()
    }
    print_table(f"A policy that solves {100 * TRUTH:.0f} %", rows)

    gaining = {
        (starts, patience): max(
            stopped_while_gaining(starts, patience, first, runs, draw) for first in FIRST_RATES
        )
        for starts, patience in distinct_cases()
    }
    title = "Share of runs that gain 2 points an evaluation and are stopped, worst starting rate"
    print_table(
        title,
        {
            f"{starts} starts, patience {patience}: {trend_window(starts, patience)} evaluations": share
            for (starts, patience), share in gaining.items()
        },
    )
    plateau = {
        (starts, patience): min(
            stopped_in_time(starts, patience, rate, num_gains, runs, draw)
            for rate in PLATEAUS
            for num_gains in (0, 10)
        )
        for starts, patience in IN_TIME
    }
    print_table(
        "Share of runs without gain that are stopped within twice their patience, worst rate",
        {f"{starts} starts, patience {each}": share for (starts, each), share in plateau.items()},
    )
    print_json_line(
        {
            "bias_points": max(
                abs(bias_points([each.report for each in found])) for found in reports.values()
            ),
            "coverage": min(
                coverage([each.report for each in found]) for found in reports.values()
            ),
            "chose_bias_points": max(
                bias_points([each.chose for each in found]) for found in reports.values()
            ),
            "chose_coverage": min(
                coverage([each.chose for each in found]) for found in reports.values()
            ),
            "healthy_runs_stopped": max(gaining.values()),
            "plateau_stopped_in_time": min(plateau.values()),
            "runs": runs,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
