"""Updates, episodes and minutes that a pipeline needs to improve by some points, from the measured
curves.

    python -m benchmarks.updates_needed embodied_srpo embodied_grpo embodied_srpo_released [--points 20]

Reads `docs/pipelines/data/<name>.jsonl`, which `pipeline_curves` writes; runs nothing. All curves
are assumed to start with the same policy, so their first updates together give its success rate. A
run has reached the target with the first update whose success rate, together with the two before
it, is `--points` higher. Sampled training episodes are counted.

Keys of the last line: for each name, `updates`, `episodes` and `minutes`: one figure a seed, null
where it was not reached; and `start`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from benchmarks.interleaved import print_json_line

DATA: Final = Path(__file__).parents[1] / "docs" / "pipelines" / "data"
FIGURE: Final = "rollout/success_rate"
IN_A_ROW: Final = 3


def runs_in(path: Path) -> list[list[dict[str, Any]]]:
    """Return the updates of each seed, in order.

    Raises: ValueError if the curves have no minutes, as older ones.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if any("minutes" not in line for line in lines):
        raise ValueError(
            f"{path} has updates without minutes; measure it again: python -m "
            "benchmarks.pipeline_curves"
        )
    return [
        [line for line in lines if line["seed"] == seed]
        for seed in sorted({line["seed"] for line in lines})
    ]


def start_of(curves: Sequence[Sequence[Sequence[dict[str, Any]]]]) -> float:
    """Return the success rate of the policy that all curves start with."""
    firsts = [float(run[0][FIGURE]) for runs in curves for run in runs]
    return sum(firsts) / len(firsts)


def risen(run: Sequence[dict[str, Any]], target: float) -> dict[str, Any] | None:
    """Return the update with which a run has reached `target`; None if it has not."""
    for end in range(IN_A_ROW, len(run) + 1):
        if sum(update[FIGURE] for update in run[end - IN_A_ROW : end]) / IN_A_ROW >= target:
            return run[end - 1]
    return None


def main() -> None:
    """Read, print the table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+")
    parser.add_argument("--points", type=float, default=20.0)
    options = parser.parse_args()
    curves = {name: runs_in(DATA / f"{name}.jsonl") for name in options.names}
    start = start_of(list(curves.values()))
    target = start + options.points / 100
    table = Table(
        "pipeline",
        "updates",
        "episodes",
        "minutes",
        title=f"From {100 * start:.0f} to {100 * target:.0f} %",
    )
    report: dict[str, object] = {"start": start}
    for name, runs in curves.items():
        ends = [risen(run, target) for run in runs]
        found = {
            key: [end and end[column] for end in ends]
            for key, column in (
                ("updates", "update"),
                ("episodes", "episodes"),
                ("minutes", "minutes"),
            )
        }
        table.add_row(
            name,
            *(
                ", ".join("-" if each is None else f"{each:g}" for each in row)
                for row in found.values()
            ),
        )
        report |= {f"{name}_{key}": values for key, values in found.items()}
    Console().print(table)
    print_json_line(report)


if __name__ == "__main__":
    main()
