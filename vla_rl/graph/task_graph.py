"""A checked graph: which nodes wait for which and why, with queries about it.

It never changes after it is built.
"""

import importlib
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vla_rl.graph.drawing import draw, to_mermaid, to_tree
from vla_rl.graph.errors import UnknownNode, nearest
from vla_rl.graph.node import Edge, Node, NodeRole, NodeType


class TaskGraph:
    """Checked graph with all functions resolved, made by `Pipeline.build`. `str(graph)` is a tree.

    Attributes:
        id, description, inputs: as in the pipeline.
        declared: nodes as the pipeline declared them, in its order.
        nodes: nodes by id, in topological order; each `func` is the function itself.
        edges: all data and control edges, each once.
        streamed: names of the values that are streams.
    """

    def __init__(
        self,
        id: str,
        description: str,
        inputs: tuple[str, ...],
        *,
        declared: tuple[Node, ...],
        nodes: Iterable[Node],
        edges: Iterable[Edge],
        streamed: Iterable[str],
    ) -> None:
        self.id, self.description, self.inputs, self.declared = id, description, inputs, declared
        self.nodes: Mapping[str, Node] = {node.id: node for node in nodes}
        self.edges = tuple(edges)
        self.streamed = frozenset(streamed)
        self._writers = {name: node.id for node in self.nodes.values() for name in node.writes}
        self._sources: dict[str, list[str]] = {node_id: [] for node_id in self.nodes}
        self._targets: dict[str, list[str]] = {node_id: [] for node_id in self.nodes}
        for edge in self.edges:
            if edge.source not in self._sources[edge.target]:
                self._sources[edge.target].append(edge.source)
                self._targets[edge.source].append(edge.target)

    @property
    def topological_order(self) -> tuple[str, ...]:
        """Ids, each after all its dependencies; otherwise in the order in which they were added."""
        return tuple(self.nodes)

    @property
    def entry_nodes(self) -> tuple[str, ...]:
        """Nodes without dependencies."""
        return tuple(node_id for node_id, sources in self._sources.items() if not sources)

    @property
    def exit_nodes(self) -> tuple[str, ...]:
        """Nodes without dependents."""
        return tuple(node_id for node_id, targets in self._targets.items() if not targets)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Values that no node reads; an update always keeps them."""
        read = {name for node in self.nodes.values() for name in node.reads.values()}
        return tuple(name for name in self._writers if name not in read)

    def node(self, node_id: str) -> Node:
        """Return the node with this id. Raises `UnknownNode`."""
        if node_id not in self.nodes:
            raise UnknownNode(
                f"graph {self.id!r} has no node {node_id!r}{nearest(node_id, self.nodes)}"
            )
        return self.nodes[node_id]

    def writer(self, value: str) -> str | None:
        """Return the node that writes a value.

        None for an input of the graph or an unknown name.
        """
        return self._writers.get(value)

    def dependencies(self, node_id: str) -> tuple[str, ...]:
        """Return the nodes that this one waits for, directly."""
        return tuple(self._sources[self.node(node_id).id])

    def dependents(self, node_id: str) -> tuple[str, ...]:
        """Return the nodes that wait for this one, directly."""
        return tuple(self._targets[self.node(node_id).id])

    def upstream(self, node_id: str) -> tuple[str, ...]:
        """Return all nodes that this one waits for, also through others, in topological order."""
        return self._reachable(node_id, self._sources)

    def downstream(self, node_id: str) -> tuple[str, ...]:
        """Return all nodes that wait for this one, also through others, in topological order."""
        return self._reachable(node_id, self._targets)

    def nodes_by_type(self, node_type: NodeType) -> tuple[Node, ...]:
        """Return the nodes of a type, in topological order."""
        return tuple(node for node in self.nodes.values() if node.node_type is node_type)

    def nodes_by_role(self, node_role: NodeRole) -> tuple[Node, ...]:
        """Return the nodes of a role, in topological order."""
        return tuple(node for node in self.nodes.values() if node.node_role is node_role)

    def edit(self) -> Any:
        """Return `Pipeline.from_graph(self)`; this name goes with the next release."""
        warnings.warn(
            "graph.edit() is Pipeline.from_graph(graph) now; the old name goes with the next "
            "release",
            DeprecationWarning,
            stacklevel=2,
        )
        return importlib.import_module("vla_rl.graph.pipeline").Pipeline.from_graph(self)

    def mermaid(self) -> str:
        """Return the graph as mermaid text, which GitHub and many editors can render."""
        return to_mermaid(self)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the graph into a file and return the path that was written.

        `.svg`, `.png` and `.pdf` need graphviz's `dot` on the PATH; without it, mermaid text is
        written to the same name with the suffix `.mmd`, and a warning is logged. `.mmd`, `.dot` and
        `.txt` (the tree) need no other program.
        """
        return draw(self, Path(path))

    def __str__(self) -> str:
        return to_tree(self)

    def __repr__(self) -> str:
        return f"TaskGraph({self.id!r}, {len(self.nodes)} nodes, {len(self.edges)} edges)"

    def _reachable(self, node_id: str, neighbours: Mapping[str, list[str]]) -> tuple[str, ...]:
        seen: set[str] = set()
        stack = list(neighbours[self.node(node_id).id])
        while stack:
            current = stack.pop()
            if current not in seen:
                seen.add(current)
                stack.extend(neighbours[current])
        return tuple(other for other in self.nodes if other in seen)
