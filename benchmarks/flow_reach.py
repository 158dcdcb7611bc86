"""A small flow policy learns the reaching task with images: all runs of the proof, one after the other.

    python -m benchmarks.flow_reach                      what is missing, in order
    python -m benchmarks.flow_reach --only ppo/0         one run
    python -m benchmarks.flow_reach --table              what was kept

    ppo/0, /1, /2         PPO with a critic on the observation alone, three seeds
    grpo/0, /1, /2        GRPO, eight episodes from each start
    nft/0, /1, /2         pi-StepNFT, eight episodes from each start

A seed's base comes from `sft_toy` with that seed. Each run evaluates the same 200 held-out starts before
the first update and after the last, greedily; they choose nothing. A finished run is a line of `--keep`,
with every outcome, its curve, control steps, CPU seconds (evaluations included), versions and machine. A
run that was stopped goes on where it was, if the command is called again.

Keys of the last line, lists by run: `runs`; `before`, `after`, `gain` in percent and points; `env_steps`;
`cpu_seconds`.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.counted_cpu import run_counted
from benchmarks.interleaved import print_json_line
from benchmarks.kept_runs import about_run, keep, kept_lines, read_json
from vla_rl.errors import VlaRlError
from vla_rl.evaluation.record_file import read_records
from vla_rl.evaluation.records import SUCCESSES, EpisodeRecord, group_by_weights
from vla_rl.evaluation.tables import wilson_interval
from vla_rl.reporting import RunDirectory, read_metrics

LIMIT_S: Final = 1800.0
"""CPU seconds after which a run is stopped."""

RECIPES: Final = (sys.executable, "-m")
PLANNED: Final = [f"{name}/{seed}" for name in ("ppo", "grpo", "nft") for seed in range(3)]


def run_planned(name: str, root: Path, keep_in: Path, note: str) -> None:
    """Run what is missing of a run, and keep it.

    Raises: CalledProcessError if a command fails; CpuLimitExceeded; ValueError; OSError.
    """
    algorithm, _, seed = name.partition("/")
    base, folder = root / f"base_{seed}", root / name.replace("/", "_")
    folder.mkdir(parents=True, exist_ok=True)
    if not base.exists():
        sft = (*RECIPES, "vla_rl.recipes.sft_toy", "--seed", seed, "--out", str(base))
        run_counted(sft, root / f"base_{seed}_cpu_seconds", LIMIT_S)
    train = (*RECIPES, "vla_rl.recipes.train_toy")
    runs = sorted(folder.glob("reach_*"))
    fresh = ("--config", f"reach_{algorithm}", "--policy", str(base), "--run.seed", seed)
    command = (
        (*train, "--resume", str(runs[-1])) if runs else (*train, *fresh, "--run.root", str(folder))
    )
    seconds = run_counted(command, folder / "cpu_seconds", LIMIT_S)
    (run,) = folder.glob("reach_*")
    line = make_line(name, RunDirectory.existing(run), seconds, note)
    keep(keep_in, line, lambda line: str(line["run"]))


def make_line(name: str, run: RunDirectory, cpu_seconds: float, note: str) -> dict[str, Any]:
    """Return everything of a run that the table and its reader need.

    Raises: ValueError if the run has not ended; OSError.
    """
    config, updates = read_json(run.config), read_metrics(run.path / "metrics.jsonl")
    by_weights = group_by_weights(read_records(run.path / SUCCESSES.file))
    if sorted(by_weights) != [0, config["run"]["updates"]]:
        raise ValueError(f"{run.path} has not ended: weights {sorted(by_weights)} were evaluated")
    return {
        "run": name,
        "outcomes_before": list_outcomes(by_weights[0]),
        "outcomes_after": list_outcomes(by_weights[max(by_weights)]),
        # of the rollout alone; the rate is that of the time between two updates
        "env_steps": round(
            sum(line["rollout/env_steps_per_s"] * line["time/update_s"] for line in updates)
        ),
        "cpu_seconds": round(cpu_seconds),
        "success": [round(line["rollout/success_rate"], 4) for line in updates],
        "clip_fraction": [round(line.get("update/clip_fraction", 0.0), 4) for line in updates],
        "log_prob_gap_max": max(line.get("update/log_prob_gap_max", 0.0) for line in updates),
        "settings": {part: config[part] for part in ("run", "scheduler", "learner", "critic")},
        **about_run(run, note),
    }


def list_outcomes(records: Sequence[EpisodeRecord]) -> str:
    """Return the outcomes in the order of the starts, 1 for a success."""
    found = sorted(records, key=lambda record: record.start)
    return "".join(str(int(record.is_success)) for record in found)


def print_kept(path: Path) -> None:
    """Print the kept runs as a table, and their JSON line. Raises: ValueError if there are none."""
    lines = kept_lines(path) if path.exists() else []
    if not lines:
        raise ValueError(f"{path} has no runs; leave out --table to run them")
    head = ("run", "control steps", "CPU seconds", "before, % (95 %)", "after, % (95 %)", "points")
    rows: list[Sequence[str]] = [head, ["---"] * len(head)]
    gains = []
    for line in lines:
        before, after = (line[f"outcomes_{when}"] for when in ("before", "after"))
        gains.append(round(percent(after) - percent(before), 1))
        rates = (format_rate(before), format_rate(after))
        costs = (f"{line['env_steps']:,}", str(line["cpu_seconds"]))
        rows.append([line["run"], *costs, *rates, f"{gains[-1]:+.1f}"])
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    print_json_line(
        {
            "runs": [line["run"] for line in lines],
            "before": [percent(line["outcomes_before"]) for line in lines],
            "after": [percent(line["outcomes_after"]) for line in lines],
            "gain": gains,
            "env_steps": [line["env_steps"] for line in lines],
            "cpu_seconds": [line["cpu_seconds"] for line in lines],
        }
    )


def percent(outcomes: str) -> float:
    """Return the share of successes in percent."""
    return round(100 * outcomes.count("1") / len(outcomes), 1)


def format_rate(outcomes: str) -> str:
    """Return the share of successes in percent, with its 95 % interval."""
    low, high = wilson_interval(outcomes.count("1"), len(outcomes))
    return f"{percent(outcomes):.1f} ({100 * low:.0f} to {100 * high:.0f})"


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kept = Path("docs/results/flow_reach.jsonl")
    parser.add_argument("--runs", type=Path, default=Path("runs/flow_reach"), help="their folder")
    parser.add_argument("--keep", type=Path, default=kept, help="file of the kept runs")
    parser.add_argument("--only", nargs="+", choices=PLANNED, help="runs to make; default: all")
    parser.add_argument("--note", default="", help="what else ran on the machine; kept too")
    parser.add_argument("--table", action="store_true", help="run nothing, print the kept runs")
    options = parser.parse_args()
    try:
        done = {line["run"] for line in kept_lines(options.keep)} if options.keep.exists() else ()
        for name in () if options.table else options.only or PLANNED:
            if name not in done:
                print(f"{name} begins, or goes on", file=sys.stderr, flush=True)
                run_planned(name, options.runs, options.keep, options.note)
        print_kept(options.keep)
    except (VlaRlError, OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
