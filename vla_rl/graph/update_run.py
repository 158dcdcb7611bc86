"""One update in flight: starts each node when its dependencies are ready; contains failures.

a node waits for             woken by
its dependencies             the end of the last of them, or of the same node one update before
units of a resource          the release of another node, of this update or another one
an item of its stream        the writer's next item, or the end of the stream
room in its own stream       the slowest reader's next item, or that reader's end"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from vla_rl.graph.node import NodeStatus
from vla_rl.graph.node_run import NodeRun
from vla_rl.graph.plan import Plan, StreamBuffer
from vla_rl.graph.update import (
    Clock,
    Interval,
    NodeFailed,
    Update,
    Values,
    Waited,
    WrongInput,
    WrongOutput,
    critical_path,
)


class UpdateObserver(Protocol):
    """Runs several updates and is notified of the progress of this one."""

    def node_completed(self, update: "UpdateRun", position: int) -> None:
        """Handle the end of a node, for which the same node of the next update may wait."""
        ...

    def update_failed(self, update: "UpdateRun") -> None:
        """Handle the failure of a node; nodes that do not depend on it continue."""
        ...

    def update_ended(self, update: "UpdateRun") -> None:
        """Handle the end of the update: none of its tasks runs any more."""
        ...


class UpdateRun:
    """Owns the tasks of its nodes. `_remaining` counts the nodes that have not ended in any way."""

    def __init__(
        self,
        plan: Plan,
        index: int,
        inputs: Mapping[str, Any],
        observer: UpdateObserver,
        clock: Clock,
        stream_capacity: int,
    ) -> None:
        self.index, self._plan, self._observer, self._clock = index, plan, observer, clock
        self.values: dict[str, Any] = {**inputs, "update": index}
        self.failure: NodeFailed | None = None
        self.result: Update | None = None
        self._stopping = False
        # Counted down as nodes end: a group of episodes holds hundreds of megabytes, which the
        # update would otherwise keep until its end.
        self._num_readers = dict(plan.num_readers)
        self._metrics: dict[str, tuple[str, float, int]] = {}
        self._last: Interval | None = None
        self.nodes = [
            NodeRun(planned, index, self.values, self.add_metrics, clock) for planned in plan.nodes
        ]
        self._remaining = len(self.nodes)
        for node in self.nodes:
            for position in node.planned.stream_readers:
                reader = self.nodes[position]
                reader.inbox = StreamBuffer(stream_capacity)
                node.outboxes.append(reader.inbox)

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """Tasks that run now."""
        return [node.task for node in self.nodes if node.task is not None]

    def start_nodes(self, previous: "UpdateRun | None") -> None:
        """Start the nodes without dependencies; the others follow automatically."""
        self._started = self._clock()
        # a node keeps its order over updates: two runs of one node at once would share what its
        # function holds, such as a policy or an optimizer
        for node in self.nodes:
            if (
                previous is not None
                and previous.nodes[node.planned.position].status is not NodeStatus.COMPLETED
            ):
                node.waits += 1
        for node in self.nodes:
            if node.waits == 0:
                node.start_task(self._node_ended)

    def release(self, position: int, cause: Interval | None, waited: Waited) -> None:
        """Count one dependency of a node as finished."""
        node = self.nodes[position]
        # An update that is being stopped starts nothing: its owner waits for the tasks that it has.
        if node.release(cause, waited) and not self._stopping:
            node.start_task(self._node_ended)

    def stop(self) -> None:
        """Cancel all tasks, last nodes first; the owner then waits for `tasks`."""
        self._stopping = True
        for node in reversed(self.nodes):
            if node.task is not None:
                node.task.cancel()

    def add_metrics(self, node: str, metrics: Mapping[str, float]) -> None:
        """Merge metrics.

        A key that a node reports several times, as a stream does, gives their mean.
        """
        for key, number in metrics.items():
            owner, total, count = self._metrics.get(key, (node, 0.0, 0))
            # Two nodes under one name would be averaged, and neither number would mean anything.
            if owner != node:
                raise WrongOutput(
                    node,
                    self.index,
                    f"nodes {owner!r} and {node!r} both report the metric "
                    f"{key!r}; rename one of them",
                )
            try:
                self._metrics[key] = (node, total + float(number), count + 1)
            except (TypeError, ValueError) as error:
                message = (
                    f"node {node!r} reports {number!r} as the metric {key!r}, expected a number"
                )
                raise WrongOutput(node, self.index, message) from error

    def forget_causes(self) -> None:
        """Remove the links to earlier updates.

        Called when no critical path can reach back to this one.
        """
        for node in self.nodes:
            for interval in node.activity.intervals:
                interval.forget_cause()

    def describe_progress(self) -> Update:
        """Return the unfinished update, or the result if it has ended."""
        if self.result is not None:
            return self.result
        ended = self._clock()
        return Update(
            index=self.index,
            values=Values(
                {name: self.values[name] for name in self._plan.kept if name in self.values}
            ),
            metrics={key: total / count for key, (_, total, count) in self._metrics.items()},
            spans={node.planned.id: node.span() for node in self.nodes},
            started=self._started,
            ended=ended,
            critical_path=critical_path(self.index, self._started, ended, self._last),
        )

    def _node_ended(self, node: NodeRun) -> None:
        # No longer among `tasks`: an owner that stops the update waits for those that run.
        task, node.task = node.task, None
        assert task is not None
        node.activity.pause_work()
        self._last = node.activity.last or self._last
        error = (
            asyncio.CancelledError("its own code cancelled it")
            if task.cancelled()
            else task.exception()
        )
        # A node that was cancelled is no failure, even if its clean-up raised: that would hide the
        # cause.
        if self._stopping or node.skipped:
            node.status = NodeStatus.SKIPPED
            self._add_late_error(node, None if task.cancelled() else error)
        elif error is None:
            node.status = NodeStatus.COMPLETED
        else:
            node.status = NodeStatus.FAILED
            self._fail(node, error)
        self._settle(node)
        if node.status is NodeStatus.COMPLETED:
            self._release_dependents(node)
        if self._remaining == 0:
            self._finish()

    def _release_dependents(self, node: NodeRun) -> None:
        planned, last = node.planned, node.activity.last
        for position in planned.releases:
            self.release(position, last, Waited.DEPENDENCY)
        self._observer.node_completed(self, planned.position)

    def _settle(self, node: NodeRun) -> None:
        """Record the end of a node: close its streams, and free values that no other node reads."""
        self._remaining -= 1
        # Only a complete stream becomes a value: a reader of the list must not train on half of it.
        if node.items is not None and node.status is NodeStatus.COMPLETED:
            self.values[node.planned.writes[0]] = node.items
        node.items = None
        if node.inbox is not None:
            node.inbox.stop_reading()
        for outbox in node.outboxes:
            outbox.end_stream(node.activity.last)
        for _, name in node.planned.reads:
            if name in self._num_readers:
                self._num_readers[name] -= 1
                if self._num_readers[name] == 0:
                    self.values.pop(name, None)

    def _fail(self, node: NodeRun, error: BaseException) -> None:
        message = f"node {node.planned.id!r} failed in update {self.index}: {type(error).__name__}: {error}"
        planned = node.planned
        # A function of the user that replaces one for single items is often written for the list.
        if (
            planned.item
            and isinstance(error, (TypeError, AttributeError))
            and not getattr(planned.func, "__module__", "").startswith("vla_rl.")
        ):
            message += (
                f" ({planned.item} is one item of the stream; with stream=False it is the list)"
            )
        if self.failure is not None:
            self.failure.add_note(f"also, {message}")
        elif isinstance(error, NodeFailed):
            self.failure = error
        elif isinstance(error, WrongInput):
            self.failure = self._blame_writer(node, error)
        else:
            self.failure = NodeFailed(node.planned.id, self.index, message)
            self.failure.__cause__ = error
        for position in node.planned.downstream:
            other = self.nodes[position]
            if other.task is not None:
                # a streaming node downstream already runs; it is marked before it is cancelled, or
                # its end would be reported as a failure of its own
                other.skipped = True
                other.task.cancel()
            elif other.status is NodeStatus.PENDING:
                other.status = NodeStatus.SKIPPED
                self._settle(other)
        self._observer.update_failed(self)

    def _blame_writer(self, reader: NodeRun, error: WrongInput) -> NodeFailed:
        """Return the failure of the node that wrote the value `reader` cannot use.

        If no node wrote it, the failure is the reader's.
        """
        # By the name of the value and not of the parameter: a node may read it under another one.
        name = dict(reader.planned.reads).get(error.parameter, error.parameter)
        writer = next((node.planned.id for node in self.nodes if name in node.planned.writes), None)
        if writer is None:
            message = (
                f"node {reader.planned.id!r} cannot use {name!r} in update {self.index}: "
                f"{error.problem}"
            )
            return NodeFailed(reader.planned.id, self.index, message)
        message = (
            f"node {writer!r} wrote {name!r} in update {self.index}, which node "
            f"{reader.planned.id!r} cannot use: "
        )
        return WrongOutput(writer, self.index, message + error.problem)

    def _add_late_error(self, node: NodeRun, error: BaseException | None) -> None:
        if error is not None and self.failure is not None:
            text = f"{type(error).__name__}: {error}"
            self.failure.add_note(
                f"also, node {node.planned.id!r} raised while it was cancelled: {text}"
            )

    def _finish(self) -> None:
        self.result = self.describe_progress()
        # The result has what is kept; the run may hold this object until no critical path reaches
        # back to it.
        self.values.clear()
        if self.failure is not None:
            self.failure.report = self.result
        self._observer.update_ended(self)
