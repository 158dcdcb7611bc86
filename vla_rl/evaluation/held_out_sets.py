"""The two sets of held-out starts: those that choose the best checkpoint, and those that report it.

They have no start in common. The highest of several evaluations is higher than the policy is, so the
starts that chose a checkpoint cannot tell how good it is.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence

from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out_book import RowFormat
from vla_rl.evaluation.libero import parse_numbers
from vla_rl.types import EpisodeSpec


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
                f"held_out.choose_init_states are {text!r}, but {_first_few(shared)} are {words} "
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
    report: Sequence[EpisodeSpec], choose: Sequence[EpisodeSpec], format: RowFormat
) -> None:
    """Raise ConfigError if a start is in both sets."""
    shared = {format.key_of(each) for each in report} & {format.key_of(each) for each in choose}
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


def _first_few(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown}, ..." if len(numbers) > 8 else shown
