"""The builder: nodes are added, inserted, replaced and removed here, or come from a TOML file.

`build` checks the whole and returns a `TaskGraph`. A file has the same names as `Pipeline.add_node`,
with functions by path.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Required, Self, TypedDict, TypeVar, Unpack, get_type_hints

import msgspec

from vla_rl.errors import GraphError
from vla_rl.graph.node import (
    InvalidNode,
    Names,
    Node,
    NodeFields,
    NodeFunction,
    NodeRole,
    NodeType,
    as_names,
)
from vla_rl.graph.task_graph import TaskGraph, UnknownNode
from vla_rl.graph.validation import DuplicateNode, UnknownFunction, build_graph
from vla_rl.util.imports import load_function, suggest

T = TypeVar("T")


class InvalidPipelineFile(GraphError):
    """A TOML file that does not describe a pipeline: an unknown key, a wrong type, no node."""


class NodeTable(NodeFields, total=False):
    """One `[[node]]` table: the arguments of `Pipeline.add_node`."""

    id: Required[str]
    func: Required[str]


class PipelineTable(TypedDict, total=False):
    """The tables of a file: the arguments of `Pipeline`, and the nodes."""

    id: Required[str]
    description: str
    inputs: Names
    node: Required[list[dict[str, Any]]]


def read_tables(path: str | os.PathLike[str]) -> tuple[PipelineTable, list[Node]]:
    """Read a pipeline's arguments and nodes; only the exceptions of `retry_on` are imported.

    Raises: `InvalidPipelineFile` naming the file, the table and the key; `OSError` if the file
    cannot be read.
    """
    where = os.fspath(path)
    with open(path, "rb") as file:
        try:
            # "utf-8-sig": Windows' editors begin a file with a mark that is no part of TOML
            document = tomllib.loads(file.read().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # not TOML, or bytes that are not text
            raise InvalidPipelineFile(f"{where} is not TOML in UTF-8: {error}") from error
    whole = _convert(document, PipelineTable, where)
    return whole, [
        _read_node(number, raw, where) for number, raw in enumerate(whole["node"], start=1)
    ]


def _read_node(number: int, raw: Mapping[str, Any], where: str) -> Node:
    context = f"{where}, node {raw.get('id', number)!r}"
    named = dict(raw)
    for key, kinds in (("node_type", NodeType), ("node_role", NodeRole)):
        if isinstance(raw.get(key), str):
            values = [kind.value for kind in kinds]
            named[key] = kinds(_require_choice(raw[key], values, f"{context}: {key}"))
    if isinstance(raw.get("retry_on"), list):
        named["retry_on"] = [
            load_function(path, f"{context}: retry_on", UnknownFunction)
            if isinstance(path, str)
            else path
            for path in raw["retry_on"]
        ]
    table = _convert(named, NodeTable, context)
    return Node.declare(**table)


def _convert(raw: Mapping[str, Any], kind: type[T], context: str) -> T:
    # msgspec ignores keys that a TypedDict does not have, so that a misspelt one would change
    # nothing.
    known = get_type_hints(kind)
    for key in raw:
        if key not in known:
            raise InvalidPipelineFile(f"{context}: unknown key {key!r}{suggest(key, known)}")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise InvalidPipelineFile(f"{context}: {error}") from error


def _require_choice(text: str, choices: Iterable[str], context: str) -> str:
    """Return `text` in lower case, so that siiRL's `ENV_INTERACT` is accepted too."""
    if text.lower() not in choices:
        raise InvalidPipelineFile(f"{context} is {text!r}{suggest(text.lower(), choices)}")
    return text.lower()


class Pipeline:
    """Nodes in the order in which they were added.

    Each method that changes the pipeline returns it, so that calls chain.

    Args:
        id: name of the pipeline, in drawings and traces.
        description: description in one line.
        inputs: values from outside. The executor sets `update`, the index of the update; the others
            are passed to `Executor.run`.
    """

    def __init__(self, id: str, description: str = "", *, inputs: Names = ()) -> None:
        if not isinstance(id, str) or not id:
            raise InvalidNode(f"a pipeline's id is {id!r}, expected a non-empty string")
        self.id, self.description, self.inputs = id, description, as_names(inputs)
        self._nodes: list[Node] = []

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> "Pipeline":
        """Read a pipeline from a file; the format is in `docs/graph.md`.

        Raises `InvalidPipelineFile`.
        """
        table, nodes = read_tables(path)
        pipeline = cls(table["id"], table.get("description", ""), inputs=table.get("inputs", ()))
        pipeline._nodes = nodes
        return pipeline

    @classmethod
    def from_graph(cls, graph: TaskGraph) -> "Pipeline":
        """Return a pipeline with a graph's nodes as declared, to make another graph of them."""
        pipeline = cls(graph.id, graph.description, inputs=graph.inputs)
        pipeline._nodes = list(graph.declared)
        return pipeline

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as declared, in order."""
        return tuple(self._nodes)

    def node(self, node_id: str) -> Node:
        """Return the node with this id. Raises `UnknownNode`."""
        return self._nodes[self._position(node_id)]

    def add_node(self, id: str, func: NodeFunction | str, **fields: Unpack[NodeFields]) -> Self:
        """Add a node. `func` is an async function or `"module:name"`; see `NodeFields`."""
        self._nodes.append(Node.declare(id, func, **fields))
        return self

    def replace_node(
        self, node_id: str, func: NodeFunction | str | None = None, **fields: Unpack[NodeFields]
    ) -> Self:
        """Change a node in place.

        Omitted arguments stay as they were, but a new `func` drops the old one's `config`.
        """
        position = self._position(node_id)
        self._nodes[position] = self._nodes[position].change(func, **fields)
        return self

    def insert_after(
        self, anchor: str, node: Node, *, reroute: Mapping[str, str] | None = None
    ) -> Self:
        """Put `node` between `anchor` and all nodes that waited for `anchor`.

        `reroute={"groups": "kept"}`: all other nodes that read `groups` then read `kept`, in the
        same parameter.
        """
        position = self._position(anchor)
        self._require_new(node)
        moved = reroute or {}
        # Also nodes that only read a value of the anchor: a reader waits for its writer as if deps
        # named it.
        produced = set(self._nodes[position].writes)
        for number, other in enumerate(self._nodes):
            if anchor in other.deps or produced & set(other.reads.values()):
                other = replace(other, deps=_add_names(other.deps, node.id))
            self._nodes[number] = _reroute(other, moved)
        self._nodes.insert(position + 1, replace(node, deps=_add_names(node.deps, anchor)))
        return self

    def insert_before(
        self, anchor: str, node: Node, *, reroute: Mapping[str, str] | None = None
    ) -> Self:
        """Put `node` between `anchor` and all nodes that `anchor` waited for.

        `reroute` changes what `anchor` reads.
        """
        position = self._position(anchor)
        self._require_new(node)
        old = self._nodes[position]
        writers = self._upstream_writers(position)
        self._nodes[position] = _reroute(
            replace(old, deps=_add_names(old.deps, node.id)), reroute or {}
        )
        self._nodes.insert(position, replace(node, deps=_add_names(node.deps, *old.deps, *writers)))
        return self

    def remove_node(self, node_id: str, *, reroute: Mapping[str, str] | None = None) -> Self:
        """Remove a node.

        Nodes that waited for it wait for its dependencies; `reroute` replaces the names that they
        read.
        """
        position = self._position(node_id)
        # Taken before the node is gone, with the writers of what it read: an order that held
        # through it still holds.
        before = (*self._nodes[position].deps, *self._upstream_writers(position))
        gone = self._nodes.pop(position)
        for number, other in enumerate(self._nodes):
            if node_id in other.deps or set(gone.writes) & set(other.reads.values()):
                others = tuple(dep for dep in other.deps if dep != node_id)
                other = replace(other, deps=_add_names(others, *before))
            self._nodes[number] = _reroute(other, reroute or {})
        return self

    def copy(self) -> "Pipeline":
        """Return another builder with the same nodes, independent of this one."""
        other = Pipeline(self.id, self.description, inputs=self.inputs)
        other._nodes = list(self._nodes)
        return other

    def build(self) -> TaskGraph:
        """Check everything and return the graph to run.

        Raises the `GraphError` of the first mistake.
        """
        return build_graph(self.id, self.description, self.inputs, self.nodes)

    def _upstream_writers(self, position: int) -> list[str]:
        """Return the ids of the nodes whose values the node at `position` waits for."""
        wanted = set(self._nodes[position].reads.values())
        return [other.id for other in self._nodes if wanted & set(other.writes)]

    def _position(self, node_id: str) -> int:
        for position, node in enumerate(self._nodes):
            if node.id == node_id:
                return position
        raise UnknownNode(
            f"pipeline {self.id!r} has no node "
            f"{node_id!r}{suggest(node_id, [node.id for node in self._nodes])}"
        )

    def _require_new(self, node: Node) -> None:
        if any(other.id == node.id for other in self._nodes):
            raise DuplicateNode(
                f"pipeline {self.id!r} already has a node {node.id!r}; choose another id, or use "
                "replace_node"
            )


def load_pipeline(path: str, *arguments: object) -> Pipeline:
    """Call the function at `"module:function"` and return its pipeline.

    Args:
        path: path of a function that returns a `Pipeline` or a `TaskGraph`.
        arguments: passed to the function, such as the run's config.
    """
    made = load_function(path, "custom pipeline", UnknownFunction)(*arguments)
    if isinstance(made, TaskGraph):
        return Pipeline.from_graph(made)
    if isinstance(made, Pipeline):
        return made
    raise GraphError(
        f"custom pipeline: {path!r} returned {type(made).__name__}, expected a "
        "Pipeline or a TaskGraph"
    )


def _add_names(deps: tuple[str, ...], *more: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*deps, *more)))


def _reroute(node: Node, moved: Mapping[str, str]) -> Node:
    if not moved.keys() & set(node.reads.values()):
        return node
    return replace(
        node, reads={parameter: moved.get(name, name) for parameter, name in node.reads.items()}
    )
