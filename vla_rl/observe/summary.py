"""The last page of a run: success by task, where the episodes went, where the time went."""

from collections.abc import Mapping

from rich.console import Console, Group
from rich.table import Table

from vla_rl.observe.progress import Snapshot, TaskTally


def summary_tables(snapshot: Snapshot, num_filtered: int, dropped: Mapping[str, int]) -> Group:
    """Tables of a run that has ended.

    Args:
        snapshot: the run at its end.
        num_filtered: episodes played whose group was not kept.
        dropped: episodes given up, by cause.
    """
    return Group(_run_table(snapshot, num_filtered, dropped), _task_table(snapshot.tasks), _time_table(snapshot))


def print_summary(
    snapshot: Snapshot, num_filtered: int, dropped: Mapping[str, int], console: Console | None = None
) -> None:
    """Print `summary_tables` to the console, or to standard output."""
    (console if console is not None else Console()).print(summary_tables(snapshot, num_filtered, dropped))


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
    table = Table("task", "episodes", "successes", "success rate", title="Success by task", show_footer=len(tasks) > 1)
    for column in table.columns[1:]:
        column.justify = "right"
    for task, tally in sorted(tasks.items()):
        table.add_row(task, str(tally.num_episodes), str(tally.num_successes), f"{tally.success_rate:.1%}")
    total = TaskTally(sum(t.num_episodes for t in tasks.values()), sum(t.num_successes for t in tasks.values()))
    footers = ("all", str(total.num_episodes), str(total.num_successes), f"{total.success_rate:.1%}")
    for column, footer in zip(table.columns, footers, strict=True):
        column.footer = footer
    return table


def _time_table(snapshot: Snapshot) -> Table:
    table = Table("node", "seconds", "share of the run", title="Time by node (nodes overlap)")
    for node, seconds in sorted(snapshot.total_node_seconds.items(), key=lambda item: -item[1]):
        share = seconds / snapshot.elapsed_s if snapshot.elapsed_s > 0.0 else 0.0
        table.add_row(node, f"{seconds:,.2f}", f"{share:.0%}")
    return table
