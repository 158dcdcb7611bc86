"""Success rates by kind of change, for tasks of LIBERO-PRO and LIBERO-plus beside LIBERO's own."""

from collections.abc import Sequence
from typing import Final

from rich.table import Table

from vla_rl.envs.libero.packages import split_suite
from vla_rl.envs.libero.tasks import find_task, origin_of_suite
from vla_rl.evaluation.benchmark import SuiteTask
from vla_rl.evaluation.results import EpisodeResult, summary_of

UNPERTURBED: Final = "none"
"""The kind of change of LIBERO's own tasks."""

_ALL: Final = "all"


def kind_of_change(task: SuiteTask) -> str:
    """Return the kind of change of one of LIBERO's tasks: `camera`, `swap`, ..., or `UNPERTURBED`."""
    return find_task(task.suite, task.task_id).perturbation or UNPERTURBED


def robustness_table(results: Sequence[EpisodeResult], title: str) -> Table:
    """Make a table with a row for each kind of change, tasks without one first, and a column for
    each of LIBERO's suites that tasks were made from.

    A cell has successes and episodes, the rate, and its 95 % interval.
    """
    origins = list(dict.fromkeys(map(_origin_of, results)))
    columns = [*origins, _ALL] if len(origins) > 1 else origins
    table = Table("change", *columns, title=f"by kind of change: {title}")
    kinds = list(dict.fromkeys(result.perturbation for result in results))
    for kind in sorted(kinds, key=bool):
        of_kind = [result for result in results if result.perturbation == kind]
        cells = ([each for each in of_kind if _origin_of(each) == origin] for origin in origins)
        table.add_row(kind or UNPERTURBED, *map(_cell, [*cells, of_kind][: len(columns)]))
    return table


def _origin_of(result: EpisodeResult) -> str:
    suite = split_suite(result.suite)[1]
    return origin_of_suite(suite) or suite


def _cell(results: Sequence[EpisodeResult]) -> str:
    if not results:
        return "-"
    found = summary_of(results)
    low, high = found["wilson_95"]
    return (
        f"{found['successes']}/{found['episodes']} = {100 * found['success_rate']:.1f} % "
        f"({100 * low:.1f} to {100 * high:.1f})"
    )
