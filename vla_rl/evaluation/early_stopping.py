"""Early stopping: whether the held-out evaluations of a run show that it no longer gains.

The trend is the slope of the least-squares line through the last few evaluations. A run is stopped
if its trend is below 2 points an evaluation, and noise alone explains that too rarely:

    trend + z * error of the trend < 0.02

z is chosen so that a policy that does gain 2 points an evaluation over 20 evaluations is stopped in
at most 5 % of runs. The trend is that of as many evaluations as its error needs: patience + 1 with
many starts, more with few.
"""

import math
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist
from typing import Final

Evaluated = tuple[float, int]
"""Number of successes and of starts of one evaluation; the sum of the scores, from 0 to 1 each, if
episodes are graded."""

GAIN: Final = 0.02
"""Gain an evaluation below which a run is stopped: 2 points."""

NUM_EVALUATIONS: Final = 20
"""Number of evaluations after the first one over which a run that gains is rarely stopped."""

FALSE_STOPS: Final = 0.042
"""Share of runs that gain and are stopped over that many evaluations, at most. Windows that overlap
make it smaller; below 0.05, because successes are not exactly normal."""

POWER: Final = 0.8
"""Share of runs without gain that are stopped at the first window after their last gain, at least."""

FEWEST_TESTS: Final = 5
"""Number of tests that the error is shared among at least, so that long windows of longer runs
decide with care as well."""

_NORMAL: Final = NormalDist()


def trend_window(num_starts: int, patience: int) -> int:
    """Return the number of evaluations that the trend is taken over.

    It is patience + 1, or as many as are needed to tell no gain from 2 points an evaluation, at the
    success rate with the most noise, one half.
    """
    return max(patience + 1, _smallest_window(num_starts))


def has_stopped_gaining(evaluations: Sequence[Evaluated], patience: int) -> bool:
    """Return whether the newest evaluations show a gain below 2 points an evaluation.

    Args:
        evaluations: all evaluations of a run in order, on the same starts or on others.
        patience: number of evaluations without gain after which the run stops at the earliest.
    """
    if not evaluations:
        return False
    window = trend_window(min(starts for _, starts in evaluations), patience)
    if len(evaluations) < window:
        return False
    newest = evaluations[-window:]
    offsets = [number - (window - 1) / 2 for number in range(window)]
    squares = sum(offset * offset for offset in offsets)
    trend = sum(x * total / starts for x, (total, starts) in zip(offsets, newest, strict=True))
    # the rate of all of them, with a success and a failure more: an error of 0 would claim certainty
    rate = (sum(total for total, _ in newest) + 1) / (sum(starts for _, starts in newest) + 2)
    rate = min(max(rate, 0.0), 1.0)
    variance = sum(
        x * x * rate * (1 - rate) / starts for x, (_, starts) in zip(offsets, newest, strict=True)
    )
    return trend + _quantile(window) * math.sqrt(variance) < GAIN * squares


def describe_noise(num_starts: int, patience: int) -> str | None:
    """Return after how many evaluations a run stops, if noise makes it more than twice `patience`;
    else None.
    """
    needed = trend_window(num_starts, patience) - 1
    if needed <= 2 * patience:
        return None
    return (
        f"--held-out.stop-after {patience}: {num_starts} starts are too few to tell within "
        f"{2 * patience} evaluations whether a policy still gains 2 points an evaluation; the run "
        f"stops after {needed} evaluations without gain"
    )


@cache
def _smallest_window(num_starts: int) -> int:
    window = 2
    while GAIN / _error(num_starts, window) < _quantile(window) + _NORMAL.inv_cdf(POWER):
        window += 1
    return window


def _error(num_starts: int, window: int) -> float:
    """Return the standard error of the trend of a policy that solves half of the starts."""
    squares = window * (window * window - 1) / 12
    return math.sqrt(0.25 / num_starts / squares)


def _quantile(window: int) -> float:
    """Return the quantile of one test, so that all tests of a run have `FALSE_STOPS` together."""
    num_tests = max(NUM_EVALUATIONS + 2 - window, FEWEST_TESTS)
    return _NORMAL.inv_cdf(1 - FALSE_STOPS / num_tests)
