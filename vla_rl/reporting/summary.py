"""The summary of a run: success and return by task, episodes by outcome, time by node."""

from collections.abc import Mapping

from rich.console import Console, Group
from rich.table import Table

from vla_rl.reporting.live_view import figure
from vla_rl.reporting.progress import Snapshot, TaskTally
from vla_rl.util.values import plain_console


def summary_tables(snapshot: Snapshot, num_filtered: int, dropped: Mapping[str, int]) -> Group:
    """Return the tables of a run that has ended.

    Args:
        snapshot: the state of the run at its end.
        num_filtered: episodes whose group was not kept.
        dropped: dropped episodes, by cause.
    """
    return Group(
        _run_table(snapshot, num_filtered, dropped),
        _task_table(snapshot.tasks),
        _time_table(snapshot),
    )


def print_summary(
    snapshot: Snapshot,
    num_filtered: int,
    dropped: Mapping[str, int],
    console: Console | None = None,
) -> None:
    """Print `summary_tables` to the console, or to standard output."""
    (console if console is not None else plain_console()).print(
        summary_tables(snapshot, num_filtered, dropped)
    )


def _run_table(snapshot: Snapshot, num_filtered: int, dropped: Mapping[str, int]) -> Table:
    table = Table(title="Run", show_header=False)
    table.add_row("updates", f"{snapshot.update}/{snapshot.num_updates}")
    table.add_row("time", f"{snapshot.elapsed_s:,.1f} s")
    table.add_row("episodes", f"{snapshot.num_episodes:,}")
    table.add_row("  filtered", f"{num_filtered:,}")
    for cause, count in sorted(dropped.items()):
        table.add_row(f"  dropped ({cause})", f"{count:,}")
    table.add_row("env steps", f"{snapshot.env_steps:,}")
    per_s = snapshot.env_steps / snapshot.elapsed_s if snapshot.elapsed_s > 0.0 else 0.0
    table.add_row("env steps/s", f"{per_s:,.1f}")
    return table


def _task_table(tasks: Mapping[str, TaskTally]) -> Table:
    title = "Success and return by task"
    columns = ("task", "episodes", "successes", "success rate", "mean return")
    table = Table(*columns, title=title, show_footer=len(tasks) > 1)
    for column in table.columns[1:]:
        column.justify = "right"
    for task, tally in sorted(tasks.items()):
        table.add_row(task, str(tally.num_episodes), *_outcomes(tally, tally))
    total = sum(tasks.values(), TaskTally())
    with_success = sum((tally for tally in tasks.values() if tally.is_success_known), TaskTally())
    footers = ("all", str(total.num_episodes), *_outcomes(with_success, total))
    for column, footer in zip(table.columns, footers, strict=True):
        column.footer = footer
    return table


def _outcomes(with_success: TaskTally, total: TaskTally) -> tuple[str, str, str]:
    """Return the successes, their rate and the mean return; unknown ones as dashes."""
    rate = with_success.success_rate
    successes = ("-", "-") if rate is None else (str(with_success.num_successes), f"{rate:.1%}")
    return *successes, figure(total.mean_return)


def _time_table(snapshot: Snapshot) -> Table:
    table = Table("node", "seconds", "share of the run", title="Time by node (nodes overlap)")
    for node, seconds in sorted(snapshot.total_node_seconds.items(), key=lambda item: -item[1]):
        share = seconds / snapshot.elapsed_s if snapshot.elapsed_s > 0.0 else 0.0
        table.add_row(node, f"{seconds:,.2f}", f"{share:.0%}")
    return table
