"""Results of one update: its values, its failure, when its nodes ran, the chain that bounded it.

A node's time in one update is a list of intervals in which it worked. Each interval stores what
started it: the interval, of this node or another one, in which the event it waited for happened.
Following these links back from the end of an update gives its critical path.
"""

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec

from vla_rl.errors import GraphError
from vla_rl.graph.node import NodeStatus

Clock: TypeAlias = Callable[[], float]
"""Seconds since some moment, never decreasing."""


class Waited(enum.Enum):
    """Reason for which a node waited before an interval of work."""

    NOTHING = "nothing"
    """It began with its update."""

    DEPENDENCY = "dependency"
    """The last of its dependencies finished."""

    STREAM = "stream"
    """The next item of the stream it reads, or its end, arrived."""

    FULL_STREAM = "full stream"
    """A reader of the stream it writes took an item and so made room."""

    RESOURCE = "resource"
    """Another node released a resource."""

    PREVIOUS_UPDATE = "previous update"
    """The same node finished the previous update."""


class Interval:
    """One stretch of uninterrupted work of one node; `end` is None while it lasts.

    `waited_for` is the node that started it, None if nothing in the graph did.
    """

    __slots__ = ("_cause", "end", "node", "start", "update", "waited", "waited_for")

    def __init__(
        self, node: str, update: int, start: float, cause: "Interval | None", waited: Waited
    ) -> None:
        self.node, self.update, self.start, self.waited = node, update, start, waited
        self.end: float | None = None
        # The name is kept beside the link, which is cut when no path needs it: traces are written
        # after that.
        self.waited_for = cause.node if cause is not None else None
        self._cause = cause

    def forget_cause(self) -> None:
        """Remove the link, so that a finished update does not keep all earlier ones in memory."""
        self._cause = None

    def chain(self) -> "Iterator[Interval]":
        """Yield this interval, the one that started it, and so on."""
        current: Interval | None = self
        while current is not None:
            yield current
            current = current._cause


class Activity:
    """Records the intervals of one node in one update."""

    __slots__ = ("_cause", "_clock", "_node", "_update", "_waited", "intervals", "open")

    def __init__(self, node: str, update: int, clock: Clock) -> None:
        self._node, self._update, self._clock = node, update, clock
        self._cause: Interval | None = None
        self._waited = Waited.NOTHING
        self.intervals: list[Interval] = []
        self.open: Interval | None = None

    @property
    def last(self) -> Interval | None:
        """The newest interval, or None."""
        return self.intervals[-1] if self.intervals else None

    def wake(self, cause: Interval | None, waited: Waited) -> None:
        """Store what the next interval will have waited for."""
        self._cause, self._waited = cause, waited

    def begin_work(self) -> None:
        """Begin an interval, unless one is open."""
        if self.open is None:
            self.open = Interval(self._node, self._update, self._clock(), self._cause, self._waited)
            self.intervals.append(self.open)

    def pause_work(self) -> None:
        """End the open interval, if there is one."""
        if self.open is not None:
            self.open.end = self._clock()
            self.open = None

    def resume_work(self, cause: Interval | None, waited: Waited) -> None:
        """Begin an interval after a wait.

        `cause` is None if the wait was for something outside the graph.
        """
        last = self.last
        # a cause that ended before this node began to wait did not bound it; the path then
        # continues through the node's own work, or it would lose the seconds in between
        if last is not None and (cause is None or _ended_before(cause, last)):
            cause = last
        if cause is not None:
            self.wake(cause, waited)
        self.begin_work()


def _ended_before(cause: Interval, last: Interval) -> bool:
    """Return whether the cause ended before the waiting began."""
    return cause.end is not None and last.end is not None and cause.end <= last.end


class Span(msgspec.Struct, frozen=True):
    """Work of one node in one update.

    Example:
        Span(node="filter", update=3, status=NodeStatus.COMPLETED, intervals=(...), attempts=8,
            num_items=6, num_dropped=2)
    """

    node: str
    update: int
    status: NodeStatus
    intervals: tuple[Interval, ...]

    attempts: int
    """Calls of the function, including retried ones."""

    num_items: int
    """Items it wrote to its stream."""

    num_dropped: int
    """Items it left out by `DROP`."""

    @property
    def start(self) -> float | None:
        """Time at which it first worked, on the executor's clock; None if it never did."""
        return self.intervals[0].start if self.intervals else None

    @property
    def end(self) -> float | None:
        """Time at which it last worked; None if it never did."""
        return self.intervals[-1].end if self.intervals else None

    @property
    def busy_s(self) -> float:
        """Seconds in which it worked, without waiting."""
        return sum((interval.end or interval.start) - interval.start for interval in self.intervals)


class Segment(msgspec.Struct, frozen=True):
    """A piece of a critical path: during these seconds the update waited only for this node.

    Example:
        Segment(node="rollout", update=2, duration_s=10.1, waited=Waited.PREVIOUS_UPDATE)
    """

    node: str
    update: int
    """The update in which the node worked; an earlier one if this update had to wait for it."""

    duration_s: float
    waited: Waited
    """Reason for which the node itself had waited before."""


class CriticalPath(msgspec.Struct, frozen=True):
    """The chain of nodes that bounded one update, oldest first; `str` of it is a readable line.

    Example:
        12.4 seconds, most of which the update waited for the episodes of the one before:

        CriticalPath(update=3, duration_s=12.4, segments=(
            Segment(node="rollout", update=2, duration_s=10.1, waited=Waited.NOTHING),
            Segment(node="update", update=3, duration_s=2.3, waited=Waited.DEPENDENCY)))
    """

    update: int
    duration_s: float
    segments: tuple[Segment, ...]

    @property
    def shares(self) -> dict[str, float]:
        """Seconds of each node on the path, in order of first appearance.

        `"rollout of update 2"` for earlier updates.
        """
        seconds: dict[str, float] = {}
        for segment in self.segments:
            name = (
                segment.node
                if segment.update == self.update
                else f"{segment.node} of update {segment.update}"
            )
            seconds[name] = seconds.get(name, 0.0) + segment.duration_s
        return seconds

    @property
    def bottleneck(self) -> str:
        """The node with the largest share."""
        shares = self.shares
        return max(shares, key=lambda name: shares[name], default="")

    def __str__(self) -> str:
        """Format as `update 3: 12.4 s = rollout 10.1 s (81 %) -> update 2.3 s (19 %)`.

        Shares below 0.5 % are left out.
        """
        # An update of nodes that do nothing takes no time on a simulated clock.
        total = self.duration_s or 1.0
        parts = [
            f"{name} {format_seconds(seconds)} ({100 * seconds / total:.0f} %)"
            for name, seconds in self.shares.items()
            if seconds >= 0.005 * total
        ]
        return (
            f"update {self.update}: {format_seconds(self.duration_s)} = "
            f"{' -> '.join(parts) or 'nothing'}"
        )


def critical_path(update: int, started: float, ended: float, last: Interval | None) -> CriticalPath:
    """Return the path from the end of an update back to the moment at which it was admitted."""
    segments: list[Segment] = []
    until = ended
    chain = list(_back_to_start(last, started))
    for interval in chain:
        # the seconds between an interval and the one that it started count as its own, so that
        # the segments add up to the update's whole duration
        start = started if interval is chain[-1] else interval.start
        segments.append(Segment(interval.node, interval.update, until - start, interval.waited))
        until = start
    return CriticalPath(update, ended - started, tuple(reversed(segments)))


def _back_to_start(last: Interval | None, started: float) -> Iterator[Interval]:
    for interval in last.chain() if last is not None else ():
        yield interval
        # what ran before this update was admitted bounded earlier ones
        if interval.start <= started:
            return


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds or milliseconds, with about three digits."""
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1000 * seconds:.1f} ms"


class Values(dict[str, Any]):
    """The kept values, by name."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"{name!r} was not kept, only {sorted(self)}: a value that other nodes read is freed "
            f"when the last of them has finished; name it in Executor(keep=({name!r},)) to have it "
            "here"
        )


class Update(msgspec.Struct, frozen=True):
    """One pass through the graph. Times are seconds on the executor's clock.

    Example:
        Update(index=3, values={"loss": 0.21}, metrics={"train/num_groups": 6.0}, spans={...},
            started=120.4, ended=132.8, critical_path=...)
    """

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


class NodeFailed(GraphError):
    """Failure of a node in one update.

    Its dependents were cancelled; the nodes that do not depend on it finished.

    Args:
        node: id of the node.
        update: index of the update in which it failed.
        message: description of the failure.

    `__cause__` is the exception that the node's function raised. `report` is the unfinished update:
    statuses, spans, and the values of the nodes that finished. Other nodes that failed in the same
    update are in `__notes__`.
    """

    def __init__(self, node: str, update: int, message: str) -> None:
        self.node, self.update = node, update
        self.report: Update | None = None
        super().__init__(message)


class WrongOutput(NodeFailed):
    """A node returned something other than it declared in `writes`. Never retried."""


class WrongInput(GraphError):
    """A value that a node read and cannot use.

    The node that wrote the value is reported as the failed one.

    Args:
        parameter: the function's parameter with the value.
        problem: what the value is, and what was expected.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        self.parameter, self.problem = parameter, problem
        super().__init__(f"{parameter}: {problem}")
