"""One node in one update: a task that calls its function and passes on the results.

A node's return value is checked against the names it declared to write.
"""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

from vla_rl.graph.node import DROP, NOTHING, FunctionKind, NodeOutput, NodeStatus
from vla_rl.graph.plan import END, PlannedNode, StreamBuffer
from vla_rl.graph.update import Activity, Clock, Interval, Span, Waited, WrongOutput
from vla_rl.util.imports import suggest

logger = logging.getLogger("vla_rl.graph")

CURRENT_NODE: Final[ContextVar[str | None]] = ContextVar("current_node", default=None)
"""Name and update of the node, such as `update[3]`; None outside of the graph."""


_NO_METRICS: Mapping[str, float] = {}


def unpack_call(
    node: str, update: int, writes: tuple[str, ...], result: object
) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """Return the values by name and the metrics of a node that was called once.

    Raises `WrongOutput`.
    """
    wrong = partial(_make_wrong_output, node, update, writes)
    metrics = _NO_METRICS
    if isinstance(result, NodeOutput):
        metrics = result.metrics
        if result.values is not None:
            if result.batch is not NOTHING:
                raise wrong("a NodeOutput with both batch and values", "one of the two")
            return _require_names(node, update, writes, result.values), metrics
        result = None if result.batch is NOTHING else result.batch
        # A function that returns only metrics has forgotten its value: None would be passed on, and
        # fail in the next node.
        if result is None and len(writes) == 1 and metrics is not _NO_METRICS:
            raise wrong("a NodeOutput without batch", "NodeOutput(batch=..., metrics=...)")
    if result is DROP:
        raise wrong("DROP", "a value; only a node with stream=True can leave an item out")
    if len(writes) == 1:
        if result is None:
            expected = (
                "a value (is a `return` missing?); NodeOutput(values={name: None}) writes a None"
            )
            raise wrong("None", f"{expected} on purpose")
        return {writes[0]: result}, metrics
    if not writes:
        if result is not None:
            raise wrong(_describe_result(result), "None, or a name in writes")
        return {}, metrics
    if not isinstance(result, Mapping):
        raise wrong(
            _describe_result(result), "a dict or NodeOutput(values=...) with exactly these keys"
        )
    return _require_names(node, update, writes, result), metrics


def unpack_item(
    node: str, update: int, writes: tuple[str, ...], result: object
) -> tuple[Any, Mapping[str, float]]:
    """Return an item of a stream, or `DROP`, and its metrics.

    Always `DROP` for a node that writes nothing.
    """
    if result is DROP:
        return DROP, _NO_METRICS
    if result is None and writes:
        raise _make_wrong_output(
            node, update, writes, "None", "an item; `return DROP` leaves an item out"
        )
    values, metrics = unpack_call(node, update, writes, result)
    return (values[writes[0]] if writes else DROP), metrics


def _require_names(
    node: str, update: int, writes: tuple[str, ...], values: Mapping[str, Any]
) -> Mapping[str, Any]:
    if values.keys() == set(writes):
        return values
    # Both directions at once: most often one name is misspelt, which is missing and undeclared.
    missing = [name for name in writes if name not in values]
    undeclared = [name for name in values if name not in writes]
    problems = [f"missing {name!r}" for name in missing]
    problems += [f"undeclared {name!r}{suggest(str(name), missing)}" for name in undeclared]
    raise _make_wrong_output(
        node, update, writes, f"the keys {list(values)}", f"exactly these: {', '.join(problems)}"
    )


def _make_wrong_output(
    node: str, update: int, writes: tuple[str, ...], got: str, expected: str
) -> WrongOutput:
    return WrongOutput(
        node,
        update,
        f"node {node!r} in update {update} returned {got}; it writes {list(writes)}: expected "
        f"{expected}",
    )


def _describe_result(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


def _explain_exit(error: SystemExit) -> RuntimeError:
    """Return what to raise instead; a SystemExit would end the whole loop, and leave no error."""
    return RuntimeError(
        f"it raised SystemExit: {error}, expected an Exception, such as RuntimeError"
    )


class NodeRun:
    """One node in one update.

    At most one task; each call holds the node's resources; items keep their order.
    """

    __slots__ = (
        "_add_metrics", "_attempts", "_num_dropped", "_num_items", "_update", "_values", "activity", "inbox", "items",
        "outboxes", "planned", "skipped", "status", "task", "waits",
    )  # fmt: skip

    def __init__(
        self,
        planned: PlannedNode,
        update: int,
        values: dict[str, Any],
        add_metrics: Callable[[str, Mapping[str, float]], None],
        clock: Clock,
    ) -> None:
        self.planned, self._update, self._values = planned, update, values
        self._add_metrics = add_metrics
        self.status = NodeStatus.PENDING
        self.waits = planned.num_waits
        self.skipped = False
        self.task: asyncio.Task[None] | None = None
        self.activity = Activity(planned.id, update, clock)
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

    def start_task(self, on_end: "Callable[[NodeRun], None]") -> None:
        """Start the task; `on_end` is called when it has ended, whatever the reason."""
        self.status = NodeStatus.READY
        kind = self.planned.kind
        work = (
            self._once if kind is FunctionKind.CALL
            else self._per_item if kind is FunctionKind.PER_ITEM
            else self._source
        )  # fmt: skip
        # In lists of what waits, in tracebacks and in asyncio's own warnings the task has this
        # name.
        name = f"{self.planned.id}[{self._update}]"
        # A context of its own: what one node sets in it must not be seen by others, and a run's
        # table of times finds the node there that asked for work.
        context = contextvars.copy_context()
        context.run(CURRENT_NODE.set, name)
        self.task = asyncio.get_running_loop().create_task(work(), name=name, context=context)
        # a callback and not an awaiting task: it runs in the same turn, so that no node of an update
        # ends without its dependents being started or skipped
        self.task.add_done_callback(lambda _: on_end(self))

    def span(self) -> Span:
        """Return the node's intervals and counts."""
        return Span(
            self.planned.id, self._update, self.status, tuple(self.activity.intervals),
            self._attempts, self._num_items, self._num_dropped,
        )  # fmt: skip

    async def _once(self) -> None:
        result = await self._call(self._arguments())
        values, metrics = unpack_call(self.planned.id, self._update, self.planned.writes, result)
        self._values.update(values)
        if metrics:
            self._add_metrics(self.planned.id, metrics)
        self.activity.pause_work()

    async def _per_item(self) -> None:
        assert self.inbox is not None
        arguments = self._arguments()
        while (item := await self.inbox.get_item(self.activity)) is not END:
            await self._emit(await self._call({**arguments, self.planned.item: item}))
            # a group of episodes holds hundreds of megabytes of images: not while waiting for the next one
            del item
        self.activity.pause_work()

    async def _source(self) -> None:
        try:
            await self._pass_on_items()
        except SystemExit as error:
            raise _explain_exit(error) from error

    async def _pass_on_items(self) -> None:
        """Pass on the items of the generator; resources are held only while it makes an item."""
        failures = 0
        while True:
            self._attempts += 1
            async with aclosing(self.planned.func(**self._arguments())) as generator:
                while True:
                    await self._take_resources()
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
                        self._release_resources(len(self.planned.resources))
                    if item is END:
                        self.activity.pause_work()
                        return
                    await self._emit(item)
                    del item

    async def _call(self, arguments: Mapping[str, Any]) -> Any:
        """Call the function with its resources held.

        Repeat it after a failure as often as the node allows.
        """
        planned, failures = self.planned, 0
        await self._take_resources()
        try:
            while True:
                self._attempts += 1
                try:
                    # Resources stay held between attempts: another node in between could change
                    # what the next one finds.
                    return await planned.func(**arguments)
                except planned.retry_on as error:
                    failures += 1
                    if failures > planned.retries:
                        raise
                    self._log_retry(failures, error)
        except SystemExit as error:
            raise _explain_exit(error) from error
        finally:
            self._release_resources(len(planned.resources))

    async def _emit(self, result: object) -> None:
        item, metrics = unpack_item(self.planned.id, self._update, self.planned.writes, result)
        if metrics:
            self._add_metrics(self.planned.id, metrics)
        if item is DROP:
            self._num_dropped += bool(self.planned.writes)
            return
        self._num_items += 1
        if self.items is not None:
            self.items.append(item)
        for outbox in self.outboxes:
            await outbox.put_item(item, self.activity)

    def _arguments(self) -> dict[str, Any]:
        values = self._values
        return {
            **self.planned.config,
            **{parameter: values[name] for parameter, name in self.planned.reads},
        }

    async def _take_resources(self) -> None:
        """Take the resources, in order of name; the node counts as running from then on."""
        for position, (resource, units) in enumerate(self.planned.resources):
            # The usual case first: a resource is mostly free, and a wait would cost a turn of the
            # loop.
            if not resource.try_take(units):
                self.activity.pause_work()
                try:
                    by = await resource.wait(units, self._update)
                except BaseException:
                    self._release_resources(position)
                    raise
                self.activity.resume_work(by, Waited.RESOURCE)
        self.activity.begin_work()
        self.status = NodeStatus.RUNNING

    def _release_resources(self, count: int) -> None:
        for resource, units in self.planned.resources[:count]:
            resource.release(units, by=self.activity.last)

    def _log_retry(self, failures: int, error: Exception) -> None:
        logger.warning(
            "node %r in update %d failed, try %d of %d: %s: %s",
            self.planned.id, self._update, failures, self.planned.retries + 1, type(error).__name__, error,
        )  # fmt: skip
