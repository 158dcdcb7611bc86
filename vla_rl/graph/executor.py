"""Run a graph, update after update, each node as a coroutine.

    async with executor.run(num_updates=10) as updates:
        async for update in updates:
            print(update.critical_path)

Guarantees:
    a node of update u + 1 starts after the same node of update u has finished;
    at most `max_in_flight` updates are in flight, the one in the loop's body among them;
    updates arrive in order; after the `async with` no task of the run is left, whatever the reason.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from vla_rl.graph.node import Names, as_names
from vla_rl.graph.plan import InvalidRun, Plan, Resource, make_plan
from vla_rl.graph.task_graph import TaskGraph
from vla_rl.graph.update import Clock, NodeFailed, Update, Waited
from vla_rl.graph.update_run import UpdateRun
from vla_rl.util.imports import suggest


@dataclass(frozen=True, slots=True)
class RunningNode:
    """A node that runs, or waits for its turn, at this moment.

    Example:
        RunningNode(node="rollout", update=12, status="running", since_s=41.3)
    """

    node: str
    update: int
    status: str
    since_s: float | None
    """Seconds since it began to run; None while it waits."""


class Executor:
    """A graph with the resources to run it.

    Args:
        graph: the graph to run.
        resources: capacity of each named resource, or a `Resource` that is shared with other code.
            By default there is one `device`.
        max_in_flight: largest number of updates at the same time. 1 is synchronous: an update
            begins when the loop asks for it. With more, a node may see values made while up to
            `max_in_flight - 1` earlier updates were unfinished.
        stream_capacity: items that may wait in a stream for one reader before the writer waits.
        keep: values to store in `Update.values` in addition to those that no node reads.
        clock: clock for all times.
    """

    def __init__(
        self,
        graph: TaskGraph,
        *,
        resources: Mapping[str, int | Resource] | None = None,
        max_in_flight: int = 1,
        stream_capacity: int = 8,
        keep: Names = (),
        clock: Clock = time.monotonic,
    ) -> None:
        for name, number in (
            ("max_in_flight", max_in_flight),
            ("stream_capacity", stream_capacity),
        ):
            if type(number) is not int or number < 1:
                raise InvalidRun(f"{name} is {number!r}, expected a whole number >= 1")
        self.graph, self.max_in_flight = graph, max_in_flight
        self.resources = {
            name: given if isinstance(given, Resource) else Resource(name, given)
            for name, given in {"device": 1, **(resources or {})}.items()
        }
        # once and not in each update: an update of the smallest pipeline takes less than a millisecond
        self._plan = make_plan(graph, self.resources, as_names(keep))
        self._stream_capacity, self._clock = stream_capacity, clock

    def run(
        self,
        num_updates: int | None = None,
        *,
        first: int = 0,
        inputs: Mapping[str, Any] | None = None,
    ) -> "Run":
        """Return a run of updates `first`, `first + 1`, ...

        Enter it with `async with`, then iterate.

        Args:
            num_updates: number of updates; None for as many as the loop asks for.
            first: index of the first update, such as the next one after a checkpoint.
            inputs: a value for each input of the graph but `update`; the same in every update.

        Raises: `InvalidRun` if inputs are missing or unknown.
        """
        given, expected = inputs or {}, [name for name in self.graph.inputs if name != "update"]
        for name in given:
            if name not in expected:
                raise InvalidRun(
                    f"{name!r} is not an input of graph {self.graph.id!r}{suggest(name, expected)}"
                )
        if missing := [name for name in expected if name not in given]:
            raise InvalidRun(
                f"graph {self.graph.id!r} needs the inputs {missing}; pass them as "
                f"run(inputs={{...}})"
            )
        if num_updates is not None and num_updates < 0:
            raise InvalidRun(f"num_updates is {num_updates}, expected >= 0, or None for no end")
        last = None if num_updates is None else first + num_updates
        return Run(
            self._plan, first, last, given, self.max_in_flight, self._stream_capacity, self._clock
        )


class Run:
    """A run of the executor, entered once. Owns all tasks of all updates in flight.

    A failure is raised as `NodeFailed` when the loop asks for the failed update; earlier updates
    arrive before it, later ones are cancelled. Leaving the block early cancels the updates in
    flight and waits for their end; if one of them had already failed, that error is raised too.
    `cut_short` then contains those updates.
    """

    def __init__(
        self,
        plan: Plan,
        first: int,
        last: int | None,
        inputs: Mapping[str, Any],
        max_in_flight: int,
        stream_capacity: int,
        clock: Clock,
    ) -> None:
        self._plan, self._next, self._last, self._inputs = plan, first, last, inputs
        self._max_in_flight, self._stream_capacity, self._clock = (
            max_in_flight,
            stream_capacity,
            clock,
        )
        self._in_flight: deque[UpdateRun] = deque()
        self._remembered: deque[UpdateRun] = deque()
        self._has_returned: asyncio.Future[None] | None = None
        self._entered = self._closed = False
        self.cut_short: tuple[Update, ...] = ()
        """Unfinished updates that the loop did not receive; available once the run has stopped."""

    @property
    def running(self) -> tuple[RunningNode, ...]:
        """Nodes that run or wait for their turn now, oldest update first."""
        now = self._clock()
        return tuple(
            RunningNode(
                node.planned.id,
                update.index,
                node.status.value,
                now - node.activity.open.start if node.activity.open else None,
            )
            for update in self._in_flight
            for node in update.nodes
            if node.task is not None
        )

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RuntimeError(
                "this run was already entered; call Executor.run again for another one"
            )
        # The first updates begin here and not with the loop: what the block does before it iterates
        # overlaps with them.
        self._entered = True
        self._admit()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        failure = next(
            (update.failure for update in self._in_flight if update.failure is not None), None
        )
        if failure is not None:
            self._add_others(failure)
        await self._stop()
        # An error of the loop's body comes first: it is what its author looks for. The node's is a
        # note on it.
        if failure is not None and error is None:
            raise failure
        if failure is not None and error is not None:
            error.add_note(f"also, {failure}")

    def __aiter__(self) -> Self:
        return self

    # who waits       for                     woken by
    # `__anext__`     `_arrival`              the end of the oldest update in flight, failed or not
    # an update       a place in flight       the loop's body, when it asks for its next update
    # a node          see `update_run`        another node's end, an item, room in a stream, a resource
    # `_stop`         the end of all tasks    their cancellation, which it has asked for

    async def __anext__(self) -> Update:
        if not self._entered or self._closed:
            raise RuntimeError(
                "a run works inside its block: async with executor.run(...) as updates"
            )
        self._admit()
        if not self._in_flight:
            raise StopAsyncIteration
        head = self._in_flight[0]
        if head.result is None:
            self._has_returned = asyncio.get_running_loop().create_future()
            await self._has_returned
        if head.failure is not None:
            self._add_others(head.failure)
            await self._stop()
            raise head.failure
        assert head.result is not None
        self._in_flight.popleft()
        return head.result

    def node_completed(self, update: UpdateRun, position: int) -> None:
        """Release the same node of the next update."""
        for later in self._in_flight:
            # Its position in the queue is not known: updates before it may have been handed out
            # meanwhile.
            if later.index == update.index + 1:
                later.release(
                    position, update.nodes[position].activity.last, Waited.PREVIOUS_UPDATE
                )
                return

    def update_failed(self, update: UpdateRun) -> None:
        """Cancel later updates, since they would use missing values."""
        self._last = self._next
        for later in reversed(self._in_flight):
            if later.index > update.index:
                later.stop()

    def update_ended(self, update: UpdateRun) -> None:
        """Wake the loop if it waits for this update, and cut links that no path needs any more."""
        # a critical path may reach back through as many updates as are in flight; older links would
        # keep the intervals of the whole run in memory
        self._remembered.append(update)
        while len(self._remembered) >= self._max_in_flight:
            self._remembered.popleft().forget_causes()
        if (
            self._in_flight[0] is update
            and self._has_returned is not None
            and not self._has_returned.done()
        ):
            self._has_returned.set_result(None)

    def _add_others(self, failure: NodeFailed) -> None:
        """Add the failures of other updates as notes to the one that is raised."""
        for update in self._in_flight:
            if update.failure is not None and update.failure is not failure:
                failure.add_note(f"also, {update.failure}")

    def _admit(self) -> None:
        """Start updates up to the limit.

        Only called when the loop asks, so the update in its body counts as in flight.
        """
        while (self._last is None or self._next < self._last) and len(
            self._in_flight
        ) < self._max_in_flight:
            # The one before it, which may be done: then its nodes wait for nothing.
            previous = self._in_flight[-1] if self._in_flight else None
            update = UpdateRun(
                self._plan, self._next, self._inputs, self, self._clock, self._stream_capacity
            )
            self._in_flight.append(update)
            self._next += 1
            update.start_nodes(previous)

    async def _stop(self) -> None:
        """Cancel the updates in flight, newest first, and wait for the end of all tasks."""
        self._last = self._next
        for update in reversed(self._in_flight):
            update.stop()
        cancelled: asyncio.CancelledError | None = None
        while tasks := [task for update in self._in_flight for task in update.tasks]:
            try:
                await asyncio.wait(tasks)
            except asyncio.CancelledError as error:
                # the tasks are already cancelled; keep waiting for their end
                cancelled = error
        self.cut_short += tuple(update.describe_progress() for update in self._in_flight)
        self._in_flight.clear()
        if cancelled is not None:
            raise cancelled
