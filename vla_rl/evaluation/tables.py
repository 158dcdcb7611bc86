"""Tables of evaluated episodes, and the file `results.json` with the same numbers."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from vla_rl.envs.libero.packages import split_suite
from vla_rl.envs.libero.tasks import find_task, get_origin_suite
from vla_rl.evaluation.results import (
    EpisodeResult,
    group_by_perturbation,
    group_by_task,
    summarise_results,
)
from vla_rl.evaluation.suites import SuiteTask
from vla_rl.reporting.machine import versions
from vla_rl.util.atomic_files import replace_file

MOST_ROWS: Final = 90
"""Maximum number of tasks of a suite that a table lists: libero_90's."""


def result_table(results: Sequence[EpisodeResult], title: str) -> Table:
    """Make a table with a row for each task, each suite of several, and all.

    Steps are of successes. Suites of more than `MOST_ROWS` tasks, as LIBERO-plus's, have one row.
    """
    table = Table("task", "instruction", title=title)
    table.columns[0].no_wrap = True
    for name in ("solved", "rate", "95 %", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    groups = group_by_task(results)
    sizes = Counter(of_task[0].suite for of_task in groups.values())
    for task, of_task in groups.items():
        if sizes[of_task[0].suite] <= MOST_ROWS:
            table.add_row(task, of_task[0].instruction, *_result_cells(of_task))
    for suite, size in sizes.items():
        if size > 1:
            of_suite = [result for result in results if result.suite == suite]
            table.add_section()
            table.add_row(suite, f"all of its {size} tasks", *_result_cells(of_suite))
    if len(sizes) > 1:
        table.add_section()
        table.add_row("all", "", *_result_cells(results))
    return table


def _result_cells(results: Sequence[EpisodeResult]) -> list[str]:
    found = summarise_results(results)
    low, high = found["wilson_95"]
    steps = found["mean_steps_of_successes"]
    return [
        f"{found['successes']}/{found['episodes']}",
        f"{100 * found['success_rate']:.1f} %",
        f"{100 * low:.1f} to {100 * high:.1f}",
        "-" if steps is None else f"{steps:.0f}",
    ]


UNPERTURBED: Final = "none"
"""The kind of change of LIBERO's own tasks."""

_ALL_SUITES: Final = "all"


def kind_of_change(task: SuiteTask) -> str:
    """Return the kind of change of one of LIBERO's tasks: `camera`, `swap`, ..., or `UNPERTURBED`."""
    return find_task(task.suite, task.task_id).perturbation or UNPERTURBED


def robustness_table(results: Sequence[EpisodeResult], title: str) -> Table:
    """Make a table with a row for each kind of change, tasks without one first, and a column for
    each of LIBERO's suites that tasks were made from.

    A cell has successes and episodes, the rate, and its 95 % interval.
    """
    origins = list(dict.fromkeys(map(_original_suite, results)))
    columns = [*origins, _ALL_SUITES] if len(origins) > 1 else origins
    table = Table("change", *columns, title=f"by kind of change: {title}")
    kinds = list(dict.fromkeys(result.perturbation for result in results))
    for kind in sorted(kinds, key=bool):
        of_kind = [result for result in results if result.perturbation == kind]
        cells = (
            [each for each in of_kind if _original_suite(each) == origin] for origin in origins
        )
        table.add_row(kind or UNPERTURBED, *map(_format_rate, [*cells, of_kind][: len(columns)]))
    return table


def _original_suite(result: EpisodeResult) -> str:
    suite = split_suite(result.suite)[1]
    return get_origin_suite(suite) or suite


def _format_rate(results: Sequence[EpisodeResult]) -> str:
    if not results:
        return "-"
    found = summarise_results(results)
    low, high = found["wilson_95"]
    return (
        f"{found['successes']}/{found['episodes']} = {100 * found['success_rate']:.1f} % "
        f"({100 * low:.1f} to {100 * high:.1f})"
    )


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
    results: list[EpisodeResult],
    *,
    num_planned: int,
    num_missing: int,
) -> None:
    """Write `results.json`: it appears whole or not at all."""
    tasks = group_by_task(results)
    suites = list(dict.fromkeys(of_task[0].suite for of_task in tasks.values()))
    content = {
        "conditions": conditions,
        "versions": versions(),
        "planned_episodes": num_planned,
        "missing_episodes": num_missing,
        "is_complete": num_missing == 0,
        "summary": summarise_results(results),
        "suites": {
            suite: summarise_results([result for result in results if result.suite == suite])
            for suite in suites
        },
        "perturbations": {
            kind: summarise_results(of_kind)
            for kind, of_kind in group_by_perturbation(results).items()
        },
        "tasks": {task: summarise_results(of_task) for task, of_task in tasks.items()},
        "episodes": [result for of_task in tasks.values() for result in of_task],
    }
    replace_file(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
