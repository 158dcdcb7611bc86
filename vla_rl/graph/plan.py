"""A graph prepared to run: lookups done once instead of in each update."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vla_rl.graph.errors import InvalidRun, UnknownResource, nearest
from vla_rl.graph.functions import FunctionKind, kind_of
from vla_rl.graph.node import Node
from vla_rl.graph.resources import Resource
from vla_rl.graph.task_graph import TaskGraph


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
                f"keep names {name!r}, which no node of {graph.id!r} writes{nearest(name, written)}"
            )
    kept = tuple(dict.fromkeys((*graph.outputs, *keep)))
    num_readers: dict[str, int] = {}
    for node in graph.nodes.values():
        for _, name in _whole_reads(graph, node):
            if name not in kept and name in written:
                num_readers[name] = num_readers.get(name, 0) + 1
    wanted_whole = {*kept, *num_readers}
    positions = {node_id: position for position, node_id in enumerate(graph.nodes)}
    nodes = tuple(
        _planned(graph, node, positions, resources, wanted_whole) for node in graph.nodes.values()
    )
    return Plan(nodes, kept, num_readers)


def _whole_reads(graph: TaskGraph, node: Node) -> list[tuple[str, str]]:
    return [
        (p, name) for p, name in node.reads.items() if not (node.stream and name in graph.streamed)
    ]


def _planned(
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
                f"have{nearest(name, resources)} Pass it as Executor(resources={{{name!r}: 1}})."
            )
        if units > resources[name].capacity:
            raise UnknownResource(
                f"node {node.id!r} needs {units} of the resource {name!r}, of which there are "
                f"{resources[name].capacity}"
            )
        held.append((resources[name], units))
    finishes = {edge.source for edge in graph.edges if edge.target == node.id and not edge.streamed}
    releases = {edge.target for edge in graph.edges if edge.source == node.id and not edge.streamed}
    assert not isinstance(node.func, str), "build() has resolved every function"
    return PlannedNode(
        position=positions[node.id],
        id=node.id,
        func=node.func,
        kind=kind_of(node, node.func),
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
