"""Proofs that are several planned runs: what is missing is run, what has ended is a kept line."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import kept_lines
from vla_rl.errors import VlaRlError
from vla_rl.evaluation.tables import wilson_interval


def planned_command_line(
    name: str, description: str | None, planned: Iterable[str]
) -> argparse.ArgumentParser:
    """Return the options of a proof.

    Args:
        name: name of the benchmark, of its file of kept runs and of their folder.
        description: what `--help` says.
        planned: names of the runs.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kept = Path(f"docs/results/{name}.jsonl")
    parser.add_argument("--runs", type=Path, default=Path("runs") / name, help="their folder")
    parser.add_argument("--keep", type=Path, default=kept, help="file of the kept runs")
    parser.add_argument("--only", nargs="+", choices=planned, help="runs to make; default: all")
    parser.add_argument("--note", default="", help="what else ran on the machine; kept too")
    parser.add_argument("--table", action="store_true", help="run nothing, print the kept runs")
    return parser


def run_missing(
    options: argparse.Namespace,
    planned: Iterable[str],
    run: Callable[[str], None],
    show: Callable[[list[dict[str, Any]]], None],
) -> int:
    """Run what is not kept yet, and show what is; return the exit status, 2 with a line for bad input.

    Args:
        options: those of `planned_command_line`.
        planned: names of the runs, in their order.
        run: makes the run of a name, or the rest of it, and keeps it.
        show: prints the kept lines.
    """
    try:
        done = {line["run"] for line in _read_kept(options.keep)}
        for name in () if options.table else options.only or planned:
            if name not in done:
                print(f"{name} begins, or goes on", file=sys.stderr, flush=True)
                run(name)
        lines = _read_kept(options.keep)
        if not lines:
            raise ValueError(f"{options.keep} has no runs; leave out --table to run them")
        show(lines)
    except (VlaRlError, OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def print_rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    print("\n".join(f"| {' | '.join(row)} |" for row in lines))


def percent(outcomes: str) -> float:
    """Return the share of successes in percent, of outcomes such as 1101."""
    return round(100 * outcomes.count("1") / len(outcomes), 1)


def format_rate(outcomes: str, digits: int) -> str:
    """Return the share of successes in percent with its 95 % interval."""
    low, high = wilson_interval(outcomes.count("1"), len(outcomes))
    return f"{percent(outcomes):.{digits}f} ({100 * low:.0f} to {100 * high:.0f})"


def _read_kept(path: Path) -> list[dict[str, Any]]:
    return kept_lines(path) if path.exists() else []
