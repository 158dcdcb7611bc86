"""Results of one update: values, metrics, and how it spent its time."""

from collections.abc import Mapping
from typing import Any

import msgspec

from vla_rl.graph.node import NodeStatus
from vla_rl.graph.spans import CriticalPath, Span


class Values(dict[str, Any]):
    """The kept values, by name."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"{name!r} was not kept, only {sorted(self)}: a value that other nodes read is freed "
            f"when the last of them has finished; name it in Executor(keep=({name!r},)) to have it "
            "here"
        )


class Update(msgspec.Struct, frozen=True):
    """One pass through the graph. Times are seconds on the executor's clock."""

    index: int
    values: Values
    """The values that no node reads, and those named by `Executor(keep=...)`; for a stream, the
    list of its items."""

    metrics: Mapping[str, float]
    """`NodeOutput.metrics` of all nodes."""

    spans: Mapping[str, Span]
    """Spans by node id, in topological order."""

    started: float
    """Time at which it was admitted: when there was room for another update in flight."""

    ended: float
    critical_path: CriticalPath
    """The nodes that bounded it; print it."""

    @property
    def duration_s(self) -> float:
        """Seconds from its admission to the end of the last node."""
        return self.ended - self.started

    @property
    def statuses(self) -> dict[str, NodeStatus]:
        """Final status by node id."""
        return {node_id: span.status for node_id, span in self.spans.items()}
