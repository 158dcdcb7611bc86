"""The result of finished driving runs on held-out scenes.

    python -m benchmarks.driving_result runs/<run> --keep docs/results/driving.jsonl   keep a run there
    python -m benchmarks.driving_result --table docs/results/driving.jsonl             those of a file

A run of `srpo_driving_loop` is graded by the driving score of its drives, a share of 1.

Compares the scenes that both the first and the last evaluated weights drove. Runs nothing. `--keep`
appends one line with the totals of every scene, the mean of every sub-score, versions and machine;
`--table` prints the lines as the tables of docs/driving.md: every sub-score, and the total by
layout of roads. Intervals are 95 % ones of a mean over scenes.

Keys of the last line of `--table`, lists by run: `seed`; `reward`; `before` and `after`, the mean
totals by the version that trained; `gain`, the mean difference of a scene, and `gain_half`, half of
its interval; `scenes`; `updates`; `minutes`, from the start of the command to its last held-out
scene.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.interleaved import print_json_line
from benchmarks.kept_runs import (
    about_run,
    command_line,
    keep,
    kept_lines,
    minutes_until,
    read_json,
    report,
)
from vla_rl.envs.driving.world import draw_world
from vla_rl.evaluation.record_file import read_records
from vla_rl.evaluation.records import SCORES
from vla_rl.reporting import RunDirectory

TOTALS: Final = ("total", "pdms_v1", "epdms_v2")
"""Parts of the score that are kept for every scene."""


def kept_line(run: RunDirectory, note: str) -> dict[str, Any]:
    """Return everything of a run that the tables and their reader need.

    Raises: ValueError if fewer than two weight versions were evaluated; OSError.
    """
    of_weights: dict[int, dict[int, dict[str, float]]] = {}
    for record in read_records(run.path / SCORES.file):
        totals = of_weights.setdefault(record.weights, {})
        totals[record.start] = {"total": record.value, **record.parts}
    if len(of_weights) < 2:
        raise ValueError(
            f"{len(of_weights)} weight versions were evaluated, expected the first and the last: "
            "the run has not ended, or had no held-out scenes (--held-out.scenes)"
        )
    first, last = of_weights[min(of_weights)], of_weights[max(of_weights)]
    scenes = sorted(first.keys() & last.keys())
    config = read_json(run.config)
    layouts = config.get("kinds")  # of the closed loop, which draws scenes of each in turn
    return {
        "seed": config["run"]["seed"],
        "reward": "srpo" if config["pipeline"] == "embodied_srpo" else config["reward_of"],
        "version": config.get("version", "driving_score"),
        "updates": max(of_weights),
        "scenes": len(scenes),
        "minutes": minutes_until(run, run.path / SCORES.file),
        "before": _parts([first[scene] for scene in scenes]),
        "after": _parts([last[scene] for scene in scenes]),
        "kinds": [
            layouts[scene % len(layouts)] if layouts else draw_world(scene, "held_out").kind
            for scene in scenes
        ],
        **about_run(run, note),
    }


def _parts(lines: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return each total of every scene, and the mean and half interval of each sub-score."""
    found: dict[str, Any] = {}
    for name in lines[0]:
        values = [line[name] for line in lines]
        found[name] = [round(value, 4) for value in values] if name in TOTALS else mean_of(values)
    return found


def mean_of(values: Sequence[float]) -> list[float]:
    """Return the mean and half of its 95 % interval."""
    half = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return [round(float(np.mean(values)), 4), round(half, 4)]


def identity(line: dict[str, Any]) -> str:
    """Return what no two kept runs have in common, in words."""
    return (
        f"seed {line['seed']}, reward {line['reward']}, version {line['version']} and "
        f"{line['updates']} updates"
    )


def table_of_scores(lines: Sequence[dict[str, Any]]) -> str:
    """Return a row a part of the score, and the first weights and each run's last as columns."""
    shown = [_means(lines[0]["before"]), *(_means(line["after"]) for line in lines)]
    heads = ["", f"before ({lines[0]['scenes']} scenes)"]
    heads += [
        f"seed {line['seed']}: {line['updates']} updates"
        + ("" if line["minutes"] is None else f", {line['minutes']:.0f} min")
        for line in lines
    ]
    names: list[str] = [name for name in TOTALS if name in shown[0]]
    names += [name for name in shown[0] if name not in TOTALS]
    rows = [[name.replace("_", " "), *(_cell(means[name]) for means in shown)] for name in names]
    return _markdown([heads, *rows])


def table_of_kinds(lines: Sequence[dict[str, Any]]) -> str:
    """Return a row a layout of roads: the total before, and after each run."""
    heads = [f"seed {line['seed']}, {line['updates']} updates" for line in lines]
    rows = [["layout", "scenes", "before", *heads]]
    kinds = lines[0]["kinds"]
    for kind in sorted(set(kinds)):
        of_kind = [number for number, each in enumerate(kinds) if each == kind]
        columns = [lines[0]["before"], *(line["after"] for line in lines)]
        cells = [_cell(mean_of([column["total"][at] for at in of_kind])) for column in columns]
        rows.append([kind.replace("_", " "), f"{len(of_kind)}", *cells])
    return _markdown(rows)


def _means(parts: Mapping[str, Any]) -> dict[str, list[float]]:
    return {name: mean_of(each) if name in TOTALS else each for name, each in parts.items()}


def _cell(mean: Sequence[float]) -> str:
    return f"{mean[0]:.3f} ± {mean[1]:.3f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    heads, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *others))


def figures_of(line: dict[str, Any]) -> dict[str, Any]:
    """Return what the last JSON line has of a run."""
    before, after = (np.array(line[when]["total"]) for when in ("before", "after"))
    gain = mean_of((after - before).tolist())
    return {
        "seed": line["seed"],
        "reward": line["reward"],
        "before": round(float(before.mean()), 4),
        "after": round(float(after.mean()), 4),
        "gain": gain[0],
        "gain_half": gain[1],
        "scenes": line["scenes"],
        "updates": line["updates"],
        "minutes": line["minutes"],
    }


def print_kept(path: Path) -> None:
    """Print the tables of the kept runs, by reward, and their JSON line.

    Raises: ValueError if there are none.
    """
    lines = kept_lines(path)
    if not lines:
        raise ValueError(f"{path} has no runs; `--keep {path}` adds one")
    for reward in dict.fromkeys(line["reward"] for line in lines):
        same = [line for line in lines if line["reward"] == reward]
        print(f"reward: {reward}\n\n{table_of_scores(same)}\n\n{table_of_kinds(same)}\n")
    figures = [figures_of(line) for line in lines]
    print_json_line({name: [each[name] for each in figures] for name in figures[0]})


def show(options: argparse.Namespace) -> None:
    """Keep a run, or print the kept ones."""
    if options.table is not None:
        print_kept(options.table)
        return
    line = kept_line(RunDirectory.existing(options.run), options.note)
    if options.keep is not None:
        keep(options.keep, line, identity)
    print(f"{table_of_scores([line])}\n\n{table_of_kinds([line])}\n")
    print_json_line(figures_of(line))


def main() -> int:
    """Run the command line; return the exit status."""
    return report(command_line(__doc__ or ""), show)


if __name__ == "__main__":
    sys.exit(main())
