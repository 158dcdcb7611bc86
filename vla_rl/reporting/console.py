"""A run on the console: a live table or a line for each update, then a summary.

In a terminal a thread of rich's renders a few times a second; the loop only changes counters.
Elsewhere `after_update` prints one line. If an environment never reports success, one more line
reports that, once.
"""

import datetime
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vla_rl.actors import Wait, list_waits
from vla_rl.reporting.progress import RunProgress, Snapshot, TaskTally
from vla_rl.util.values import plain_console

MAX_WAITS = 5
MAX_TASKS = 3
"""Most tasks that the line about unknown success names."""


class LiveView:
    """Shows `progress` while the context is open; other output appears above it.

    Args:
        progress: the progress to show.
        console: the console to show it on; None: standard output.
        refresh_hz: renderings a second in a terminal.
        waits: returns the waits of the run, the longest first.
    """

    def __init__(
        self,
        progress: RunProgress,
        console: Console | None = None,
        refresh_hz: float = 2.0,
        waits: Callable[[], Sequence[Wait]] = list_waits,
    ) -> None:
        self._progress, self._waits = progress, waits
        self._console = console if console is not None else plain_console(file=sys.stdout)
        self._has_noted = False
        self._live: Live | None = None
        # a log file gets a line an update instead: frames of a table would fill it
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._render, console=self._console, refresh_per_second=refresh_hz
            )

    def __enter__(self) -> "LiveView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def after_update(self) -> None:
        """Print the line of an update, unless a terminal's table shows it.

        Tasks whose success is unknown are printed once.
        """
        snapshot = self._progress.snapshot()
        if self._live is None:
            # one line stays one line in a log, so that grep and awk can read it
            self._console.print(Text(update_line(snapshot)), soft_wrap=True)
        note = None if self._has_noted else unknown_success(snapshot.tasks)
        if note is not None:
            self._has_noted = True
            self._console.print(Text(note), soft_wrap=True)

    def _render(self) -> Group:
        return live_table(self._progress.snapshot(), self._waits(), time.monotonic())


def update_line(snapshot: Snapshot) -> str:
    """Format one update in one line, for logs."""
    parts = [
        f"update {snapshot.update}/{snapshot.num_updates}",
        f"episodes {snapshot.num_episodes}",
        f"success {format_share(snapshot.success_rate)}",
        f"return {format_number(snapshot.mean_return)}",
        f"env steps/s {snapshot.env_steps_per_s:,.1f}",
    ]
    if snapshot.policy_busy_share is not None:
        parts.append(f"policy busy {format_share(snapshot.policy_busy_share)}")
    parts += [each for each in (snapshot.critical_path, snapshot.note) if each]
    parts.append(f"eta {_format_duration(snapshot.eta_s)}")
    return "  ".join(parts)


def unknown_success(tasks: Mapping[str, TaskTally]) -> str | None:
    """Return the line that names the tasks whose success is unknown, and the remedy.

    None if there are none.
    """
    unknown = [task for task, tally in tasks.items() if not tally.is_success_known]
    if not unknown:
        return None
    named = ", ".join(unknown[:MAX_TASKS]) + (
        f" and {len(unknown) - MAX_TASKS} more" if len(unknown) > MAX_TASKS else ""
    )
    return (
        f"success is shown as '-': no episode of {named} has had 'is_success' in its info so far; "
        "watch its return, or set info['is_success'] in the environment's last step (train_toy: "
        "--success-return)"
    )


def live_table(snapshot: Snapshot, waits: Sequence[Wait], now_s: float) -> Group:
    """Return the whole view: progress bar, figures, nodes of the last update, and current waits."""
    figures = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(snapshot.num_updates, 1), completed=snapshot.update, width=40)
    figures.add_row("update", f"{snapshot.update}/{snapshot.num_updates}", bar)
    figures.add_row(
        "time", _format_duration(snapshot.elapsed_s), f"eta {_format_duration(snapshot.eta_s)}"
    )
    figures.add_row(
        "episodes",
        f"{snapshot.num_episodes:,}",
        f"success {format_share(snapshot.success_rate)} (recent)",
    )
    figures.add_row("return", format_number(snapshot.mean_return), "(recent)")
    busy = format_share(snapshot.policy_busy_share)
    figures.add_row("env steps/s", f"{snapshot.env_steps_per_s:,.1f}", f"policy busy {busy}")
    parts: list[Table | Text] = [figures]
    if snapshot.critical_path:
        parts.append(Text(snapshot.critical_path, style="bold"))
    if snapshot.note:
        parts.append(Text(snapshot.note))
    if snapshot.node_seconds:
        parts.append(_node_table(snapshot))
    for wait in waits[:MAX_WAITS]:
        parts.append(Text(wait.describe(now_s), style="dim"))
    if len(waits) > MAX_WAITS:
        # 512 environments may wait at once; the view has to fit a terminal
        parts.append(Text(f"and {len(waits) - MAX_WAITS} more waits", style="dim"))
    return Group(*parts)


def _node_table(snapshot: Snapshot) -> Table:
    # nodes of a test may take no time at all, and a bar of 0 divides by it
    longest = max(max(snapshot.node_seconds.values()), 1e-9)
    table = Table.grid(padding=(0, 2))
    for node, seconds in snapshot.node_seconds.items():
        table.add_row(
            f"  {node}", f"{seconds:.2f} s", ProgressBar(total=longest, completed=seconds, width=30)
        )
    return table


def format_share(value: float | None) -> str:
    """Format a share in per cent; None is a dash."""
    return "-" if value is None else f"{value:.0%}"


def format_number(value: float | None) -> str:
    """Format a number with four significant digits; None is a dash."""
    return "-" if value is None else f"{value:,.4g}"


def _format_duration(seconds: float | None) -> str:
    return "-" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))


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
    # a task without success would count as failures in the rate of all
    with_success = sum((tally for tally in tasks.values() if tally.is_success_known), TaskTally())
    footers = ("all", str(total.num_episodes), *_outcomes(with_success, total))
    for column, footer in zip(table.columns, footers, strict=True):
        column.footer = footer
    return table


def _outcomes(with_success: TaskTally, total: TaskTally) -> tuple[str, str, str]:
    """Return the successes, their rate and the mean return; unknown ones as dashes."""
    rate = with_success.success_rate
    successes = ("-", "-") if rate is None else (str(with_success.num_successes), f"{rate:.1%}")
    return *successes, format_number(total.mean_return)


def _time_table(snapshot: Snapshot) -> Table:
    table = Table("node", "seconds", "share of the run", title="Time by node (nodes overlap)")
    for node, seconds in sorted(snapshot.total_node_seconds.items(), key=lambda item: -item[1]):
        share = seconds / snapshot.elapsed_s if snapshot.elapsed_s > 0.0 else 0.0
        table.add_row(node, f"{seconds:,.2f}", f"{share:.0%}")
    return table
