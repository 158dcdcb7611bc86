"""Compare SRPO with GRPO on LIBERO: run what is missing, or report what is there.

    python -m benchmarks.srpo_vs_grpo --seeds 0 1 2 3 4 5 6 7 --minutes 90
    python -m benchmarks.srpo_vs_grpo --report

Each finished run of an arm becomes one line of docs/results/srpo_vs_grpo.jsonl, which belongs into
the repository; a run that is there is not repeated, so the study can go on another day. Arms are
brought to the same seeds before a new seed begins. docs/results.md says what is compared.

`--report` runs nothing. The test is computed when every arm has 8 seeds and 100 held-out starts;
until then its keys are null, so that no result decides when the study stops.

Keys of the report's last line: `seeds_per_arm`, `held_out_starts`; `srpo_minus_grpo_points`, the
difference of held-out success after training, with `ci_low`, `ci_high` (95 %) and `p_value`;
`episodes_to_plus_20_ratio`, SRPO's training episodes until sampled success has risen by 20 points
over GRPO's.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CalledProcessError, TimeoutExpired
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.interleaved import print_json_line
from benchmarks.srpo_vs_grpo import study
from benchmarks.srpo_vs_grpo.comparison import (
    differences,
    mean_interval,
    obstacles,
    paired_bootstrap,
    paired_seeds,
    report_of,
)
from benchmarks.srpo_vs_grpo.lines import (
    ArmRun,
    append_run,
    digest_of_conditions,
    note_study,
    read_runs,
)
from benchmarks.srpo_vs_grpo.plot import draw_study
from vla_rl.errors import VlaRlError

DATA: Final = Path(__file__).parents[2] / "docs" / "results" / "srpo_vs_grpo.jsonl"
LIKELY_MINUTES: Final = 20.0
"""Duration of a run before the first one is known."""

RECENT: Final = 3
"""Number of last runs of which the longest says how long the next one takes."""


def first_results(data: Path) -> Path:
    """Return the folder with the base policy's held-out results, beside the data."""
    return data.with_name(f"{data.stem}_before")


def missing_runs(
    runs: Sequence[ArmRun], arms: Sequence[str], seeds: Sequence[int]
) -> list[tuple[int, str]]:
    """Return the runs to make, in order: seeds that some arm has first, each with all its arms."""
    made = {(run.seed, run.arm) for run in runs}
    started = {run.seed for run in runs}
    in_order = sorted(seeds, key=lambda seed: (seed not in started, seed))
    return [(seed, arm) for seed in in_order for arm in arms if (seed, arm) not in made]


def run_missing(data: Path, seeds: Sequence[int], minutes: float | None) -> None:
    """Make the missing runs, in order, as long as another one fits into `minutes`."""
    conditions = study.conditions()
    note_study(data, conditions)
    runs, began = read_runs(data), time.monotonic()
    for seed, arm in missing_runs(runs, list(study.ARMS), seeds):
        # the last ones: how busy the machine was weeks ago says nothing
        longest = max((run.minutes for run in runs[-RECENT:]), default=LIKELY_MINUTES)
        spent = (time.monotonic() - began) / 60
        if minutes is not None and spent + longest > minutes:
            print(
                f"{minutes - spent:.0f} minutes are left and a run takes {longest:.0f}: stopping; "
                "the same command goes on",
                flush=True,
            )
            return
        print(f"{arm}, seed {seed}", flush=True)
        run = study.run_arm(arm, seed, digest_of_conditions(conditions), first_results(data))
        append_run(data, run)
        runs.append(run)
        print(f"{arm}, seed {seed}: done in {run.minutes:.0f} minutes", flush=True)


def print_report(runs: Sequence[ArmRun], image: Path | None) -> None:
    """Print the table, what can be concluded, and the JSON line; draw the study if wanted."""
    console, arms = Console(), list(study.ARMS)
    report = report_of(runs, arms)
    found = obstacles(report["seeds_per_arm"], report["held_out_starts"])
    if found:
        for arm in arms:
            seeds = sorted(run.seed for run in runs if run.arm == arm)
            print(f"{arm}: seeds {', '.join(map(str, seeds)) or 'none'}")
        print(*found, sep="\n")
    else:
        console.print(_table(runs, arms))
        if image is not None:
            draw_study(runs, arms, image)
        for other in ("grpo", "srpo_released"):
            test = paired_bootstrap(differences(runs, "srpo", other))
            print(
                f"srpo minus {other}: {test.mean:+.1f} points ({test.low:+.1f} to "
                f"{test.high:+.1f}), p = {test.p_value:.3f}"
            )
    commits = sorted({run.versions["commit"] for run in runs})
    if len(commits) > 1:
        print(f"the runs come from {len(commits)} commits: {', '.join(commits)}")
    print_json_line(report)


def _table(runs: Sequence[ArmRun], arms: Sequence[str]) -> Table:
    """Make a table of held-out success after training: a row for each seed, a column for each arm,
    with the success before the first update. Then the means over the seeds with 95 % intervals.
    """
    table = Table("seed", "before", *arms, title="Held-out success after training, %")
    found = {(run.arm, run.seed): run for run in runs}
    for seed in paired_seeds(runs, arms):
        of_seed = [found[arm, seed] for arm in arms]
        table.add_row(
            str(seed),
            f"{100 * of_seed[0].success_before:.0f}",
            *(f"{100 * run.success_after:.0f}" for run in of_seed),
        )
    table.add_section()
    tasks = list(runs[0].after)
    for name in ("all", *tasks):
        before, *after = (
            [100 * _share_solved(outcomes, name) for outcomes in column]
            for column in _outcomes(found, paired_seeds(runs, arms), arms)
        )
        table.add_row(f"mean, {name}", f"{before[0]:.0f}", *map(_with_interval, after))
    return table


def _outcomes(
    found: Mapping[tuple[str, int], ArmRun], seeds: Sequence[int], arms: Sequence[str]
) -> list[list[dict[str, str]]]:
    """Return the outcomes of each seed: before training, then after it for each arm."""
    before = [found[arms[0], seed].before for seed in seeds]
    return [before, *([found[arm, seed].after for seed in seeds] for arm in arms)]


def _share_solved(outcomes: Mapping[str, str], name: str) -> float:
    """Return the share of starts of a task, or of all, that were solved."""
    starts = "".join(outcomes.values()) if name == "all" else outcomes[name]
    return starts.count("1") / len(starts)


def _with_interval(values: Sequence[float]) -> str:
    _, mean, high = mean_interval(values)
    return f"{mean:.1f} ± {high - mean:.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run or report, as the command line says; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(8)))
    parser.add_argument(
        "--minutes", type=float, help="begin no run that would end later than this; default: all"
    )
    parser.add_argument("--report", action="store_true", help="read the data and run nothing")
    parser.add_argument(
        "--plot", type=Path, help="with --report: file to draw the study into, such as a .png"
    )
    parser.add_argument("--data", type=Path, default=DATA, help="file of the finished runs")
    options = parser.parse_args(arguments)
    if len(set(options.seeds)) < len(options.seeds):
        print(
            f"error: seeds are {options.seeds}, expected each once: a repeated seed is no new "
            "evidence",
            file=sys.stderr,
        )
        return 2
    try:
        if options.report:
            print_report(read_runs(options.data), options.plot)
        else:
            run_missing(options.data, options.seeds, options.minutes)
    except (VlaRlError, OSError, ValueError, CalledProcessError, TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
