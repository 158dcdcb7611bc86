"""The schedule of held-out evaluations: their starts, their times, the end of a run that no longer gains.

Of the starts, some choose the best checkpoint, and the others report it; the two sets have no start in
common. The highest of several evaluations is higher than the policy is, so the starts that chose a
checkpoint cannot tell how good it is.

A run stops early if its held-out evaluations show that it no longer gains. The trend is the slope of
the least-squares line through the last few evaluations. A run is stopped if its trend is below 2 points
an evaluation, and noise alone explains that too rarely:

    trend + z * error of the trend < 0.02

z is chosen so that a policy that does gain 2 points an evaluation over 20 evaluations is stopped in
at most 5 % of runs. The trend is that of as many evaluations as its error needs: patience + 1 with
many starts, more with few.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from statistics import NormalDist
from typing import Annotated, ClassVar, Final

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.evaluation.records import Measure, episode_key
from vla_rl.evaluation.suites import parse_numbers
from vla_rl.types import Config, EpisodeSpec, PositiveFloat, PositiveInt, ReadIf, Sampling


class HeldOutSchedule(Config, frozen=True, kw_only=True):
    """Held-out episodes during a run, in a process of their own beside training."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("simulators", "niceness", "stop_after"), "every"),
    )

    every: PositiveInt | None = None
    """Updates between two evaluations beside training, from a checkpoint that is saved for them, on
    starts that choose the best one. None: nothing is chosen; the held-out starts run before the
    first update and after the last."""

    simulators: PositiveInt = 1
    """Simulators of the evaluations beside training. More finish sooner and take more cores from
    the simulators of training; the evaluation of the last weights has all simulators of the run."""

    niceness: Annotated[int, msgspec.Meta(ge=0, le=19)] = 10
    """Priority of the evaluations beside training, from 0, that of training itself, to 19, the
    lowest. It matters only if the machine has no idle core."""

    first_results_of: str | None = None
    """Folder of a run whose results of its first weights are taken for this run's, instead of
    running those episodes again. Policy, starts and conditions must be the same. None: run them."""

    stop_after: PositiveInt | None = None
    """Stop the run, in order, when the trend of the last evaluations on the starts that choose, this
    many and one, is certainly below 2 points an evaluation. With few starts, more evaluations are
    needed, which one line says. None: never."""


class HeldOutDecoding(HeldOutSchedule, frozen=True, kw_only=True):
    """A schedule, and how held-out episodes of a policy with action tokens choose their greedy actions."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (ReadIf(("mean_temperature",), "by_mean"),)

    by_mean: bool = False
    """Act by the means: take the token nearest to the mean of each number's distribution, instead of the likeliest.
    Set it for policies that choose all tokens at once and whose neighbouring tokens mean nearly the same
    (OpenVLA-OFT); others refuse it."""

    mean_temperature: PositiveFloat | None = 1.0
    """Temperature of the distributions whose means are taken; the lower, the nearer they are to the likeliest
    tokens. 1, as in evaluations of a checkpoint, is the network's own. None: the recipe's `temperature`."""

    def sampling(self, temperature: float) -> Sampling:
        """Return how held-out episodes act with a policy that trains at `temperature`."""
        if self.by_mean and self.mean_temperature is not None:
            temperature = self.mean_temperature
        return Sampling(greedy=True, by_mean=self.by_mean, temperature=temperature)


def choosing_numbers(
    text: str | None,
    reported: Sequence[int],
    trained: Collection[int],
    most: int,
    *,
    limit: int | None = None,
) -> tuple[int, ...]:
    """Return the numbers of the starts that choose.

    Args:
        text: the value of `held_out.choose_init_states`; None for as many as are reported, the
            next ones, or all that are left if fewer are.
        reported: numbers of the starts that are reported.
        trained: numbers of the starts that are trained on.
        most: "all" means the numbers from 0 to `most` - 1.
        limit: numbers must be below this; None: below `most`.

    Raises: ConfigError if one is reported or trained on, or if no start is left.
    """
    if text is None:
        # after those that are reported, where starts are drawn, and only then before them
        free = _free_numbers(max(reported) + 1, {*reported}, trained, limit or most)
        chosen = tuple(sorted(itertools.islice(free, len(reported))))
        if not chosen:
            raise ConfigError(
                "held_out.init_states name every start that is not trained on, so none is left to "
                "choose the best checkpoint by; name fewer of them, or set held_out.every None"
            )
        return chosen
    chosen = parse_numbers(text, most, "held_out.choose_init_states", limit=limit)
    for others, words in ((reported, "in held_out.init_states"), (trained, "trained on")):
        if shared := [number for number in chosen if number in others]:
            raise ConfigError(
                f"held_out.choose_init_states are {text!r}, but {_list_first(shared)} are {words} "
                "too; expected other numbers, or none for the next ones"
            )
    return chosen


def number_ranges(numbers: Sequence[int]) -> str:
    """Return numbers as text that `parse_numbers` reads, such as 40-49,1000."""
    parts = []
    for _, run in itertools.groupby(enumerate(sorted(numbers)), lambda each: each[1] - each[0]):
        found = [number for _, number in run]
        parts.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ",".join(parts)


def split_in_two(
    episodes: Sequence[EpisodeSpec],
) -> tuple[tuple[EpisodeSpec, ...], tuple[EpisodeSpec, ...]]:
    """Return the episodes that report and those that choose: of each task every other one."""
    report, choose = list[EpisodeSpec](), list[EpisodeSpec]()
    num_of: dict[str, int] = {}
    for episode in episodes:
        number = num_of[episode.task] = num_of.get(episode.task, -1) + 1
        # an odd one out reports, in turn over the tasks
        (report if number % 2 == 0 else choose).append(episode)
    if not choose:  # every task has one start
        report, choose = report[::2], report[1::2]
    return tuple(report), tuple(choose)


def refuse_shared_starts(
    report: Sequence[EpisodeSpec], choose: Sequence[EpisodeSpec], measure: Measure
) -> None:
    """Raise ConfigError if a start is in both sets."""
    shared = {episode_key(each, measure) for each in report} & {
        episode_key(each, measure) for each in choose
    }
    if shared:
        raise ConfigError(
            f"{len(shared)} held-out starts would choose the best checkpoint and report it, such as "
            f"{min(shared)}; expected two sets without a start in common"
        )


def _free_numbers(
    first: int, reported: Collection[int], trained: Collection[int], limit: int
) -> Iterator[int]:
    """Yield the numbers that are neither reported nor trained on, from `first` on and then from 0."""
    for number in itertools.chain(range(first, limit), range(min(first, limit))):
        if number not in reported and number not in trained:
            yield number


def _list_first(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, ..." if len(numbers) > 8 else shown


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
    # the fewest starts decide, because an evaluation with few has the most noise
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
    # the error falls with the power 3/2 of the window, so the loop ends soon even for a few starts
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
