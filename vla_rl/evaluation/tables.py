"""Tables of evaluated episodes: means with their 95 % intervals.

Every table is made by `make_table` from cells that `format_mean` writes, and `results.json` has the same
numbers. A success rate has Wilson's interval, the mean of scores or rewards that of a bootstrap.
"""

import functools
import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from vla_rl.envs.libero.packages import split_suite
from vla_rl.envs.libero.tasks import find_task, get_origin_suite
from vla_rl.evaluation.records import (
    EpisodeRecord,
    Measure,
    group_by_perturbation,
    group_by_task,
    group_by_weights,
)
from vla_rl.evaluation.suites import SuiteTask
from vla_rl.reporting.machine import versions
from vla_rl.util.atomic_files import replace_file

MOST_ROWS: Final = 90
"""Maximum number of tasks of a suite that a table lists: libero_90's."""

UNPERTURBED: Final = "none"
"""The kind of change of LIBERO's own tasks."""

NUM_RESAMPLES: Final = 1000
"""Resamples of the bootstrap: its ends vary by some 3 % of the interval between two seeds."""

_ALL: Final = "all"
_Z_95: Final = 1.959963984540054  # quantile of the normal distribution


class Mean(NamedTuple):
    """A mean over episodes, with its 95 % interval.

    Example:
        Mean(episodes=100, mean=0.84, low=0.756, high=0.899)
    """

    episodes: int
    mean: float
    low: float
    high: float


def compute_mean(values: Sequence[float], measure: str) -> Mean:
    """Return the mean of at least one value, with the interval of its measure."""
    if measure == "success_rate":
        interval = wilson_interval(round(sum(values)), len(values))
    else:
        interval = bootstrap_interval(values)
    return Mean(len(values), statistics.fmean(values), *interval)


def wilson_interval(num_successes: int, num: int, z: float = _Z_95) -> tuple[float, float]:
    """Return Wilson's score interval of a success rate (Wilson 1927).

    It is valid near 0 and 1 and for few episodes.

        centre +- half, with  centre = (p + z^2 / 2n) / (1 + z^2 / n)
                              half   = z sqrt(p (1 - p) / n + z^2 / 4n^2) / (1 + z^2 / n)

    Args:
        num_successes, num: number of successes, and of episodes (at least 1).
        z: quantile of the normal distribution; the default is for 95 %.
    """
    if not 0 <= num_successes <= num or num < 1:
        raise ValueError(
            f"{num_successes} of {num} episodes, expected 0 to n successes of n >= 1 episodes."
        )
    rate, share = num_successes / num, z * z / num
    centre = (rate + share / 2) / (1 + share)
    half = z * math.sqrt(rate * (1 - rate) / num + share / (4 * num)) / (1 + share)
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % percentile interval of the mean over resamples (Efron 1979), always the same
    for the same values.

    Scores need not be normal: many are 0 or 1, and an interval of the normal distribution reaches beyond
    what a score can be. With few episodes it is too narrow, as every bootstrap is.
    """
    return _resample(tuple(values))


@functools.lru_cache(maxsize=1024)  # a curve computes the intervals of all its points again
def _resample(values: tuple[float, ...]) -> tuple[float, float]:
    draws, found = np.random.default_rng(0), np.array(values, np.float64)
    means: list[float] = []
    while len(means) < NUM_RESAMPLES:
        # at most 8 MiB of indices at a time, so that an evaluation of thousands of episodes needs
        # no gigabytes
        num = min(NUM_RESAMPLES - len(means), max(1, 2**20 // len(found)))  # 8 MiB at a time
        means.extend(found[draws.integers(0, len(found), (num, len(found)))].mean(axis=1))
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def format_mean(mean: Mean, measure: str) -> str:
    """Format a mean for a cell of a table."""
    if measure != "success_rate":
        return f"{mean.mean:.3f} ({mean.low:.3f} to {mean.high:.3f}), n = {mean.episodes}"
    return (
        f"{round(mean.mean * mean.episodes)}/{mean.episodes} = {100 * mean.mean:.1f} % "
        f"({100 * mean.low:.1f} to {100 * mean.high:.1f})"
    )


def make_table(
    title: str, label: str, rows: Mapping[str, Mapping[str, str]], totals: Collection[str] = ()
) -> Table:
    """Return a table of cells by row and column, with a line above each row of `totals`.

    A cell that a row lacks is a dash.
    """
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    table = Table(label, title=title)
    table.columns[0].no_wrap = True
    for column in columns:
        table.add_column(column)
    for name, cells in rows.items():
        if name in totals:
            table.add_section()
        table.add_row(name, *(cells.get(column, "-") for column in columns))
    return table


def result_table(records: Sequence[EpisodeRecord], title: str) -> Table:
    """Make a table with a row for each task, each suite of several, and all.

    Steps are of successes. Suites of more than `MOST_ROWS` tasks, as LIBERO-plus's, have one row.
    """
    groups = group_by_task(records)
    sizes = Counter(of_task[0].suite for of_task in groups.values())
    rows = {
        task: _result_cells(of_task, of_task[0].instruction)
        for task, of_task in groups.items()
        # LIBERO-plus has thousands of tasks, and a table of them would fill many screens
        if sizes[of_task[0].suite] <= MOST_ROWS
    }
    suites = [suite for suite, size in sizes.items() if size > 1]
    for suite in suites:
        of_suite = [record for record in records if record.suite == suite]
        rows[suite] = _result_cells(of_suite, f"all of its {sizes[suite]} tasks")
    if len(sizes) > 1:
        rows[_ALL] = _result_cells(records, "")
    return make_table(title, "task", rows, [*suites, _ALL])


def _result_cells(records: Sequence[EpisodeRecord], instruction: str) -> dict[str, str]:
    steps = summarise_records(records)["mean_steps_of_successes"]
    return {
        "instruction": instruction,
        "solved": _format_values(records),
        "steps": "-" if steps is None else f"{steps:.0f}",
    }


def _format_values(records: Sequence[EpisodeRecord], measure: str = "success_rate") -> str:
    if not records:
        return "-"
    return format_mean(compute_mean([record.value for record in records], measure), measure)


def change_table(records: Sequence[EpisodeRecord], title: str) -> Table:
    """Make a table with a row for each kind of change, tasks without one first, and a column for
    each of LIBERO's suites that tasks were made from.
    """
    suites = list(dict.fromkeys(map(_original_suite, records)))
    rows = {}
    for kind in sorted(dict.fromkeys(record.perturbation for record in records), key=bool):
        of_kind = [record for record in records if record.perturbation == kind]
        cells = {
            suite: _format_values([each for each in of_kind if _original_suite(each) == suite])
            for suite in suites
        }
        together = {_ALL: _format_values(of_kind)} if len(suites) > 1 else {}
        rows[kind or UNPERTURBED] = cells | together
    return make_table(f"by kind of change: {title}", "change", rows)


def kind_of_change(task: SuiteTask) -> str:
    """Return the kind of change of one of LIBERO's tasks: `camera`, `swap`, ..., or `UNPERTURBED`."""
    return find_task(task.suite, task.task_id).perturbation or UNPERTURBED


def _original_suite(record: EpisodeRecord) -> str:
    suite = split_suite(record.suite)[1]
    return get_origin_suite(suite) or suite


def weights_table(records: Sequence[EpisodeRecord], measure: Measure) -> Table:
    """Make a table with a column for each weight version: a row for each task and one for all, or for
    each part of the score.
    """
    if measure == "success_rate":
        of_weights = group_by_weights(records)
        rows = {
            task: {
                f"weights {version}": _format_values([each for each in found if each.task == task])
                for version, found in of_weights.items()
            }
            for task in group_by_task(records)
        }
        rows[_ALL] = {
            f"weights {version}": _format_values(found) for version, found in of_weights.items()
        }
        return make_table("Held-out episodes solved", "task", rows, [_ALL])
    parts = {
        part: {f"weights {version}": format_mean(mean, measure) for version, mean in means.items()}
        for part, means in part_means(records).items()
    }
    return make_table("Held-out scores", "part", parts)


def part_means(records: Sequence[EpisodeRecord]) -> dict[str, dict[int, Mean]]:
    """Return the mean of each part of the score by weight version, the total first."""
    found: dict[str, dict[int, list[float]]] = {}
    for record in records:
        for name, value in {"total": record.value, **record.parts}.items():
            found.setdefault(name, {}).setdefault(record.weights, []).append(value)
    return {
        name: {
            version: compute_mean(values, "score")
            for version, values in sorted(found[name].items())
        }
        for name in sorted(found, key=lambda name: (name != "total", name))
    }


def summarise_records(records: Sequence[EpisodeRecord]) -> dict[str, Any]:
    """Summarise at least one episode as plain values: success rate, interval and lengths."""
    rate = compute_mean([record.value for record in records], "success_rate")
    solved = [record.num_steps for record in records if record.is_success]
    return {
        "episodes": len(records),
        "successes": sum(record.is_success for record in records),
        "success_rate": rate.mean,
        "wilson_95": [rate.low, rate.high],
        "mean_steps_of_successes": sum(solved) / len(solved) if solved else None,
        "mean_steps": sum(record.num_steps for record in records) / len(records),
    }


def print_tables(
    records: Sequence[EpisodeRecord], title: str, caption: str, console: Console
) -> None:
    """Print the rates by task, and by kind of change if there are any."""
    tables = [result_table(records, title)]
    if any(record.perturbation for record in records):
        tables.append(change_table(records, title))
    for table in tables:
        table.caption = caption
        console.print(table)


def table_title(
    checkpoint: str, conditions: dict[str, Any], *, num_planned: int, num_missing: int
) -> str:
    """Return the title of the table; for an interrupted evaluation, it warns that the rates are
    biased.
    """
    named = [
        f"{name}: {conditions[name]}"
        for name in ("libero", "assets", "scenes")
        if name in conditions
    ]
    title = ", ".join([checkpoint, *named])
    if num_missing == 0:
        return title
    return (
        f"{title}; incomplete: {num_planned - num_missing} of {num_planned} episodes, those "
        "running were lost, so rates favour short ones"
    )


def write_results(
    path: Path,
    conditions: dict[str, Any],
    records: list[EpisodeRecord],
    *,
    num_planned: int,
    num_missing: int,
) -> None:
    """Write `results.json`: it appears whole or not at all."""
    tasks = group_by_task(records)
    suites = list(dict.fromkeys(of_task[0].suite for of_task in tasks.values()))
    content = {
        "conditions": conditions,
        "versions": versions(),
        "planned_episodes": num_planned,
        "missing_episodes": num_missing,
        # rates of a part of the episodes favour short ones, so a reader has to see it
        "is_complete": num_missing == 0,
        "summary": summarise_records(records),
        "suites": {
            suite: summarise_records([record for record in records if record.suite == suite])
            for suite in suites
        },
        "perturbations": {
            kind: summarise_records(of_kind)
            for kind, of_kind in group_by_perturbation(records).items()
        },
        "tasks": {task: summarise_records(of_task) for task, of_task in tasks.items()},
        "episodes": [_as_result(record) for of_task in tasks.values() for record in of_task],
    }
    replace_file(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def _as_result(record: EpisodeRecord) -> dict[str, Any]:
    """Return an episode under the names that `results.json` has always had."""
    return {
        "suite": record.suite,
        "task_id": record.task_id,
        "task": record.task,
        "instruction": record.instruction,
        "init_state_id": record.start,
        "scene_seed": record.seed,
        "is_success": record.is_success,
        "num_steps": record.num_steps,
        "attempts": int(record.parts["attempts"]),
        "perturbation": record.perturbation,
    }
