"""Checks of a pipeline: all mistakes are reported here, before anything starts.

All are `GraphError`, so one `except` catches them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from vla_rl.errors import GraphError
from vla_rl.graph.node import Edge, FunctionKind, Node, check_signature, get_function_kind
from vla_rl.graph.task_graph import TaskGraph
from vla_rl.util.imports import load_function, suggest


class DuplicateNode(GraphError):
    """Two nodes with the same id."""


class UnknownDependency(GraphError):
    """`deps` names a node that the graph does not have."""


class MissingProducer(GraphError):
    """A node reads a value that no node writes and that is not an input of the graph."""


class TwoWriters(GraphError):
    """Two nodes, or a node and an input of the graph, write the same name."""


class CyclicGraph(GraphError):
    """Nodes that wait for each other in a cycle."""


class UnknownFunction(GraphError):
    """A function's path names no module, or no attribute in its module."""


class InvalidStream(GraphError):
    """A node that cannot stream: it reads no stream, or two, or would wait for itself."""


def build_graph(
    pipeline_id: str, description: str, inputs: tuple[str, ...], declared: tuple[Node, ...]
) -> TaskGraph:
    """Check the nodes of a pipeline and return its graph, nodes in topological order.

    Raises the first `GraphError`.
    """
    if not declared:
        raise GraphError(f"pipeline {pipeline_id!r} has no nodes; add one with add_node")
    # in this order, so that the first error is the cause: what a function is decides which values are
    # streams, and those decide which nodes wait for which
    nodes = _resolve_nodes(pipeline_id, declared)
    kinds = {node.id: get_function_kind(node, node.func) for node in nodes.values()}
    for node in nodes.values():
        check_signature(node, node.func)
    writers = _find_writers(pipeline_id, inputs, nodes)
    streamed = {name for name, writer in writers.items() if kinds[writer] is not FunctionKind.CALL}
    _check_reads(inputs, nodes, writers)
    for node in nodes.values():
        _check_stream(node, kinds[node.id], streamed)
    edges = _find_edges(nodes, writers, streamed)
    order = _sort_nodes(nodes, edges)
    _check_stream_order(nodes, edges)
    return TaskGraph(
        pipeline_id,
        description,
        inputs,
        declared=declared,
        nodes=(nodes[node_id] for node_id in order),
        edges=edges,
        streamed=streamed,
    )


def find_cycle(targets: Mapping[str, Iterable[str]]) -> list[str]:
    """Return a path that returns to its start, such as `["a", "b", "a"]`.

    Empty if there is none.
    """
    try:
        _sorter(targets).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def _sorter(targets: Mapping[str, Iterable[str]]) -> TopologicalSorter[str]:
    sorter = TopologicalSorter[str](dict.fromkeys(targets, ()))
    for node_id, after in targets.items():
        for target in after:
            sorter.add(target, node_id)
    return sorter


def _resolve_nodes(pipeline_id: str, declared: tuple[Node, ...]) -> dict[str, Node]:
    nodes: dict[str, Node] = {}
    for node in declared:
        if node.id in nodes:
            raise DuplicateNode(
                f"pipeline {pipeline_id!r} has two nodes {node.id!r}; give one another id, or "
                "change it with replace_node"
            )
        func = (
            load_function(node.func, f"node {node.id!r}", UnknownFunction)
            if isinstance(node.func, str)
            else node.func
        )
        nodes[node.id] = replace(node, func=func)
    for node in nodes.values():
        for dep in node.deps:
            if dep not in nodes:
                raise UnknownDependency(
                    f"node {node.id!r} depends on {dep!r}, which is not a node of "
                    f"{pipeline_id!r}{suggest(dep, nodes)}"
                )
    return nodes


def _find_writers(
    pipeline_id: str, inputs: tuple[str, ...], nodes: Mapping[str, Node]
) -> dict[str, str]:
    writers: dict[str, str] = {}
    for node in nodes.values():
        for name in node.writes:
            if name in inputs:
                raise TwoWriters(
                    f"node {node.id!r} writes {name!r}, which is an input of "
                    f"{pipeline_id!r}; rename one"
                )
            if name in writers:
                both = f"nodes {writers[name]!r} and {node.id!r} both write {name!r}"
                raise TwoWriters(
                    f"{both}; a value has one writer: rename one, or read it in "
                    "between and write another"
                )
            # One writer for each name: with two, which value a reader gets would depend on the
            # order of their ends.
            writers[name] = node.id
    return writers


def _check_reads(
    inputs: tuple[str, ...], nodes: Mapping[str, Node], writers: Mapping[str, str]
) -> None:
    known = [*inputs, *writers]
    for node in nodes.values():
        for name in node.reads.values():
            if name not in known:
                raise MissingProducer(
                    f"node {node.id!r} reads {name!r}, which no node writes and which is not an "
                    f"input{suggest(name, known)} Add a node that writes it, or name it in "
                    "Pipeline(inputs=...)."
                )


def _check_stream(node: Node, kind: FunctionKind, streamed: set[str]) -> None:
    if kind is FunctionKind.SOURCE:
        if len(node.writes) != 1:
            raise InvalidStream(
                f"node {node.id!r} is an async generator and writes {list(node.writes)}, expected "
                "exactly one name: that of its stream"
            )
        if node.stream:
            raise InvalidStream(
                f"node {node.id!r} is stream=True, so it is called for each item and must be a "
                f"coroutine function; {getattr(node.func, '__qualname__', node.func)} is an async "
                "generator. Return the item, or DROP"
            )
    elif kind is FunctionKind.PER_ITEM:
        read = [name for name in node.reads.values() if name in streamed]
        # Two streams have no common item: their writers make different numbers of them, at
        # different times.
        if len(read) != 1:
            raise InvalidStream(
                f"node {node.id!r} is stream=True and reads {len(read)} streams {read}, expected "
                f"exactly one; values that are streams here: {sorted(streamed)}. Without "
                "stream=True, a stream arrives as a list"
            )
        if len(node.writes) > 1:
            raise InvalidStream(
                f"node {node.id!r} is stream=True and writes {list(node.writes)}, "
                "expected at most one"
            )


def _find_edges(
    nodes: Mapping[str, Node], writers: Mapping[str, str], streamed: set[str]
) -> list[Edge]:
    """Return the edges, data edges first.

    A `deps` on a node that is read anyway adds none: it cannot stop a stream.
    """
    edges: list[Edge] = []
    for node in nodes.values():
        sources: set[str] = set()
        for name in dict.fromkeys(node.reads.values()):
            if name in writers:
                edges.append(
                    Edge(writers[name], node.id, name, streamed=node.stream and name in streamed)
                )
                sources.add(writers[name])
        edges.extend(
            Edge(dep, node.id, None) for dep in dict.fromkeys(node.deps) if dep not in sources
        )
    return edges


def _sort_nodes(nodes: Mapping[str, Node], edges: Iterable[Edge]) -> list[str]:
    targets: dict[str, list[str]] = {node_id: [] for node_id in nodes}
    for edge in edges:
        targets[edge.source].append(edge.target)
    if cycle := find_cycle(targets):
        raise CyclicGraph(
            f"nodes wait for each other in a cycle: {' -> '.join(cycle)}; remove one of these "
            "reads or deps"
        )
    # of the nodes that could come next the one that was declared first, so that drawings, traces and
    # reports list nodes as their author did
    sorter, position = _sorter(targets), {node_id: number for number, node_id in enumerate(nodes)}
    sorter.prepare()
    order: list[str] = []
    ready: list[str] = []
    while sorter.is_active():
        ready.extend(sorter.get_ready())
        node_id = min(ready, key=position.__getitem__)
        ready.remove(node_id)
        order.append(node_id)
        sorter.done(node_id)
    return order


def _check_stream_order(nodes: Mapping[str, Node], edges: list[Edge]) -> None:
    """Reject a streaming node that starts only after the stream it reads has ended.

    Streams are bounded: a writer waits while its reader is full. So a reader must begin before the
    end of each node upstream along its stream; with these edges and the ordinary ones there must be
    no cycle.
    """
    # streams are the only edges that feed back: a full buffer makes a writer wait for its reader,
    # so "reader starts" must come before "writer ends", which the ordinary edges do not say
    feeds = {edge.target: edge.source for edge in edges if edge.streamed}
    later: dict[str, list[str]] = {
        f"{moment} of {node_id}": [] for node_id in nodes for moment in ("start", "end")
    }
    for node_id in nodes:
        later[f"start of {node_id}"].append(f"end of {node_id}")
    for edge in edges:
        if edge.streamed:
            later[f"end of {edge.source}"].append(f"end of {edge.target}")
        else:
            later[f"end of {edge.source}"].append(f"start of {edge.target}")
    for node_id in feeds:
        source: str | None = feeds[node_id]
        while source is not None:
            later[f"start of {node_id}"].append(f"end of {source}")
            source = feeds.get(source)
    if cycle := find_cycle(later):
        streaming = [
            moment.removeprefix("start of ") for moment in cycle if moment.startswith("start of ")
        ]
        culprit = next(node_id for node_id in streaming if node_id in feeds)
        raise InvalidStream(
            f"node {culprit!r} takes the items of {feeds[culprit]!r} as they come, but also waits "
            f"for something that is ready only after that stream has ended: {' -> '.join(cycle)}. "
            "Drop stream=True (it then gets the list), or drop that read or dep"
        )
