"""A timeline for ui.perfetto.dev or chrome://tracing: one lane per node, one lane for the updates,
and lanes of other processes that work for them.

The format is the trace-event array, which may end after any line: a trace opens even if the run
crashed.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

from vla_rl.graph.task_graph import TaskGraph
from vla_rl.graph.update import Span, Update
from vla_rl.util.appended_file import AppendedFile

_UPDATES_LANE = 0


class Slice(NamedTuple):
    """A piece of work of another process, on the clock of this host.

    Example:
        Slice(name="generate", begin=1203.41, end=1203.88)
    """

    name: str
    begin: float
    """Seconds of `time.monotonic`."""

    end: float


class TraceWriter:
    """Appends updates to a trace file, each completely or not at all.

    `close` makes the file valid JSON.

    Args:
        path: the file, such as `trace.json`; overwritten by the first update.
        graph: graph that determines the lanes and their order.
        process: number that distinguishes this trace's lanes from others when files are merged.
    """

    def __init__(self, path: str | os.PathLike[str], graph: TaskGraph, *, process: int = 1) -> None:
        self.path = Path(path)
        self._process = process
        self._lanes = {
            node_id: lane for lane, node_id in enumerate(graph.nodes, start=_UPDATES_LANE + 1)
        }
        self._resources = {node_id: sorted(node.resources) for node_id, node in graph.nodes.items()}
        self._types = {node_id: node.node_type.value for node_id, node in graph.nodes.items()}
        self._other_lanes: dict[str, int] = {}
        first, *others = self._lane_events(graph.id)
        self._file = AppendedFile(
            self.path, opening=f"[\n{json.dumps(first)}".encode() + _encode_lines(others), anew=True
        )
        self._is_closed = False

    def write_update(
        self,
        update: Update,
        facts: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
        slices: Mapping[str, Sequence[Slice]] = MappingProxyType({}),
    ) -> None:
        """Append one update, and hand it to the operating system.

        Args:
            update: the update.
            facts: numbers to show with a node, by its id.
            slices: what other processes did meanwhile, by the name of a lane of their own.

        Raises: OSError if it could not be written; the file is then unchanged, and the update may
        be written again.
        """
        if self._is_closed:
            raise ValueError(f"the trace {self.path} is closed; open another TraceWriter")
        events = [
            self._update_event("b", update, update.started),
            self._update_event("e", update, update.ended),
        ]
        for span in update.spans.values():
            events.extend(self._span_events(span, facts.get(span.node, {})))
        lanes = dict(self._other_lanes)
        if slices and not lanes:
            # Named only once it has a lane: most runs have no other process, and an empty track
            # would be shown.
            events.append(self._name("process_name", 0, "other processes", other_process=1))
        for name, shown in slices.items():
            if name not in lanes:
                lanes[name] = len(lanes)
                events.append(self._name("thread_name", lanes[name], name, other_process=1))
            events.extend(self._slice_event(each, lanes[name]) for each in shown)
        # lanes count only once they are in the file: a disk that was full gets their names again
        self._file.write(_encode_lines(events))
        self._other_lanes = lanes

    def close(self) -> None:
        """Finish the file; a second call does nothing. Raises: OSError."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._file.write(b"\n]\n")
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _span_events(self, span: Span, facts: Mapping[str, float]) -> Iterable[dict[str, Any]]:
        for interval in span.intervals:
            end = interval.start if interval.end is None else interval.end
            yield {
                "name": f"{span.node} {span.update}",
                "cat": self._types[span.node],
                "ph": "X",
                "ts": 1e6 * interval.start,
                "dur": 1e6 * (end - interval.start),
                "pid": self._process,
                "tid": self._lanes[span.node],
                "args": {
                    "update": span.update,
                    "status": span.status.value,
                    "waited": interval.waited.value,
                    "waited_for": interval.waited_for,
                    "resources": self._resources[span.node],
                    **facts,
                },
            }

    def _slice_event(self, each: Slice, lane: int) -> dict[str, Any]:
        return {
            "name": each.name,
            "cat": "process",
            "ph": "X",
            "ts": 1e6 * each.begin,
            "dur": 1e6 * (each.end - each.begin),
            "pid": self._process + 1,
            "tid": lane,
        }

    def _update_event(self, phase: str, update: Update, when: float) -> dict[str, Any]:
        """Return the begin or end event of an update; an async event, because updates overlap."""
        path = str(update.critical_path)
        return {
            "name": f"update {update.index}", "cat": "update", "ph": phase, "id": update.index, "ts": 1e6 * when,
            "pid": self._process, "tid": _UPDATES_LANE, "args": {"update": update.index, "critical path": path},
        }  # fmt: skip

    def _lane_events(self, graph_id: str) -> Iterable[dict[str, Any]]:
        yield self._name("process_name", _UPDATES_LANE, f"graph {graph_id}")
        yield self._name("thread_name", _UPDATES_LANE, "updates")
        for node_id, lane in self._lanes.items():
            yield self._name("thread_name", lane, node_id)
            yield {**self._name("thread_sort_index", lane, node_id), "args": {"sort_index": lane}}

    def _name(self, kind: str, lane: int, name: str, *, other_process: int = 0) -> dict[str, Any]:
        return {
            "name": kind,
            "ph": "M",
            "ts": 0,
            "pid": self._process + other_process,
            "tid": lane,
            "args": {"name": name},
        }


def _encode_lines(events: Iterable[dict[str, Any]]) -> bytes:
    """Return events to append, one per line."""
    return "".join(f",\n{json.dumps(event)}" for event in events).encode()


def write_trace(path: str | os.PathLike[str], graph: TaskGraph, updates: Iterable[Update]) -> Path:
    """Write finished updates into a trace file; return its path."""
    with TraceWriter(path, graph) as writer:
        for update in updates:
            writer.write_update(update)
    return writer.path
