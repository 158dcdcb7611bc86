"""Measure several ways of doing one thing in turn, round after round, so that a noisy machine disturbs all of them alike."""

import json
import statistics
import sys
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.table import Table


def measure_in_turn(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Run every way once a round, in order, and give each way's median figure."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1, rounds + 1):
        for name, run in ways.items():
            samples[name].append(run())
            print(f"round {number}/{rounds}: {name}: {samples[name][-1]:,.6g}", file=sys.stderr, flush=True)
    return {name: statistics.median(values) for name, values in samples.items()}


def print_table(title: str, rows: Mapping[str, object]) -> None:
    """Print figures for a person to read."""
    table = Table(title=title, show_header=False)
    for name, value in rows.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


def print_json_line(figures: Mapping[str, object]) -> None:
    """Print the figures as the one JSON line that a benchmark ends with."""
    print(json.dumps({name: _shortened(value) for name, value in figures.items()}), flush=True)


def _shortened(value: object) -> object:
    """Four decimals; four digits of what would vanish then."""
    if not isinstance(value, float):
        return value
    return round(value, 4) if abs(value) >= 0.01 else float(f"{value:.4g}")
