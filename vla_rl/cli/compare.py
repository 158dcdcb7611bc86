"""Compare two evaluations start by start: `vla-rl compare runs/eval-A runs/eval-B`.

Only starts that both evaluations have run are counted, each against itself, so that hard starts on
one side and easy ones on the other cannot make a difference. Evaluations under different
conditions (scenes, images, limits, actions) are refused, because the difference would be theirs too.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from rich.table import Table

from vla_rl.errors import ConfigError
from vla_rl.evaluation.conditions import differences
from vla_rl.evaluation.record_file import read_records
from vla_rl.evaluation.records import EPISODES, EpisodeRecord, Key
from vla_rl.evaluation.tables import wilson_interval
from vla_rl.models.prismatic.conventions import CheckpointFormat
from vla_rl.run.terminal import lasting_output
from vla_rl.util.values import plain_console

OF_THE_POLICY: Final = frozenset(
    {
        "checkpoint",
        "checkpoint_digest",
        "server",
        "device",
        "seed",
        *CheckpointFormat.__struct_fields__,
    }
)
"""Conditions that two policies differ in; all others have to be equal."""

ALL: Final = "all"


class Pairs(NamedTuple):
    """Starts that both evaluations have run, counted by who solved them.

    Example:
        Pairs(both=30, first=4, second=12, neither=4)  # 50 starts
    """

    both: int
    first: int
    second: int
    neither: int

    @property
    def num(self) -> int:
        """Number of starts."""
        return sum(self)

    @property
    def difference(self) -> float:
        """Success rate of the second less that of the first."""
        return (self.second - self.first) / self.num


def count_pairs(first: Sequence[EpisodeRecord], second: Sequence[EpisodeRecord]) -> Pairs:
    """Count the starts that both have run."""
    solved: dict[Key, bool] = {each.episode_key: each.is_success for each in first}
    pairs = [
        (solved[each.episode_key], each.is_success) for each in second if each.episode_key in solved
    ]
    return Pairs(
        pairs.count((True, True)),
        pairs.count((True, False)),
        pairs.count((False, True)),
        pairs.count((False, False)),
    )


def paired_interval(pairs: Pairs) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two success rates on the same starts.

    Newcombe 1998 (Statistics in Medicine 17:2635), method 10: from Wilson's intervals of both rates and
    the correlation of the outcomes. Valid for few starts, and if one side solves all of them.
    """
    both, first, second, _ = pairs
    num = pairs.num
    (low_1, high_1), (low_2, high_2) = (
        wilson_interval(both + alone, num) for alone in (first, second)
    )
    rate_1, rate_2 = (both + first) / num, (both + second) / num
    phi = _correlation(pairs)

    def width(one: float, other: float) -> float:
        # rounding may leave a little less than 0
        return math.sqrt(max(0.0, one * one - 2 * phi * one * other + other * other))

    below = width(rate_2 - low_2, high_1 - rate_1)
    above = width(high_2 - rate_2, rate_1 - low_1)
    return pairs.difference - below, pairs.difference + above


def _correlation(pairs: Pairs) -> float:
    both, first, second, neither = pairs
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    if margins == 0:
        return 0.0
    excess = float(both * neither - first * second)
    # Newcombe's correction for continuity, for correlations above 0
    if excess > 0:
        excess = max(excess - pairs.num / 2, 0.0)
    return excess / math.sqrt(margins)


def read_evaluation(folder: Path) -> tuple[dict[str, Any], list[EpisodeRecord]]:
    """Return the conditions and the records of an evaluation.

    Raises: ConfigError if the folder holds none, or damaged records.
    """
    path = folder / "conditions.json"
    try:
        conditions = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{folder} is no folder of an evaluation: {path.name} cannot be read ({error}); expected "
            "what `vla-rl eval_libero` wrote, such as runs/eval-1"
        ) from error
    return conditions, read_records(folder / EPISODES.file)


def refuse_other_settings(
    first: Mapping[str, Any], second: Mapping[str, Any], folders: Sequence[Path]
) -> None:
    """Raise ConfigError if two evaluations differ in more than their policies."""
    found = [
        f"{name} is {before!r} and {now!r}"
        for name, now, before in differences(second, first)
        if name.partition(".")[0] not in OF_THE_POLICY
    ]
    if found:
        raise ConfigError(
            f"{folders[0]} and {folders[1]} cannot be compared: {'; '.join(found)}; run one of them "
            "again with the other's settings"
        )


def comparison_table(first: Sequence[EpisodeRecord], second: Sequence[EpisodeRecord]) -> Table:
    """Return one row for each task and one for all, of starts that both have run."""
    # short heads, so that a terminal of 80 columns shows the names of tasks whole
    table = Table("task", "first", "second", "1st alone", "2nd alone", "difference (95 %)")
    tasks = sorted({each.task for each in first} & {each.task for each in second})
    for task in [*tasks, ALL] if len(tasks) > 1 else tasks:
        pairs = count_pairs(
            *([each for each in side if task in (ALL, each.task)] for side in (first, second))
        )
        if pairs.num == 0:
            continue
        low, high = paired_interval(pairs)
        table.add_row(
            task,
            *(f"{pairs.both + alone}/{pairs.num}" for alone in (pairs.first, pairs.second)),
            str(pairs.first),
            str(pairs.second),
            f"{100 * pairs.difference:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})",
            end_section=task == tasks[-1],
        )
    return table


@lasting_output()
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of two evaluations; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="vla-rl compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("first", type=Path, help="folder of an evaluation, such as runs/eval-1")
    parser.add_argument("second", type=Path, help="folder of another one")
    options = parser.parse_args(arguments)
    folders = (options.first, options.second)
    try:
        (conditions, first), (others, second) = map(read_evaluation, folders)
        refuse_other_settings(conditions, others, folders)
        num_both = count_pairs(first, second).num
        if num_both == 0:
            raise ConfigError(
                f"{folders[0]} and {folders[1]} have no start in common, expected the same suites, "
                "tasks and initial states"
            )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, folder, found in zip(("first", "second"), folders, (conditions, others), strict=True):
        print(f"{name}: {folder}, {found.get('checkpoint', 'unknown')}")
    for folder, records in zip(folders, (first, second), strict=True):
        if len(records) > num_both:
            print(
                f"{len(records) - num_both} of {len(records)} episodes of {folder} have no counterpart"
            )
    plain_console().print(comparison_table(first, second))
    return 0


if __name__ == "__main__":
    sys.exit(main())
