"""A checked graph: which nodes wait for which and why, with queries about it, drawn as text or by `dot`.

It never changes after it is built. In all drawings a solid arrow is a value, a thick one a stream, a
dashed one only an order.
"""

import logging
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vla_rl.errors import GraphError
from vla_rl.graph.node import Edge, Node, NodeRole, NodeType
from vla_rl.util.imports import suggest

logger = logging.getLogger("vla_rl.graph")


class UnknownNode(GraphError):
    """A query about, or an edit of, a node that the graph does not have."""


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
            # Two values between the same nodes are two edges and one dependency.
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
                f"graph {self.id!r} has no node {node_id!r}{suggest(node_id, self.nodes)}"
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

    def mermaid(self) -> str:
        """Return the graph as mermaid text, which GitHub and many editors can render."""
        return to_mermaid(self)

    def draw(self, path: str | os.PathLike[str]) -> Path:
        """Draw the graph into a file and return the path that was written.

        `.svg`, `.png` and `.pdf` need graphviz's `dot` on the PATH; without it, mermaid text is
        written to the same name with the suffix `.mmd`, and a warning is logged. `.mmd`, `.dot` and
        `.txt` (the tree) need no other program.
        """
        return draw_graph(self, Path(path))

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


_RENDERED_SUFFIXES = (".svg", ".png", ".pdf")
_DOT_TIMEOUT_S = 60.0

_COLORS = {
    NodeType.ENV_INTERACT: "#d5e8d4",
    NodeType.MODEL_INFERENCE: "#dae8fc",
    NodeType.MODEL_TRAIN: "#f8cecc",
    NodeType.DATA_LOAD: "#fff2cc",
}
_OTHER_COLOR = "#f5f5f5"


def draw_graph(graph: TaskGraph, path: Path) -> Path:
    """Write a drawing in the format of the suffix; see `TaskGraph.draw`."""
    suffix = path.suffix.lower()
    texts = {".mmd": to_mermaid, ".dot": to_dot, ".txt": to_tree}
    if suffix in texts:
        path.write_text(texts[suffix](graph), encoding="utf-8")
        return path
    if suffix not in _RENDERED_SUFFIXES:
        raise GraphError(
            f"cannot draw into {str(path)!r}{suggest(suffix, (*_RENDERED_SUFFIXES, *texts))}"
        )
    # graphviz is no Python package: a drawing in another format is worth more than an error
    dot = shutil.which("dot")
    if dot is None:
        path = path.with_suffix(".mmd")
        logger.warning(
            "graphviz's `dot` is not on the PATH: wrote mermaid text to %s instead", path
        )
        path.write_text(to_mermaid(graph), encoding="utf-8")
        return path
    command = [dot, f"-T{suffix.removeprefix('.')}", "-o", str(path)]
    done = subprocess.run(
        command,
        input=to_dot(graph),
        capture_output=True,
        text=True,
        timeout=_DOT_TIMEOUT_S,
        check=False,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode != 0:
        raise GraphError(
            f"{' '.join(command)} ended with exit code {done.returncode}: {done.stderr.strip()}"
        )
    return path


def to_tree(graph: TaskGraph) -> str:
    """Return the graph as an indented tree: each node once, below the last of its dependencies."""
    below: dict[str | None, list[str]] = {}
    order = {node_id: position for position, node_id in enumerate(graph.nodes)}
    for node_id in graph.nodes:
        # Below the last of its dependencies, so that whoever reads from the top finds everything
        # that a node needs above it.
        parent = max(graph.dependencies(node_id), key=order.__getitem__, default=None)
        below.setdefault(parent, []).append(node_id)

    def lines(parent: str | None, indent: str) -> Iterator[str]:
        children = below.get(parent, [])
        for number, child in enumerate(children, start=1):
            last = number == len(children)
            yield f"{indent}{'└── ' if last else '├── '}{_describe_node(graph, graph.nodes[child], parent)}"
            yield from lines(child, indent + ("    " if last else "│   "))

    title = f"{graph.id}: {graph.description}" if graph.description else graph.id
    return "\n".join([title, *lines(None, ""), *(["(* a stream)"] if graph.streamed else [])])


def to_mermaid(graph: TaskGraph) -> str:
    """Return the graph as a mermaid flowchart."""
    names = {node_id: f"n{number}" for number, node_id in enumerate(graph.nodes)}
    out = ["flowchart TD"]
    for node in graph.nodes.values():
        label = "<br/>".join(_escape_mermaid(line) for line in _label_node(node))
        out.append(f'    {names[node.id]}["{label}"]')
        out.append(f"    style {names[node.id]} fill:{_COLORS.get(node.node_type, _OTHER_COLOR)}")
    for edge in graph.edges:
        arrow = "-.->" if edge.value is None else "==>" if edge.streamed else "-->"
        text = "" if edge.value is None else f"|{_escape_mermaid(edge.value)}|"
        out.append(f"    {names[edge.source]} {arrow}{text} {names[edge.target]}")
    return "\n".join(out) + "\n"


def to_dot(graph: TaskGraph) -> str:
    """Return the graph in graphviz's language."""
    out = [
        f"digraph {_quote(graph.id)} {{",
        f"    label={_quote(graph.description or graph.id)}; labelloc=t; fontname=Helvetica;",
        "    node [shape=box, style=filled, fontname=Helvetica]; edge [fontname=Helvetica, "
        "fontsize=10];",
    ]
    for node in graph.nodes.values():
        label, color = (
            _quote("\n".join(_label_node(node))),
            _quote(_COLORS.get(node.node_type, _OTHER_COLOR)),
        )
        out.append(f"    {_quote(node.id)} [label={label}, fillcolor={color}];")
    out.extend(
        f"    {_quote(edge.source)} -> {_quote(edge.target)} [{_dot_style(edge)}];"
        for edge in graph.edges
    )
    return "\n".join([*out, "}"]) + "\n"


def _describe_node(graph: TaskGraph, node: Node, parent: str | None) -> str:
    def shown(name: str) -> str:
        return f"{name}*" if name in graph.streamed else name

    reads = [
        f"each of {name}" if node.stream and name in graph.streamed else shown(name)
        for name in node.reads.values()
    ]
    writes = ", ".join(shown(name) for name in node.writes)
    text = f"{node.id}: {', '.join(reads)}" if reads else node.id
    text += f" -> {writes}" if writes else ""
    text += f"  [{_describe_kind(node)}]"
    text += f" on {', '.join(node.resources)}" if node.resources else ""
    after = [
        edge.source
        for edge in graph.edges
        if edge.target == node.id and edge.value is None and edge.source != parent
    ]
    return text + (f" after {', '.join(after)}" if after else "")


def _label_node(node: Node) -> list[str]:
    return [
        node.id,
        _describe_kind(node),
        *([f"on {', '.join(node.resources)}"] if node.resources else []),
    ]


def _describe_kind(node: Node) -> str:
    role = "" if node.node_role is NodeRole.DEFAULT else f", {node.node_role.value}"
    return node.node_type.value + role


def _dot_style(edge: Edge) -> str:
    if edge.value is None:
        return "style=dashed"
    return f"label={_quote(edge.value)}" + (", penwidth=3" if edge.streamed else "")


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _escape_mermaid(text: str) -> str:
    return (
        text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
    )
