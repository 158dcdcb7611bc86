"""Latencies of a server's replies, by client, as a table and in Prometheus' text format."""

import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from rich.table import Table

KEPT: Final = 1024
"""Newest latencies of a client that its percentiles are computed from."""

PERCENTILES: Final = (50.0, 95.0, 99.0)


@dataclasses.dataclass(kw_only=True)
class ClientLatencies:
    """Counts and latencies of the replies to one client.

    Attributes:
        client: its address and the number of its connection.
        num_replies: replies, errors included. num_errors: replies that were errors.
    """

    client: str
    num_replies: int = 0
    num_errors: int = 0
    last_reply_at: float = 0.0
    # made with the first reply: thousands of idle connections need no rings
    _seconds: deque[float] | None = None

    def add_reply(self, seconds: float, *, is_error: bool) -> None:
        """Count a reply that was sent `seconds` after its observation had arrived."""
        if self._seconds is None:
            self._seconds = deque(maxlen=KEPT)
        self._seconds.append(seconds)
        self.num_replies += 1
        self.num_errors += is_error
        self.last_reply_at = time.monotonic()

    def percentiles_ms(self) -> dict[float, float]:
        """Return latencies in ms by percentile; empty without a reply."""
        if not self._seconds:
            return {}
        found = np.percentile(np.array(self._seconds), PERCENTILES) * 1e3
        return dict(zip(PERCENTILES, found.tolist(), strict=True))


def latency_table(clients: Iterable[ClientLatencies], title: str = "Replies") -> Table:
    """Return one row for each client that got a reply."""
    columns = [f"p{percentile:g} ms" for percentile in PERCENTILES]
    table = Table("client", "replies", "errors", *columns, title=title)
    for each in clients:
        shown = [f"{value:.1f}" for value in each.percentiles_ms().values()]
        if shown:
            table.add_row(each.client, str(each.num_replies), str(each.num_errors), *shown)
    return table


def prometheus_text(gauges: Mapping[str, float], clients: Iterable[ClientLatencies]) -> str:
    """Return metrics in Prometheus' text format 0.0.4.

    Args:
        gauges: numbers of the server, by name.
        clients: those whose latencies are listed.
    """
    lines = [f"vla_rl_serve_{name} {value:g}" for name, value in gauges.items()]
    for each in clients:
        label = f'client="{each.client}"'
        lines.append(f"vla_rl_serve_replies_total{{{label}}} {each.num_replies}")
        lines.append(f"vla_rl_serve_errors_total{{{label}}} {each.num_errors}")
        for percentile, value in each.percentiles_ms().items():
            quantile = f'quantile="{percentile / 100:g}"'
            lines.append(f"vla_rl_serve_latency_seconds{{{label},{quantile}}} {value / 1e3:.6f}")
    return "\n".join([*lines, ""])
