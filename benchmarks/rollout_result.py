"""The speed of the first update's rollout in finished runs.

    python -m benchmarks.rollout_result runs/<run> --keep FILE --note "whole meshes"    keep a run there
    python -m benchmarks.rollout_result --table FILE                                    those of a file

Runs nothing. `--keep` appends one line with the rollout's metrics of the first update, versions and
machine; `--table` prints a column a line, under its note. Compare runs of one machine on one day.

Keys of the last line of `--table`, lists by run: `note`; `env_steps_per_s`, control steps;
`decisions_per_s`; `episodes_per_s`; `policy_busy_share`.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from benchmarks.interleaved import print_json_line
from benchmarks.kept_runs import about_run, command_line, keep, kept_lines, read_json, report
from vla_rl.reporting import RunDirectory, read_metrics

SHOWN: Final = {
    "env_steps_per_s": "control steps/s",
    "decisions_per_s": "decisions/s",
    "episodes_per_s": "episodes/s",
    "policy_busy_share": "share of the time that the policy computes",
}
"""Metrics of the rollout, and their names in the table."""


def kept_line(run: RunDirectory, note: str) -> dict[str, Any]:
    """Return the first update's rollout. Raises: ValueError if no update has ended; OSError."""
    updates = read_metrics(run.metrics)
    if not updates:
        raise ValueError(f"no update of {run.path} has ended, expected at least the first")
    rollout = {name: round(updates[0][f"rollout/{name}"], 3) for name in SHOWN}
    return {"seed": read_json(run.config)["run"]["seed"], **rollout, **about_run(run, note)}


def identity(line: dict[str, Any]) -> str:
    """Return what no two kept runs have in common, in words."""
    return f"note {line['note']!r} and seed {line['seed']}"


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return a row a metric, and a column a run."""
    rows = [["", *(line["note"] for line in lines)], ["---"] * (1 + len(lines))]
    rows += [[words, *(f"{line[name]:.3g}" for line in lines)] for name, words in SHOWN.items()]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def show(options: argparse.Namespace) -> None:
    """Keep a run, or print the kept ones."""
    if options.table is not None:
        lines = kept_lines(options.table)
    else:
        lines = [kept_line(RunDirectory.existing(options.run), options.note)]
        if options.keep is not None:
            keep(options.keep, lines[0], identity)
    if not lines:
        raise ValueError(f"{options.table} has no runs; `--keep {options.table}` adds one")
    print(table(lines))
    print_json_line({name: [line[name] for line in lines] for name in ("note", *SHOWN)})


def main() -> int:
    """Run the command line; return the exit status."""
    return report(command_line(__doc__ or ""), show)


if __name__ == "__main__":
    sys.exit(main())
