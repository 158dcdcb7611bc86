"""When nodes ran and what they waited for, and the chain of nodes that bounded an update.

A node's time in one update is a list of intervals in which it worked. Each interval remembers what let it begin: the
interval, of this node or another one, in which the thing it waited for happened. Walking these links back from the last
moment of an update gives its critical path.
"""

import enum
from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec

from vla_rl.graph.node import NodeStatus

Clock: TypeAlias = Callable[[], float]
"""Seconds since some moment, never going back."""


class Waited(enum.Enum):
    """What a node waited for before an interval of work."""

    NOTHING = "nothing"
    """It began with its update."""

    DEPENDENCY = "dependency"
    """The last of its dependencies finished."""

    STREAM = "stream"
    """The next item of the stream it reads, or its end, arrived."""

    FULL_STREAM = "full stream"
    """A reader of the stream it writes took an item and so made room."""

    RESOURCE = "resource"
    """Another node gave back a resource."""

    PREVIOUS_UPDATE = "previous update"
    """The same node finished the update before."""


class Interval:
    """One stretch of uninterrupted work of one node; `end` is None while it lasts.

    `waited_for` is the node that let it begin, None if nothing in the graph did.
    """

    __slots__ = ("_cause", "end", "node", "start", "update", "waited", "waited_for")

    def __init__(self, node: str, update: int, start: float, cause: "Interval | None", waited: Waited) -> None:
        self.node, self.update, self.start, self.waited = node, update, start, waited
        self.end: float | None = None
        self.waited_for = cause.node if cause is not None else None
        self._cause = cause

    def forget_cause(self) -> None:
        """Cut the link, so that a finished update does not keep all updates before it alive."""
        self._cause = None

    def chain(self) -> "Iterator[Interval]":
        """This interval, the one that let it begin, and so on."""
        current: Interval | None = self
        while current is not None:
            yield current
            current = current._cause


class Activity:
    """Writes down the intervals of one node in one update."""

    __slots__ = ("_cause", "_clock", "_node", "_update", "_waited", "intervals", "open")

    def __init__(self, node: str, update: int, clock: Clock) -> None:
        self._node, self._update, self._clock = node, update, clock
        self._cause: Interval | None = None
        self._waited = Waited.NOTHING
        self.intervals: list[Interval] = []
        self.open: Interval | None = None

    @property
    def last(self) -> Interval | None:
        """The newest interval."""
        return self.intervals[-1] if self.intervals else None

    def wake(self, cause: Interval | None, waited: Waited) -> None:
        """Remember what the next interval will have waited for."""
        self._cause, self._waited = cause, waited

    def begin(self) -> None:
        """Work begins now, unless it already goes on."""
        if self.open is None:
            self.open = Interval(self._node, self._update, self._clock(), self._cause, self._waited)
            self.intervals.append(self.open)

    def pause(self) -> None:
        """Work stops now, unless it has already stopped."""
        if self.open is not None:
            self.open.end = self._clock()
            self.open = None

    def resume(self, cause: Interval | None, waited: Waited) -> None:
        """Work goes on now, after having waited; `cause` is None if something outside the graph was waited for."""
        last = self.last
        if last is not None and (cause is None or _is_old_news(cause, last)):
            cause = last
        if cause is not None:
            self.wake(cause, waited)
        self.begin()


def _is_old_news(cause: Interval, last: Interval) -> bool:
    """True if the cause had happened before the waiting began, and only the news of it came later."""
    return cause.end is not None and last.end is not None and cause.end <= last.end


class Span(msgspec.Struct, frozen=True):
    """One node in one update."""

    node: str
    update: int
    status: NodeStatus
    intervals: tuple[Interval, ...]

    attempts: int
    """Calls of the function, those included that were retried."""

    num_items: int
    """Items it gave to the stream it writes."""

    num_dropped: int
    """Items it left out by `DROP`."""

    @property
    def start(self) -> float | None:
        """When it first worked, on the executor's clock; None if it never did."""
        return self.intervals[0].start if self.intervals else None

    @property
    def end(self) -> float | None:
        """When it last worked."""
        return self.intervals[-1].end if self.intervals else None

    @property
    def busy_s(self) -> float:
        """Seconds in which it worked, waiting left out."""
        return sum((interval.end or interval.start) - interval.start for interval in self.intervals)


class Segment(msgspec.Struct, frozen=True):
    """A piece of a critical path: in these seconds the update waited for this node and for nothing else."""

    node: str
    update: int
    """The update in which the node worked; an earlier one where this update had to wait for it."""

    duration_s: float
    waited: Waited
    """What the node itself had waited for before."""


class CriticalPath(msgspec.Struct, frozen=True):
    """The chain of nodes that bounded one update, oldest first; `str` of it is a line for people."""

    update: int
    duration_s: float
    segments: tuple[Segment, ...]

    @property
    def shares(self) -> dict[str, float]:
        """Seconds of each node on the path, in order of first appearance; `"rollout of update 2"` for earlier updates."""
        seconds: dict[str, float] = {}
        for segment in self.segments:
            name = segment.node if segment.update == self.update else f"{segment.node} of update {segment.update}"
            seconds[name] = seconds.get(name, 0.0) + segment.duration_s
        return seconds

    @property
    def bound_by(self) -> str:
        """The node with the largest share."""
        shares = self.shares
        return max(shares, key=lambda name: shares[name], default="")

    def __str__(self) -> str:
        """Such as `update 3: 12.4 s = rollout 10.1 s (81 %) -> update 2.3 s (19 %)`; under half a percent is left out."""
        total = self.duration_s or 1.0
        parts = [
            f"{name} {seconds_text(seconds)} ({100 * seconds / total:.0f} %)"
            for name, seconds in self.shares.items()
            if seconds >= 0.005 * total
        ]
        return f"update {self.update}: {seconds_text(self.duration_s)} = {' -> '.join(parts) or 'nothing'}"


def critical_path(update: int, started: float, ended: float, last: Interval | None) -> CriticalPath:
    """Walk back from the interval that ended the update to the moment at which the update was admitted."""
    segments: list[Segment] = []
    until = ended
    chain = list(_until(last, started))
    for interval in chain:
        start = started if interval is chain[-1] else interval.start
        segments.append(Segment(interval.node, interval.update, until - start, interval.waited))
        until = start
    return CriticalPath(update, ended - started, tuple(reversed(segments)))


def _until(last: Interval | None, started: float) -> Iterator[Interval]:
    for interval in last.chain() if last is not None else ():
        yield interval
        if interval.start <= started:
            return


def seconds_text(seconds: float) -> str:
    """Seconds or milliseconds, three digits or so."""
    return f"{seconds:.1f} s" if seconds >= 1.0 else f"{1000 * seconds:.1f} ms"
