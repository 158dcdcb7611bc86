"""The tables and `results.json` of an evaluation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from vla_rl.evaluation.results import (
    EpisodeResult,
    by_perturbation,
    by_task,
    result_table,
    summary_of,
)
from vla_rl.evaluation.robustness import robustness_table
from vla_rl.reporting.machine import versions
from vla_rl.reporting.record_files import write_whole


def print_tables(
    results: Sequence[EpisodeResult], title: str, caption: str, console: Console
) -> None:
    """Print the rates by task, and by kind of change if there are any."""
    tables = [result_table(results, title)]
    if any(result.perturbation for result in results):
        tables.append(robustness_table(results, title))
    for table in tables:
        table.caption = caption
        console.print(table)


def title_of(
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
    results: list[EpisodeResult],
    *,
    num_planned: int,
    num_missing: int,
) -> None:
    """Write `results.json`: it appears whole or not at all."""
    tasks = by_task(results)
    suites = list(dict.fromkeys(of_task[0].suite for of_task in tasks.values()))
    content = {
        "conditions": conditions,
        "versions": versions(),
        "planned_episodes": num_planned,
        "missing_episodes": num_missing,
        "is_complete": num_missing == 0,
        "summary": summary_of(results),
        "suites": {
            suite: summary_of([result for result in results if result.suite == suite])
            for suite in suites
        },
        "perturbations": {
            kind: summary_of(of_kind) for kind, of_kind in by_perturbation(results).items()
        },
        "tasks": {task: summary_of(of_task) for task, of_task in tasks.items()},
        "episodes": [result for of_task in tasks.values() for result in of_task],
    }
    write_whole(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
