"""The run as a person sees it: a live table in a terminal, one line an update anywhere else.

In a terminal a thread of rich's renders a few times a second; the loop only changes counters. Elsewhere `after_update`
prints one line.
"""

import datetime
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vla_rl.actors import Wait, current_waits
from vla_rl.observe.progress import RunProgress, Snapshot

MAX_WAITS = 5


class LiveView:
    """Shows `progress` while the context is open; what others print meanwhile appears above it.

    Args:
        progress: what to show.
        console: where to show it; None is standard output.
        refresh_hz: renderings a second in a terminal.
        waits: gives who waits for whom, the longest first.
    """

    def __init__(
        self,
        progress: RunProgress,
        console: Console | None = None,
        refresh_hz: float = 2.0,
        waits: Callable[[], Sequence[Wait]] = current_waits,
    ) -> None:
        self._progress, self._waits = progress, waits
        self._console = console if console is not None else Console(file=sys.stdout)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=refresh_hz)

    def __enter__(self) -> "LiveView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def after_update(self) -> None:
        """Print the line of an update where there is no terminal; in a terminal the table already shows it."""
        if self._live is None:
            line = update_line(self._progress.snapshot())
            self._console.print(Text(line), soft_wrap=True)

    def _render(self) -> Group:
        return live_table(self._progress.snapshot(), self._waits(), time.monotonic())


def update_line(snapshot: Snapshot) -> str:
    """One update in one line, for logs."""
    parts = [
        f"update {snapshot.update}/{snapshot.num_updates}",
        f"episodes {snapshot.num_episodes}",
        f"success {_share(snapshot.success_rate)}",
        f"env steps/s {snapshot.env_steps_per_s:,.1f}",
    ]
    if snapshot.policy_busy_share is not None:
        parts.append(f"policy busy {_share(snapshot.policy_busy_share)}")
    if snapshot.critical_path:
        parts.append(snapshot.critical_path)
    parts.append(f"eta {_duration(snapshot.eta_s)}")
    return "  ".join(parts)


def live_table(snapshot: Snapshot, waits: Sequence[Wait], now_s: float) -> Group:
    """The whole view: progress bar, figures, nodes of the last update, and who waits for whom."""
    figures = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=max(snapshot.num_updates, 1), completed=snapshot.update, width=40)
    figures.add_row("update", f"{snapshot.update}/{snapshot.num_updates}", bar)
    figures.add_row("time", _duration(snapshot.elapsed_s), f"eta {_duration(snapshot.eta_s)}")
    figures.add_row("episodes", f"{snapshot.num_episodes:,}", f"success {_share(snapshot.success_rate)} (recent)")
    busy = _share(snapshot.policy_busy_share)
    figures.add_row("env steps/s", f"{snapshot.env_steps_per_s:,.1f}", f"policy busy {busy}")
    parts: list[Table | Text] = [figures]
    if snapshot.critical_path:
        parts.append(Text(snapshot.critical_path, style="bold"))
    if snapshot.node_seconds:
        parts.append(_node_table(snapshot))
    for wait in waits[:MAX_WAITS]:
        parts.append(Text(wait.describe(now_s), style="dim"))
    if len(waits) > MAX_WAITS:
        parts.append(Text(f"and {len(waits) - MAX_WAITS} more waits", style="dim"))
    return Group(*parts)


def _node_table(snapshot: Snapshot) -> Table:
    longest = max(max(snapshot.node_seconds.values()), 1e-9)
    table = Table.grid(padding=(0, 2))
    for node, seconds in snapshot.node_seconds.items():
        table.add_row(f"  {node}", f"{seconds:.2f} s", ProgressBar(total=longest, completed=seconds, width=30))
    return table


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _duration(seconds: float | None) -> str:
    return "-" if seconds is None else str(datetime.timedelta(seconds=round(seconds)))
