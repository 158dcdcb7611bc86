"""Arguments that are refused before the parser sees them, and what resembles those that it does not know.

Options that users of other trainers look for, and that do not exist, are refused by name.
"""

import difflib
import itertools
import re
import sys
from collections.abc import Collection, Sequence, Set
from typing import Final

from vla_rl.errors import ConfigError
from vla_rl.util.values import shorten_middle

SHARDS: Final = (
    "ranks share rows and, with --learner.shard weights, all weights and the optimizer's state; "
    "take more --learner.ranks"
)

MISSING_OPTIONS: Final = {
    "--learner.pipeline-parallel": f"the learner has no pipeline parallelism: {SHARDS}",
    "--learner.context-parallel": (
        "the learner has no context parallelism: a row is read whole by one rank; set "
        "--learner.micro-batch 1 and --recompute-activations if one does not fit"
    ),
}
"""Option and the reason, with what to do instead."""


def refuse_missing_options(arguments: Sequence[str]) -> None:
    """Raise ConfigError for an option that does not exist, with what to use instead."""
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        if name in MISSING_OPTIONS:
            raise ConfigError(f"{name} does not exist: {MISSING_OPTIONS[name]}")


def refuse_values_of_flags(arguments: Sequence[str], flags: Collection[str]) -> None:
    """Raise ConfigError for a flag that is given a value, which the parser reports alone."""
    for argument, following in itertools.pairwise([*arguments, "--"]):
        name, equals, _ = argument.replace("_", "-").partition("=")
        option = name.removeprefix("--")
        plain, negated = _both_forms(option)
        if not name.startswith("--") or not {option, plain} & set(flags):
            continue
        if equals or not following.startswith("-"):
            raise ConfigError(
                f"{name} is a flag, but was given the value "
                f"{shorten_middle(argument.partition('=')[2] if equals else following)!r}; expected "
                f"--{plain} alone to turn it on, or --{negated} to turn it off"
            )


def _both_forms(option: str) -> tuple[str, str]:
    """Return the names that turn a flag on and off."""
    # the parser puts "no-" before the last part: --real-time.no-continues-plan
    group, dot, leaf = option.rpartition(".")
    plain = leaf.removeprefix("no-")
    return f"{group}{dot}{plain}", f"{group}{dot}no-{plain}"


def refuse_repeated_lists(arguments: Sequence[str], lists: Collection[str]) -> None:
    """Raise ConfigError for an option of several values that is given twice: the parser takes the last."""
    given = [argument.partition("=")[0].replace("_", "-") for argument in arguments]
    for name in dict.fromkeys(given):
        if name.removeprefix("--") in lists and name.startswith("--") and given.count(name) > 1:
            raise ConfigError(
                f"{name} is given {given.count(name)} times, expected once, with all its values after it: "
                f"{name} A B"
            )


LEAST_LIKENESS: Final = 0.6
"""Likeness, 0 to 1, from which an option is named for an unknown one."""


def print_nearest_options(arguments: Sequence[str], options: Set[str]) -> None:
    """Print the options that resemble each unknown one.

    The parser names only those that are nearly the same or hold the unknown one's letters.
    """
    for argument in arguments:
        name = argument.replace("_", "-").partition("=")[0].removeprefix("--")
        if not argument.startswith("--") or not options.isdisjoint(_both_forms(name)):
            continue
        if near := nearest_options(name, options):
            names = ", ".join(f"--{option}" for option in near)
            print(f"nearest to --{shorten_middle(name)}: {names}", file=sys.stderr)


def nearest_options(name: str, options: Collection[str]) -> list[str]:
    """Return up to three options that resemble `name`, the nearest first.

    They resemble it in all or in their last part, letter by letter or because they have its words.
    """

    def likenesses(option: str) -> tuple[float, ...]:
        leaf, leaf_of_option = (dotted.rpartition(".")[2] for dotted in (name, option))
        words, words_of_option = (set(re.split("[-.]", dotted)) for dotted in (name, option))
        return (
            difflib.SequenceMatcher(a=name, b=option).ratio(),
            difflib.SequenceMatcher(a=leaf, b=leaf_of_option).ratio(),
            len(words & words_of_option) / len(words),
        )

    scores = {option: likenesses(option) for option in options}
    near = [option for option, each in scores.items() if max(each) >= LEAST_LIKENESS]
    return sorted(near, key=lambda option: (-sum(scores[option]), option))[:3]
