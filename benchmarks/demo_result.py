"""The result of finished runs on held-out starts.

    python -m benchmarks.demo_result runs/<run>                                    one run
    python -m benchmarks.demo_result runs/<run> --keep docs/results/demo.jsonl     and keep it there
    python -m benchmarks.demo_result --table docs/results/demo.jsonl               those of a file
    python -m benchmarks.demo_result --table docs/results/suite.jsonl --by-task    a row a task

Compares the starts that both the first and the last evaluated weights were tried from. Runs
nothing. `--keep` appends one line with every outcome, versions and machine; `--table` prints those
lines as the table of docs/results.md. A line also has, by update, the success of the sampled
training episodes (`success`) and their number until then (`episodes`).

Keys of a run's last line: `before` and `after`, the success rates in percent, and `points_gained`,
their difference; `starts`; `updates`; `minutes`, from the start of the command to its last held-out
episode (None if the run was resumed, because pauses would count); with `--held-out.every` also
`best_weights` and `best`, the success rate of the best checkpoint on these starts, and `best_chose`,
that on the starts that chose it, which is too high; `assets`: `package` for LIBERO's
own from installed packages, else their source, such as `stand-ins`; `quality` and `physics` of the
held-out episodes; `seed`. The last line of `--table` has lists of them by run.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

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
from benchmarks.pipeline_curves import lines_of
from vla_rl.evaluation.held_out import conditions_path
from vla_rl.evaluation.held_out_curve import read_curve
from vla_rl.evaluation.record_file import read_records
from vla_rl.evaluation.records import (
    SUCCESSES,
    EpisodeRecord,
    group_by_task,
    group_by_weights,
)
from vla_rl.evaluation.tables import weights_table, wilson_interval
from vla_rl.reporting import RunDirectory

PACKAGED: Final = ("package", "wheels")
"""Sources of assets that are installed packages: hf-libero with assets in it, or the wheels."""

LEAST_STARTS: Final = 100


def compared(
    records: Sequence[EpisodeRecord],
) -> tuple[int, list[EpisodeRecord], list[EpisodeRecord]]:
    """Return the last weight version, and the episodes of the first and of the last one from the
    starts that both have.

    Raises: ValueError if fewer than two versions were evaluated.
    """
    versions = group_by_weights(records)
    if len(versions) < 2:
        raise ValueError(
            f"{len(versions)} weight versions were evaluated, expected the first and the last: the "
            "run has not ended, or had no held-out episodes (--held-out.init-states)"
        )
    first, last = versions[min(versions)], versions[max(versions)]
    both = {record.episode_key for record in first} & {record.episode_key for record in last}
    return (
        max(versions),
        [record for record in first if record.episode_key in both],
        [record for record in last if record.episode_key in both],
    )


def figures_of(run: RunDirectory) -> dict[str, Any]:
    """Return the figures of a run. Raises: ValueError if it was not evaluated twice; OSError."""
    version, before, after = compared(read_records(run.path / SUCCESSES.file))
    conditions, about = read_json(conditions_path(run)), read_json(run.path / "about.json")
    source = about.get("assets", "unknown")
    rates = [100 * sum(each.is_success for each in found) / len(found) for found in (before, after)]
    return {
        "before": round(rates[0], 2),
        "after": round(rates[1], 2),
        "points_gained": round(rates[1] - rates[0], 2),
        "starts": len(after),
        "updates": version,
        "minutes": minutes_until(run, run.path / SUCCESSES.file),
        "assets": "package" if source in PACKAGED else source,
        "quality": conditions.get("quality"),
        "physics": conditions.get("physics"),
        "seed": read_json(run.config).get("run", {}).get("seed"),
        **best_figures(run),
    }


def best_figures(run: RunDirectory) -> dict[str, Any]:
    """Return the success rates of the best checkpoint: first that on the starts that are reported.

    Empty if nothing was chosen.
    """
    curve = read_curve(run)
    if curve is None or curve.best is None:
        return {}
    report, chose = curve.best.report, curve.best.chose
    return {
        "best_weights": curve.best.weights,
        "best": None if report is None else round(100 * report.mean, 2),
        "best_chose": round(100 * chose.mean, 2),
    }


def kept_line(run: RunDirectory, note: str) -> dict[str, Any]:
    """Return everything of a run that the table and its reader need. Raises: as `figures_of`."""
    found, (_, before, after) = figures_of(run), compared(read_records(run.path / SUCCESSES.file))
    updates = lines_of(run.path, found["seed"])
    return {
        **found,
        "training_minutes": updates[-1]["minutes"],
        "success": [line["rollout/success_rate"] for line in updates],
        "episodes": [line["episodes"] for line in updates],
        "outcomes_before": outcomes_by_task(before),
        "outcomes_after": outcomes_by_task(after),
        **about_run(run, note),
    }


def outcomes_by_task(records: Sequence[EpisodeRecord]) -> dict[str, str]:
    """Return each task's outcomes in the order of its starts, 1 for solved."""
    return {
        task: "".join(
            str(int(record.is_success))
            for record in sorted(found, key=lambda each: each.episode_key)
        )
        for task, found in group_by_task(records).items()
    }


def markdown_table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the kept runs as a Markdown table: all starts with their intervals, and each task."""
    tasks = list(lines[0]["outcomes_after"])
    rows = [
        ["seed", "minutes", "before, % (95 %)", "after, % (95 %)", *(f"{task}" for task in tasks)],
        ["---"] * (4 + len(tasks)),
        *(
            [
                f"{line['seed']}",
                "-" if line["minutes"] is None else f"{line['minutes']:.0f}",
                _rate(line["outcomes_before"]),
                _rate(line["outcomes_after"]),
                *(
                    f"{line['outcomes_before'][task].count('1')} to "
                    f"{line['outcomes_after'][task].count('1')} of "
                    f"{len(line['outcomes_after'][task])}"
                    for task in tasks
                ),
            ]
            for line in lines
        ),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def table_by_task(lines: Sequence[dict[str, Any]]) -> str:
    """Return the kept runs as a Markdown table with a row a task: its starts of all seeds."""
    tasks = sorted(lines[0]["outcomes_after"], key=_suite_and_number)
    before, after = (
        {task: "".join(line[f"outcomes_{when}"][task] for line in lines) for task in tasks}
        for when in ("before", "after")
    )
    rows = [
        ["task", "starts", "before, % (95 %)", "after, % (95 %)"],
        ["---"] * 4,
        *(_row(task, {task: before[task]}, {task: after[task]}) for task in tasks),
        _row("**all**", before, after),
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name: str, before: dict[str, str], after: dict[str, str]) -> list[str]:
    starts = sum(len(outcomes) for outcomes in after.values())
    return [name, f"{starts}", _rate(before), _rate(after)]


def _suite_and_number(task: str) -> tuple[str, int]:
    suite, number = task.rsplit("/", 1)
    return suite, int(number)


def _rate(outcomes: dict[str, str]) -> str:
    every = "".join(outcomes.values())
    low, high = wilson_interval(every.count("1"), len(every))
    return f"{100 * every.count('1') / len(every):.0f} ({100 * low:.0f} to {100 * high:.0f})"


def print_run(run: RunDirectory) -> None:
    """Print the table of a run, what its size allows to conclude, and the JSON line."""
    figures = figures_of(run)
    Console().print(weights_table(read_records(run.path / SUCCESSES.file), "success_rate"))
    if figures["starts"] < LEAST_STARTS:
        low, high = wilson_interval(figures["starts"] // 2, figures["starts"])
        print(
            f"{figures['starts']} held-out starts are few: each rate is known to within "
            f"{50 * (high - low):.0f} points; take at least {LEAST_STARTS} "
            "(--held-out.init-states)"
        )
    print_json_line(figures)


def print_kept(path: Path, *, is_by_task: bool) -> None:
    """Print the kept runs and their JSON line. Raises: ValueError if there are none."""
    lines = kept_lines(path)
    if not lines:
        raise ValueError(f"{path} has no runs; `--keep {path}` adds one")
    print(table_by_task(lines) if is_by_task else markdown_table(lines))
    names = ("seed", "before", "after", "points_gained", "starts", "minutes", "assets")
    print_json_line({name: [line[name] for line in lines] for name in names})


def show(options: argparse.Namespace) -> None:
    """Print a run, and keep it if asked, or print the kept ones."""
    if options.table is not None:
        print_kept(options.table, is_by_task=options.by_task)
        return
    run = RunDirectory.existing(options.run)
    if options.keep is not None:
        keep(options.keep, kept_line(run, options.note), lambda line: f"seed {line['seed']}")
    print_run(run)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = command_line(__doc__ or "")
    parser.add_argument("--by-task", action="store_true", help="a row a task, over all seeds")
    return report(parser, show)


if __name__ == "__main__":
    sys.exit(main())
