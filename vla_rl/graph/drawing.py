"""Drawings of a graph: a text tree, mermaid text, graphviz's language, and files made by `dot`.

In all of them a solid arrow is a value, a thick one a stream, a dashed one only an order.
"""

import logging
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from vla_rl.errors import GraphError
from vla_rl.graph.errors import nearest
from vla_rl.graph.node import Edge, Node, NodeRole, NodeType

logger = logging.getLogger("vla_rl.graph")

_RENDERED = (".svg", ".png", ".pdf")
_DOT_TIMEOUT_S = 60.0

_COLORS = {
    NodeType.ENV_INTERACT: "#d5e8d4",
    NodeType.MODEL_INFERENCE: "#dae8fc",
    NodeType.MODEL_TRAIN: "#f8cecc",
    NodeType.DATA_LOAD: "#fff2cc",
}
_OTHER_COLOR = "#f5f5f5"


class Drawable(Protocol):
    """Parts of a `TaskGraph` that a drawing shows."""

    @property
    def id(self) -> str:
        """Name of the graph."""
        ...

    @property
    def description(self) -> str:
        """Description in one line; may be empty."""
        ...

    @property
    def nodes(self) -> Mapping[str, Node]:
        """Nodes by id, in topological order."""
        ...

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges."""
        ...

    @property
    def streamed(self) -> frozenset[str]:
        """Names of the values that are streams."""
        ...

    def dependencies(self, node_id: str) -> tuple[str, ...]:
        """Return the nodes that this one waits for, directly."""
        ...


def draw(graph: Drawable, path: Path) -> Path:
    """Write a drawing in the format of the suffix; see `TaskGraph.draw`."""
    suffix = path.suffix.lower()
    texts = {".mmd": to_mermaid, ".dot": to_dot, ".txt": to_tree}
    if suffix in texts:
        path.write_text(texts[suffix](graph), encoding="utf-8")
        return path
    if suffix not in _RENDERED:
        raise GraphError(f"cannot draw into {str(path)!r}{nearest(suffix, (*_RENDERED, *texts))}")
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


def to_tree(graph: Drawable) -> str:
    """Return the graph as an indented tree: each node once, below the last of its dependencies."""
    below: dict[str | None, list[str]] = {}
    order = {node_id: position for position, node_id in enumerate(graph.nodes)}
    for node_id in graph.nodes:
        parent = max(graph.dependencies(node_id), key=order.__getitem__, default=None)
        below.setdefault(parent, []).append(node_id)

    def lines(parent: str | None, indent: str) -> Iterator[str]:
        children = below.get(parent, [])
        for number, child in enumerate(children, start=1):
            last = number == len(children)
            yield f"{indent}{'└── ' if last else '├── '}{_describe(graph, graph.nodes[child], parent)}"
            yield from lines(child, indent + ("    " if last else "│   "))

    title = f"{graph.id}: {graph.description}" if graph.description else graph.id
    return "\n".join([title, *lines(None, ""), *(["(* a stream)"] if graph.streamed else [])])


def to_mermaid(graph: Drawable) -> str:
    """Return the graph as a mermaid flowchart."""
    names = {node_id: f"n{number}" for number, node_id in enumerate(graph.nodes)}
    out = ["flowchart TD"]
    for node in graph.nodes.values():
        label = "<br/>".join(_escape_mermaid(line) for line in _label(node))
        out.append(f'    {names[node.id]}["{label}"]')
        out.append(f"    style {names[node.id]} fill:{_COLORS.get(node.node_type, _OTHER_COLOR)}")
    for edge in graph.edges:
        arrow = "-.->" if edge.value is None else "==>" if edge.streamed else "-->"
        text = "" if edge.value is None else f"|{_escape_mermaid(edge.value)}|"
        out.append(f"    {names[edge.source]} {arrow}{text} {names[edge.target]}")
    return "\n".join(out) + "\n"


def to_dot(graph: Drawable) -> str:
    """Return the graph in graphviz's language."""
    out = [
        f"digraph {_quoted(graph.id)} {{",
        f"    label={_quoted(graph.description or graph.id)}; labelloc=t; fontname=Helvetica;",
        "    node [shape=box, style=filled, fontname=Helvetica]; edge [fontname=Helvetica, "
        "fontsize=10];",
    ]
    for node in graph.nodes.values():
        label, color = (
            _quoted("\n".join(_label(node))),
            _quoted(_COLORS.get(node.node_type, _OTHER_COLOR)),
        )
        out.append(f"    {_quoted(node.id)} [label={label}, fillcolor={color}];")
    out.extend(
        f"    {_quoted(edge.source)} -> {_quoted(edge.target)} [{_dot_style(edge)}];"
        for edge in graph.edges
    )
    return "\n".join([*out, "}"]) + "\n"


def _describe(graph: Drawable, node: Node, parent: str | None) -> str:
    def shown(name: str) -> str:
        return f"{name}*" if name in graph.streamed else name

    reads = [
        f"each of {name}" if node.stream and name in graph.streamed else shown(name)
        for name in node.reads.values()
    ]
    writes = ", ".join(shown(name) for name in node.writes)
    text = f"{node.id}: {', '.join(reads)}" if reads else node.id
    text += f" -> {writes}" if writes else ""
    text += f"  [{_kind(node)}]"
    text += f" on {', '.join(node.resources)}" if node.resources else ""
    after = [
        edge.source
        for edge in graph.edges
        if edge.target == node.id and edge.value is None and edge.source != parent
    ]
    return text + (f" after {', '.join(after)}" if after else "")


def _label(node: Node) -> list[str]:
    return [node.id, _kind(node), *([f"on {', '.join(node.resources)}"] if node.resources else [])]


def _kind(node: Node) -> str:
    role = "" if node.node_role is NodeRole.DEFAULT else f", {node.node_role.value}"
    return node.node_type.value + role


def _dot_style(edge: Edge) -> str:
    if edge.value is None:
        return "style=dashed"
    return f"label={_quoted(edge.value)}" + (", penwidth=3" if edge.streamed else "")


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _escape_mermaid(text: str) -> str:
    return (
        text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
    )
