"""Runs that are compared by their success before the first update and after the last."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from benchmarks.counted_cpu import run_counted
from benchmarks.interleaved import print_json_line
from benchmarks.kept_runs import about_run, keep, read_json
from benchmarks.planned_runs import format_rate, percent, print_rows
from vla_rl.evaluation.record_file import read_records
from vla_rl.evaluation.records import (
    SUCCESSES,
    VALIDATION,
    EpisodeRecord,
    group_by_task,
    group_by_weights,
)
from vla_rl.reporting import RunDirectory, read_metrics

NODES = ("values", "advantage", "critic", "update")
"""Parts of an update whose seconds are kept, besides those of acting."""

CURVES: Final = {
    "success": "rollout/success_rate",
    "clip_fraction": "update/clip_fraction",
    "explained_variance": "critic/explained_variance",
}
"""Curves that are kept, with the metrics that they are."""

GAP: Final = "update/log_prob_gap_max"


def train_and_keep(
    name: str, command: Sequence[str], fresh: Sequence[str], folder: Path, limit_s: float,
    keep_in: Path, note: str,
) -> None:  # fmt: skip
    """Run what is missing of a run, and keep it.

    Args:
        name: name of the run.
        command: the recipe.
        fresh: its options, if it has not begun.
        folder: parent of the run's folder, for this run alone.
        limit_s: CPU seconds after which it is stopped.
        keep_in: file of the kept runs.
        note: what else ran on the machine.

    Raises: CalledProcessError if the command fails; CpuLimitExceeded; ValueError; OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = sorted(path for path in folder.iterdir() if path.is_dir())
    options = ("--resume", str(runs[-1])) if runs else (*fresh, "--run.root", str(folder))
    seconds = run_counted((*command, *options), folder / "cpu_seconds", limit_s)
    (run,) = (path for path in folder.iterdir() if path.is_dir())
    line = make_line(name, RunDirectory.existing(run), seconds, note)
    keep(keep_in, line, lambda line: str(line["run"]))


def make_line(name: str, run: RunDirectory, cpu_seconds: float, note: str) -> dict[str, Any]:
    """Return everything of a run that the table and its reader need.

    Raises: ValueError if the run has not ended; OSError.
    """
    config, updates = read_json(run.config), read_metrics(run.path / "metrics.jsonl")
    evaluated = [
        path for each in (SUCCESSES, VALIDATION) if (path := run.path / each.file).exists()
    ]
    by_weights = group_by_weights(read_records(evaluated[0]))
    if sorted(by_weights) != [0, config["run"]["updates"]]:
        raise ValueError(f"{run.path} has not ended: weights {sorted(by_weights)} were evaluated")
    parts = (
        *("run", "scheduler", "learner", "advantage", "critic"),
        *("off_policy", "steering", "intervention", "expert"),
    )
    return {
        "run": name,
        "outcomes_before": list_outcomes(by_weights[0]),
        "outcomes_after": list_outcomes(by_weights[max(by_weights)]),
        "env_steps": round(
            sum(
                line["rollout/env_steps"] + line.get("rollout/planned_steps", 0) for line in updates
            )
        ),
        "cpu_seconds": round(cpu_seconds),
        "seconds": {
            "training": round(sum(line["time/update_s"] for line in updates)),
            "act": round(
                sum(line["rollout/policy_busy_share"] * line["time/update_s"] for line in updates)
            ),
            **{
                node: round(sum(line.get(f"time/node/{node}_s", 0.0) for line in updates))
                for node in NODES
            },
        },
        **read_curves(updates),
        "log_prob_gap_max": max(
            (value for line in updates for _, value in _find_metric(line, GAP)), default=None
        ),
        "settings": {part: config[part] for part in parts if part in config},
        **about_run(run, note),
    }


def read_curves(updates: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return the curves of what the runs have, one for each member of a team, under the member's name.

    None: an update that has no such number, such as one in which a member did not learn.
    """
    curves: dict[str, list[float | None]] = {}
    for short, path in CURVES.items():
        members = {member for line in updates for member, _ in _find_metric(line, path)}
        for member in sorted(members):
            found = (line.get(member + path) for line in updates)
            curves[member + short] = [None if each is None else round(each, 4) for each in found]
    return curves


def _find_metric(line: Mapping[str, Any], path: str) -> list[tuple[str, float]]:
    """Return a metric's values, each after the beginning of its name: "" or a member, such as "robot/"."""
    return [
        (name.removesuffix(path), value)
        for name, value in line.items()
        if name == path or name.endswith(f"/{path}")
    ]


def list_outcomes(records: Sequence[EpisodeRecord]) -> dict[str, str]:
    """Return the outcomes of each task in the order of the starts, 1 for a success."""
    return {
        task: "".join(
            str(int(record.parts.get("success", record.is_success)))
            for record in sorted(found, key=lambda each: each.start)
        )
        for task, found in sorted(group_by_task(records).items())
    }


def join_outcomes(line: dict[str, Any], when: str) -> str:
    """Return a run's outcomes of all tasks, in the order of tasks and starts."""
    by_task: dict[str, str] = line[f"outcomes_{when}"]
    return "".join(by_task[task] for task in sorted(by_task))


def print_flow_runs(
    lines: Sequence[dict[str, Any]], compared: Mapping[str, float | None] = MappingProxyType({})
) -> None:
    """Print kept runs as a table, a column for each task if there are several, and their JSON line.

    Args:
        lines: the kept runs.
        compared: further keys of the JSON line.
    """
    kept = len(lines)
    lines = [line for line in lines if "outcomes_before" in line and "stopped_after" not in line]
    if len(lines) < kept:
        print(f"{kept - len(lines)} runs that were stopped before their end are not shown.")
    tasks = sorted(lines[0]["outcomes_before"]) if lines else []
    head = ["run", "control steps", "CPU seconds", "before, % (95 %)", "after, % (95 %)", "points"]
    rows, rates = [], []
    for line in lines:
        by_task = [line[f"outcomes_{when}"] for when in ("before", "after")]
        before, after = (join_outcomes(line, when) for when in ("before", "after"))
        rates.append((percent(before), percent(after)))
        points = f"{rates[-1][1] - rates[-1][0]:+.1f}"
        costs = (f"{line['env_steps']:,}", f"{line['cpu_seconds']:,}")
        counts = (
            f"{by_task[0][task].count('1')} to {by_task[1][task].count('1')} of {len(by_task[0][task])}"
            for task in tasks
        )
        shown = [line["run"], *costs, format_rate(before, 1), format_rate(after, 1), points]
        rows.append([*shown, *(counts if len(tasks) > 1 else ())])
    print_rows([*head, *(tasks if len(tasks) > 1 else ())], rows)
    print_json_line(
        {
            "runs": [line["run"] for line in lines],
            "before": [before for before, _ in rates],
            "after": [after for _, after in rates],
            "gain": [round(after - before, 1) for before, after in rates],
            "env_steps": [line["env_steps"] for line in lines],
            "cpu_seconds": [line["cpu_seconds"] for line in lines],
            **compared,
        }
    )
