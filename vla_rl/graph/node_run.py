"""One node in one update: a task that calls its function and passes on the results."""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from vla_rl.graph.current_node import CURRENT_NODE
from vla_rl.graph.functions import FunctionKind
from vla_rl.graph.node import DROP, NodeStatus
from vla_rl.graph.outputs import unpack_call, unpack_item
from vla_rl.graph.plan import PlannedNode
from vla_rl.graph.spans import Activity, Clock, Interval, Span, Waited
from vla_rl.graph.streams import END, StreamBuffer

logger = logging.getLogger("vla_rl.graph")


class Surroundings(Protocol):
    """Parts of the update that a node uses."""

    index: int
    values: dict[str, Any]

    def add_metrics(self, node: str, metrics: Mapping[str, float]) -> None:
        """Merge a node's metrics into those of the update."""
        ...


async def _contained(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `work`; its SystemExit would end the whole loop, and leave no error."""
    try:
        await work()
    except SystemExit as error:
        raise RuntimeError(
            f"it raised SystemExit: {error}, expected an Exception, such as RuntimeError"
        ) from error


class NodeRun:
    """One node in one update.

    At most one task; each call holds the node's resources; items keep their order.
    """

    __slots__ = (
        "_attempts", "_num_dropped", "_num_items", "_update", "activity", "inbox", "items",
        "outboxes", "planned", "skipped", "status", "task", "waits",
    )  # fmt: skip

    def __init__(self, planned: PlannedNode, update: Surroundings, clock: Clock) -> None:
        self.planned, self._update = planned, update
        self.status = NodeStatus.PENDING
        self.waits = planned.num_waits
        self.skipped = False
        self.task: asyncio.Task[None] | None = None
        self.activity = Activity(planned.id, update.index, clock)
        self.inbox: StreamBuffer | None = None
        self.outboxes: list[StreamBuffer] = []
        self.items: list[Any] | None = (
            [] if planned.collects and planned.kind is not FunctionKind.CALL else None
        )
        self._attempts = self._num_items = self._num_dropped = 0

    def release(self, cause: Interval | None, waited: Waited) -> bool:
        """Count one dependency as finished.

        Return True if it was the last one and the node can start.
        """
        self.waits -= 1
        self.activity.wake(cause, waited)
        return self.waits == 0 and self.status is NodeStatus.PENDING

    def start(self, on_end: "Callable[[NodeRun], None]") -> None:
        """Start the task; `on_end` is called when it has ended, whatever the reason."""
        self.status = NodeStatus.READY
        kind = self.planned.kind
        work = (
            self._once if kind is FunctionKind.CALL
            else self._per_item if kind is FunctionKind.PER_ITEM
            else self._source
        )  # fmt: skip
        name = f"{self.planned.id}[{self._update.index}]"
        context = contextvars.copy_context()
        context.run(CURRENT_NODE.set, name)
        self.task = asyncio.get_running_loop().create_task(
            _contained(work), name=name, context=context
        )
        self.task.add_done_callback(lambda _: on_end(self))

    def span(self) -> Span:
        """Return the node's intervals and counts."""
        return Span(
            self.planned.id, self._update.index, self.status, tuple(self.activity.intervals),
            self._attempts, self._num_items, self._num_dropped,
        )  # fmt: skip

    async def _once(self) -> None:
        result = await self._call(self._arguments())
        values, metrics = unpack_call(
            self.planned.id, self._update.index, self.planned.writes, result
        )
        self._update.values.update(values)
        if metrics:
            self._update.add_metrics(self.planned.id, metrics)
        self.activity.pause()

    async def _per_item(self) -> None:
        assert self.inbox is not None
        arguments = self._arguments()
        while (item := await self.inbox.get(self.activity)) is not END:
            await self._emit(await self._call({**arguments, self.planned.item: item}))
            del item
        self.activity.pause()

    async def _source(self) -> None:
        """Pass on the items of the generator; resources are held only while it makes an item."""
        failures = 0
        while True:
            self._attempts += 1
            async with aclosing(self.planned.func(**self._arguments())) as generator:
                while True:
                    await self._hold()
                    try:
                        item = await anext(generator, END)
                    except self.planned.retry_on as error:
                        failures += 1
                        # readers have already used the items so far: a second run from the start
                        # would give them each item twice
                        if self._num_items or self._num_dropped or failures > self.planned.retries:
                            raise
                        self._log_retry(failures, error)
                        break
                    finally:
                        self._let_go(len(self.planned.resources))
                    if item is END:
                        self.activity.pause()
                        return
                    await self._emit(item)
                    del item

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function with its resources held.

        Repeat it after a failure as often as the node allows.
        """
        planned, failures = self.planned, 0
        await self._hold()
        try:
            while True:
                self._attempts += 1
                try:
                    return await planned.func(**arguments)
                except planned.retry_on as error:
                    failures += 1
                    if failures > planned.retries:
                        raise
                    self._log_retry(failures, error)
        finally:
            self._let_go(len(planned.resources))

    async def _emit(self, result: object) -> None:
        item, metrics = unpack_item(
            self.planned.id, self._update.index, self.planned.writes, result
        )
        if metrics:
            self._update.add_metrics(self.planned.id, metrics)
        if item is DROP:
            self._num_dropped += bool(self.planned.writes)
            return
        self._num_items += 1
        if self.items is not None:
            self.items.append(item)
        for outbox in self.outboxes:
            await outbox.put(item, self.activity)

    def _arguments(self) -> dict[str, Any]:
        values = self._update.values
        return {
            **self.planned.config,
            **{parameter: values[name] for parameter, name in self.planned.reads},
        }

    async def _hold(self) -> None:
        """Take the resources, in order of name; the node counts as running from then on."""
        for position, (resource, units) in enumerate(self.planned.resources):
            if not resource.take(units):
                self.activity.pause()
                try:
                    by = await resource.wait(units, self._update.index)
                except BaseException:
                    self._let_go(position)
                    raise
                self.activity.resume(by, Waited.RESOURCE)
        self.activity.begin()
        self.status = NodeStatus.RUNNING

    def _let_go(self, count: int) -> None:
        for resource, units in self.planned.resources[:count]:
            resource.release(units, by=self.activity.last)

    def _log_retry(self, failures: int, error: Exception) -> None:
        logger.warning(
            "node %r in update %d failed, try %d of %d: %s: %s",
            self.planned.id, self._update.index, failures, self.planned.retries + 1, type(error).__name__, error,
        )  # fmt: skip
