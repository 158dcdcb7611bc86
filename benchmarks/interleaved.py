"""Measure several ways in turn, round after round, so that a noisy machine disturbs all of them
equally.
"""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

Samples: TypeAlias = Mapping[str, Sequence[float]]
"""Each way's figures, one for each round."""


def sample_in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> Samples:
    """Run every way once a round, in order."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1, rounds + 1):
        for name, run in ways.items():
            samples[name].append(run())
            print(
                f"round {number}/{rounds}: {name}: {samples[name][-1]:,.6g}",
                file=sys.stderr,
                flush=True,
            )
    return samples


def medians_of(samples: Samples) -> dict[str, float]:
    """Return each way's median figure."""
    return {name: statistics.median(values) for name, values in samples.items()}


def ratio_of(samples: Samples, way: str, other: str) -> float:
    """Return the median of the rounds' ratios: a machine that slows down for seconds slows both
    ways of a round.
    """
    return statistics.median(
        one / two for one, two in zip(samples[way], samples[other], strict=True)
    )


def measure_in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run every way once a round, in order, and return each way's median figure."""
    return medians_of(sample_in_turn(ways, rounds))


def print_table(title: str, rows: Mapping[str, object]) -> None:
    """Print figures as a table."""
    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


def print_json_line(figures: Mapping[str, object]) -> None:
    """Print the figures as one JSON line, the last line of a benchmark."""
    print(json.dumps({name: _shortened(value) for name, value in figures.items()}), flush=True)


def _shortened(value: object) -> object:
    """Round to four decimals, or to four digits if that would give 0."""
    if not isinstance(value, float):
        return value
    return round(value, 4) if abs(value) >= 0.01 else float(f"{value:.4g}")
