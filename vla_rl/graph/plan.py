"""A graph prepared to run: lookups done once instead of in each update, and what its nodes wait for.

Calls that need a resource with a capacity, such as the one device lane, wait in line. Streams are
bounded channels between one writer and one reader, in one update.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, final

from vla_rl.errors import GraphError
from vla_rl.graph.node import FunctionKind, Node, get_function_kind
from vla_rl.graph.task_graph import TaskGraph
from vla_rl.graph.update import Activity, Interval, Waited
from vla_rl.util.imports import suggest


class UnknownResource(GraphError):
    """A node needs a resource that the executor does not have, or more units than it has."""


class InvalidRun(GraphError):
    """Impossible arguments of an executor or a run, such as inputs that do not match."""


class Resource:
    """Units that calls hold while they run.

    The oldest update goes first, then the call that arrived first.

    Belongs to one event loop. May be shared between executors, and with code outside any graph:

        async with device:
            ...

    There is no overtaking: a call that needs two units waits in line, and those behind it wait too.
    """

    def __init__(self, name: str, capacity: int = 1) -> None:
        if type(capacity) is not int or capacity < 1:
            raise GraphError(
                f"resource {name!r} has capacity {capacity!r}, expected a whole number >= 1"
            )
        self.name, self.capacity = name, capacity
        self._free = capacity
        self._waiters: list[tuple[int, int, int, asyncio.Future[Any]]] = []
        self._num_waits = 0

    @property
    def in_use(self) -> int:
        """Number of units that are held now."""
        return self.capacity - self._free

    @property
    def num_waiting(self) -> int:
        """Number of calls that wait in line now."""
        return sum(not future.done() for *_, future in self._waiters)

    def try_take(self, units: int) -> bool:
        """Take units if they are free and no call waits in line; return whether they were taken."""
        # also refused while others wait: small calls would otherwise overtake one that needs several
        # units, which might then never get them together
        if self._free < units or (self._waiters and self.num_waiting):
            return False
        self._free -= units
        return True

    async def wait(self, units: int, priority: int) -> Any:
        """Wait in line for units, lower `priority` first.

        Return the `by` of the release that made room.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._num_waits += 1
        # By update first: one that is older bounds all later ones, so its nodes go before them on
        # the device.
        heapq.heappush(self._waiters, (priority, self._num_waits, units, future))
        try:
            return await future
        except asyncio.CancelledError:
            # granted and cancelled in the same turn: pass it on
            if future.done() and not future.cancelled():
                self.release(units, by=future.result())
            else:
                self._grant(None)
            raise

    def release(self, units: int, by: object = None) -> None:
        """Give units back and wake the next calls in line."""
        self._free += units
        self._grant(by)

    def _grant(self, by: object) -> None:
        while self._waiters:
            # Calls that were cancelled are still in the heap: removing them from the middle would
            # cost a search.
            _, _, units, future = self._waiters[0]
            if future.done():
                heapq.heappop(self._waiters)
            elif units <= self._free:
                heapq.heappop(self._waiters)
                self._free -= units
                future.set_result(by)
            else:
                return

    async def __aenter__(self) -> "Resource":
        if not self.try_take(1):
            await self.wait(1, priority=0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release(1)

    def __repr__(self) -> str:
        return (
            f"Resource({self.name!r}, {self.in_use} of {self.capacity} in use, "
            f"{self.num_waiting} waiting)"
        )


@final
class _EndType:
    def __repr__(self) -> str:
        return "END"


END: Final = _EndType()
"""Returned by a channel after its last item."""


class StreamBuffer:
    """Items in order. When `capacity` items are unread, the writer waits; no item is ever dropped.

    Both ends record in their `Activity` when they waited and what released them.
    """

    __slots__ = ("_abandoned", "_capacity", "_closed", "_items", "_reader", "_writer")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Any] = deque()
        self._closed = self._abandoned = False
        self._reader: asyncio.Future[Interval | None] | None = None
        self._writer: asyncio.Future[Interval | None] | None = None

    async def put_item(self, item: object, activity: Activity) -> None:
        """Add an item; waits while the channel is full. Does nothing once the reader has ended."""
        while len(self._items) >= self._capacity and not self._abandoned:
            # the pause is recorded, so that a full stream shows up on the critical path as the
            # reader's time and not as the writer's work
            activity.pause_work()
            self._writer = asyncio.get_running_loop().create_future()
            activity.resume_work(await self._writer, Waited.FULL_STREAM)
        if not self._abandoned:
            self._items.append(item)
            _wake_waiter(self._reader, activity.last)

    async def get_item(self, activity: Activity) -> Any:
        """Wait for the next item and return it, or `END`."""
        while not self._items and not self._closed:
            activity.pause_work()
            self._reader = asyncio.get_running_loop().create_future()
            activity.resume_work(await self._reader, Waited.STREAM)
        activity.begin_work()
        if not self._items:
            return END
        item = self._items.popleft()
        _wake_waiter(self._writer, activity.last)
        return item

    def end_stream(self, last: Interval | None) -> None:
        """Close the channel for writing; `last` is the interval in which the writer ended."""
        self._closed = True
        _wake_waiter(self._reader, last)

    def stop_reading(self) -> None:
        """Drop unread items, as the reader has ended.

        The writer then continues as if each item were read at once.
        """
        # a reader that failed must not leave its writer waiting for ever: the writer may feed
        # other readers that still need the rest of the stream
        self._abandoned = True
        self._items.clear()
        _wake_waiter(self._writer, None)


def _wake_waiter(waiter: "asyncio.Future[Interval | None] | None", cause: Interval | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(cause)


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """One node, with everything about it that is the same in each update.

    Other nodes are given by their position.
    """

    position: int
    id: str
    func: Callable[..., Any]
    kind: FunctionKind
    config: Mapping[str, Any]
    writes: tuple[str, ...]
    retries: int
    retry_on: tuple[type[Exception], ...]
    resources: tuple[tuple[Resource, int], ...]
    """In order of name, so that two nodes never wait for each other's resources."""

    reads: tuple[tuple[str, str], ...]
    """Parameter and name of each value that must be complete before the node starts."""

    item: str
    """Parameter for the items of the stream; empty unless the function is called for each item."""

    num_waits: int
    """Number of nodes that must have finished before it starts."""

    releases: tuple[int, ...]
    """Nodes that wait for its end."""

    stream_readers: tuple[int, ...]
    """Nodes that take the items of its stream as they arrive."""

    downstream: tuple[int, ...]
    """All nodes that cannot finish if it fails."""

    collects: bool
    """Whether the items of its stream are also needed as a list."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All nodes in topological order, and how long each value is kept."""

    nodes: tuple[PlannedNode, ...]

    kept: tuple[str, ...]
    """Values that the finished update contains."""

    num_readers: Mapping[str, int]
    """Number of nodes that read each other value as a whole; the value is freed after the last of
    them."""


def make_plan(graph: TaskGraph, resources: Mapping[str, Resource], keep: Iterable[str]) -> Plan:
    """Make the plan.

    Raises `UnknownResource` if a resource is missing, `InvalidRun` if `keep` names a value not
    written.
    """
    written = [name for node in graph.nodes.values() for name in node.writes]
    for name in keep:
        if name not in written:
            raise InvalidRun(
                f"keep names {name!r}, which no node of {graph.id!r} writes{suggest(name, written)}"
            )
    # Values that nobody reads are results: without the update's values they could not be had at
    # all.
    kept = tuple(dict.fromkeys((*graph.outputs, *keep)))
    num_readers: dict[str, int] = {}
    for node in graph.nodes.values():
        for _, name in _whole_reads(graph, node):
            if name not in kept and name in written:
                num_readers[name] = num_readers.get(name, 0) + 1
    wanted_whole = {*kept, *num_readers}
    positions = {node_id: position for position, node_id in enumerate(graph.nodes)}
    nodes = tuple(
        _plan_node(graph, node, positions, resources, wanted_whole) for node in graph.nodes.values()
    )
    return Plan(nodes, kept, num_readers)


def _whole_reads(graph: TaskGraph, node: Node) -> list[tuple[str, str]]:
    return [
        (p, name) for p, name in node.reads.items() if not (node.stream and name in graph.streamed)
    ]


def _plan_node(
    graph: TaskGraph,
    node: Node,
    positions: Mapping[str, int],
    resources: Mapping[str, Resource],
    wanted_whole: Iterable[str],
) -> PlannedNode:
    held = []
    for name, units in sorted(node.resources.items()):
        if name not in resources:
            raise UnknownResource(
                f"node {node.id!r} needs the resource {name!r}, which the executor does not "
                f"have{suggest(name, resources)} Pass it as Executor(resources={{{name!r}: 1}})."
            )
        if units > resources[name].capacity:
            raise UnknownResource(
                f"node {node.id!r} needs {units} of the resource {name!r}, of which there are "
                f"{resources[name].capacity}"
            )
        held.append((resources[name], units))
    # Sets, because two values between the same nodes are one wait.
    finishes = {edge.source for edge in graph.edges if edge.target == node.id and not edge.streamed}
    releases = {edge.target for edge in graph.edges if edge.source == node.id and not edge.streamed}
    assert not isinstance(node.func, str), "build() has resolved every function"
    return PlannedNode(
        position=positions[node.id],
        id=node.id,
        func=node.func,
        kind=get_function_kind(node, node.func),
        config=node.config,
        writes=node.writes,
        retries=node.retries,
        retry_on=node.retry_on,
        resources=tuple(held),
        reads=tuple(_whole_reads(graph, node)),
        item=next(
            (p for p, name in node.reads.items() if node.stream and name in graph.streamed), ""
        ),
        num_waits=len(finishes),
        releases=tuple(sorted(positions[target] for target in releases)),
        stream_readers=tuple(
            positions[e.target] for e in graph.edges if e.source == node.id and e.streamed
        ),
        downstream=tuple(positions[other] for other in graph.downstream(node.id)),
        collects=any(name in wanted_whole for name in node.writes),
    )
