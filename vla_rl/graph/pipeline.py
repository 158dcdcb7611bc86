"""The builder: nodes are added, inserted, replaced and removed here.

`build` checks the whole and returns a `TaskGraph`.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from vla_rl.graph.errors import DuplicateNode, InvalidNode, UnknownNode, nearest
from vla_rl.graph.node import (
    Names,
    Node,
    NodeFunction,
    NodeRole,
    NodeType,
    as_names,
    as_reads,
    as_units,
)

if TYPE_CHECKING:
    from vla_rl.graph.task_graph import TaskGraph


class Pipeline:
    """Nodes in the order in which they were added. Each method that changes the pipeline returns
    it, so that calls chain.

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
        from vla_rl.graph.toml_file import read_pipeline

        return read_pipeline(path)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as declared, in order."""
        return tuple(self._nodes)

    def node(self, node_id: str) -> Node:
        """Return the node with this id. Raises `UnknownNode`."""
        return self._nodes[self._position(node_id)]

    def add_node(
        self,
        id: str,
        func: NodeFunction | str,
        *,
        deps: Names = (),
        reads: Names | Mapping[str, str] = (),
        writes: Names = (),
        node_type: NodeType = NodeType.COMPUTE,
        node_role: NodeRole = NodeRole.DEFAULT,
        resources: Names | Mapping[str, int] = (),
        stream: bool = False,
        retries: int = 0,
        retry_on: tuple[type[Exception], ...] = (Exception,),
        config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Add a node; `Node.declare` describes the arguments."""
        self._nodes.append(
            Node.declare(
                id,
                func,
                deps=deps,
                reads=reads,
                writes=writes,
                node_type=node_type,
                node_role=node_role,
                resources=resources,
                stream=stream,
                retries=retries,
                retry_on=retry_on,
                config=config,
            )
        )
        return self

    def replace_node(
        self,
        node_id: str,
        func: NodeFunction | str | None = None,
        *,
        deps: Names | None = None,
        reads: Names | Mapping[str, str] | None = None,
        writes: Names | None = None,
        resources: Names | Mapping[str, int] | None = None,
        stream: bool | None = None,
        retries: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Change a node in place.

        Omitted arguments stay as they were, but a new `func` drops the old one's `config`.
        """
        old = self.node(node_id)
        kept_config = old.config if func is None else {}
        self._nodes[self._position(node_id)] = replace(
            old,
            func=old.func if func is None else func,
            deps=old.deps if deps is None else as_names(deps),
            reads=old.reads if reads is None else as_reads(reads),
            writes=old.writes if writes is None else as_names(writes),
            resources=old.resources if resources is None else as_units(resources),
            stream=old.stream if stream is None else stream,
            retries=old.retries if retries is None else retries,
            config=kept_config if config is None else dict(config),
        )
        return self

    def insert_after(
        self, anchor: str, node: Node, *, reroute: Mapping[str, str] | None = None
    ) -> Self:
        """Put `node` between `anchor` and all nodes that waited for `anchor`.

        `reroute={"groups": "kept"}`: nodes that read `groups` then read `kept`, in the same
        parameter.
        """
        position = self._position(anchor)
        self._require_new(node)
        moved = reroute or {}
        produced = set(self._nodes[position].writes)
        for number, other in enumerate(self._nodes):
            if anchor in other.deps or produced & set(other.reads.values()):
                other = replace(other, deps=_with(other.deps, node.id))
            self._nodes[number] = _rerouted(other, moved)
        self._nodes.insert(position + 1, replace(node, deps=_with(node.deps, anchor)))
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
        writers = self._writers_before(position)
        self._nodes[position] = _rerouted(
            replace(old, deps=_with(old.deps, node.id)), reroute or {}
        )
        self._nodes.insert(position, replace(node, deps=_with(node.deps, *old.deps, *writers)))
        return self

    def remove_node(self, node_id: str, *, reroute: Mapping[str, str] | None = None) -> Self:
        """Remove a node.

        Nodes that waited for it wait for its dependencies; `reroute` replaces the names that they
        read.
        """
        position = self._position(node_id)
        before = (*self._nodes[position].deps, *self._writers_before(position))
        gone = self._nodes.pop(position)
        for number, other in enumerate(self._nodes):
            if node_id in other.deps or set(gone.writes) & set(other.reads.values()):
                others = tuple(dep for dep in other.deps if dep != node_id)
                other = replace(other, deps=_with(others, *before))
            self._nodes[number] = _rerouted(other, reroute or {})
        return self

    def copy(self) -> "Pipeline":
        """Return another builder with the same nodes, independent of this one."""
        other = Pipeline(self.id, self.description, inputs=self.inputs)
        other._nodes = list(self._nodes)
        return other

    def build(self) -> "TaskGraph":
        """Check everything and return the graph to run.

        Raises the `GraphError` of the first mistake.
        """
        from vla_rl.graph.validation import build_graph

        return build_graph(self)

    def _writers_before(self, position: int) -> list[str]:
        """Return the ids of the nodes whose values the node at `position` waits for."""
        wanted = set(self._nodes[position].reads.values())
        return [other.id for other in self._nodes if wanted & set(other.writes)]

    def _position(self, node_id: str) -> int:
        for position, node in enumerate(self._nodes):
            if node.id == node_id:
                return position
        raise UnknownNode(
            f"pipeline {self.id!r} has no node "
            f"{node_id!r}{nearest(node_id, [node.id for node in self._nodes])}"
        )

    def _require_new(self, node: Node) -> None:
        if any(other.id == node.id for other in self._nodes):
            raise DuplicateNode(
                f"pipeline {self.id!r} already has a node {node.id!r}; choose another id, or use "
                "replace_node"
            )


def _with(deps: tuple[str, ...], *more: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*deps, *more)))


def _rerouted(node: Node, moved: Mapping[str, str]) -> Node:
    if not moved.keys() & set(node.reads.values()):
        return node
    return replace(
        node, reads={parameter: moved.get(name, name) for parameter, name in node.reads.items()}
    )
