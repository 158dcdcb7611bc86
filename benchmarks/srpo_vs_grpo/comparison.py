"""The test of the study, and what its data allow to conclude. Runs nothing."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from benchmarks.srpo_vs_grpo.lines import ArmRun
from benchmarks.updates_needed import FIGURE, risen
from vla_rl.evaluation.tables import wilson_interval

LEAST_SEEDS: Final = 8
LEAST_STARTS: Final = 100
NUM_RESAMPLES: Final = 20_000
RISE: Final = 0.2
"""Rise of the sampled success rate that `episodes_to_plus_20_ratio` waits for."""


class PairedTest(NamedTuple):
    """The mean of paired differences, with its 95 % interval and two-sided p-value."""

    mean: float
    low: float
    high: float
    p_value: float


def paired_bootstrap(differences: Sequence[float], seed: int = 0) -> PairedTest:
    """Test whether paired differences have the mean 0, by the bootstrap-t (Efron and Tibshirani
    1993, chapter 12).

        t*_b = (mean(d*_b) - mean(d)) / se(d*_b),  d*_b a resample of the n differences
        interval = mean - quantile(t*, .975) se .. mean - quantile(t*, .025) se
        p = share of |t*_b| >= |mean / se|, the observed one counted too

    Studentised, because with eight seeds the percentile bootstrap finds differences too often.
    Differences that are all equal have no spread to resample: the p-value is then that of the sign
    test, 2 ^ (1 - n), or 1 for zeros.

    Args:
        differences: one difference for each seed, at least 2.
        seed: seed of the resamples.
    """
    values = np.asarray(differences, np.float64)
    num = len(values)
    if num < 2:
        raise ValueError(f"{num} differences, expected at least 2: one has no spread.")
    mean, spread = float(values.mean()), _standard_errors(values[None])[0]
    if np.ptp(values) == 0.0:
        return PairedTest(mean, mean, mean, 1.0 if mean == 0.0 else 2.0 ** (1 - num))
    rng = np.random.default_rng(seed)
    resamples = values[rng.integers(0, num, (NUM_RESAMPLES, num))]
    off, errors = resamples.mean(axis=1) - mean, _standard_errors(resamples)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(errors > 0.0, off / errors, np.copysign(np.inf, off))
    upper, lower = np.quantile(t, [0.975, 0.025], method="higher")
    num_beyond = np.count_nonzero(np.abs(t) >= abs(mean / spread))
    return PairedTest(
        mean,
        float(mean - upper * spread),
        float(mean - lower * spread),
        float((num_beyond + 1) / (NUM_RESAMPLES + 1)),
    )


def _standard_errors(resamples: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean of each row."""
    errors: np.ndarray = resamples.std(axis=1, ddof=1) / np.sqrt(resamples.shape[1])
    return errors


def mean_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Return the mean with the ends of its 95 % interval by Student's t: low, mean, high."""
    from scipy import stats  # here: its import takes a second, and few need it

    mean = float(np.mean(values))
    reach = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    return mean - reach, mean, mean + reach


def paired_seeds(runs: Sequence[ArmRun], arms: Sequence[str]) -> list[int]:
    """Return the seeds that all these arms have."""
    by_arm = [{run.seed for run in runs if run.arm == arm} for arm in arms]
    return sorted(set.intersection(*by_arm))


def differences(runs: Sequence[ArmRun], arm: str, other: str) -> list[float]:
    """Return `arm`'s held-out success after training minus `other`'s, in points, for each seed that
    both have.
    """
    found = {(run.arm, run.seed): 100 * run.success_after for run in runs}
    return [found[arm, seed] - found[other, seed] for seed in paired_seeds(runs, (arm, other))]


def episodes_until_risen(run: ArmRun, start: float) -> int:
    """Return the training episodes until the sampled success of three updates in a row is 20 points
    above `start`; all episodes of the run if it never is, which is a lower bound.
    """
    lines: list[dict[str, Any]] = [
        {FIGURE: success, "episodes": episodes}
        for success, episodes in zip(run.success, run.episodes, strict=True)
    ]
    end = risen(lines, start + RISE)
    return run.episodes[-1] if end is None else int(end["episodes"])


def episode_ratio(runs: Sequence[ArmRun], arm: str, other: str) -> float:
    """Return the episodes until risen, summed over the paired seeds, of `arm` over `other`."""
    start = sum(run.success[0] for run in runs) / len(runs)
    seeds = paired_seeds(runs, (arm, other))

    def total(name: str) -> int:
        chosen = [run for run in runs if run.arm == name and run.seed in seeds]
        return sum(episodes_until_risen(run, start) for run in chosen)

    return total(arm) / total(other)


def obstacles(num_seeds: int, num_starts: int) -> list[str]:
    """Return, in sentences, why the data do not allow a conclusion; none if they do."""
    found = []
    if num_seeds < LEAST_SEEDS:
        found.append(
            f"{num_seeds} of at least {LEAST_SEEDS} seeds are there for every arm: which arm is "
            "better cannot be concluded, and the test is not shown before all are in"
        )
    if 0 < num_starts < LEAST_STARTS:
        low, high = wilson_interval(num_starts // 2, num_starts)
        found.append(
            f"{num_starts} of at least {LEAST_STARTS} held-out starts: one run's success rate is "
            f"known to within {50 * (high - low):.0f} points, so only the rise of a run by more "
            "than that can be concluded, and not the order of arms"
        )
    return found


def report_of(runs: Sequence[ArmRun], arms: Sequence[str]) -> dict[str, Any]:
    """Return the figures of the report.

    Those of the test are None if the data do not allow a conclusion.
    """
    num_seeds = len(paired_seeds(runs, arms))
    num_starts = runs[0].num_starts if runs else 0
    test = ratio = None
    if not obstacles(num_seeds, num_starts):
        test = paired_bootstrap(differences(runs, "srpo", "grpo"))
        ratio = round(episode_ratio(runs, "srpo", "grpo"), 3)
    return {
        "seeds_per_arm": num_seeds,
        "held_out_starts": num_starts,
        "srpo_minus_grpo_points": test and round(test.mean, 2),
        "ci_low": test and round(test.low, 2),
        "ci_high": test and round(test.high, 2),
        "p_value": test and round(test.p_value, 4),
        "episodes_to_plus_20_ratio": ratio,
    }
