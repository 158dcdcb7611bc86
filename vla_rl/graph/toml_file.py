"""Pipelines from TOML: the same names as in `Pipeline.add_node`, functions by path."""

import os
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from vla_rl.graph.errors import InvalidPipelineFile, nearest
from vla_rl.graph.node import NodeRole, NodeType
from vla_rl.graph.paths import resolve
from vla_rl.graph.pipeline import Pipeline

S = TypeVar("S", bound=msgspec.Struct)


class NodeTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[node]]` table; the keys are the arguments of `Node.declare`."""

    id: str
    func: str
    deps: str | tuple[str, ...] = ()
    reads: str | tuple[str, ...] | dict[str, str] = ()
    writes: str | tuple[str, ...] = ()
    node_type: str = "compute"
    node_role: str = "default"
    resources: str | tuple[str, ...] | dict[str, int] = ()
    stream: bool = False
    retries: int = 0
    retry_on: tuple[str, ...] = ("builtins:Exception",)
    config: dict[str, Any] = {}


class PipelineFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    id: str
    description: str = ""
    inputs: str | tuple[str, ...] = ()
    node: list[dict[str, Any]]


def read_pipeline(path: str | os.PathLike[str]) -> Pipeline:
    """Read a pipeline; nothing is built yet, and only the exceptions of `retry_on` are imported.

    Raises: `InvalidPipelineFile` naming the file, the table and the key; `OSError` if the file
    cannot be read.
    """
    where = os.fspath(path)
    with open(path, "rb") as file:
        try:
            document = tomllib.load(file)
        except (ValueError, RecursionError) as error:  # not TOML, or bytes that are not text
            raise InvalidPipelineFile(f"{where} is not TOML in UTF-8: {error}") from error
    whole = _checked(document, PipelineFile, where)
    pipeline = Pipeline(whole.id, whole.description, inputs=whole.inputs)
    for number, raw in enumerate(whole.node, start=1):
        context = f"{where}, node {raw.get('id', number)!r}"
        table = _checked(raw, NodeTable, context)
        pipeline.add_node(
            table.id,
            table.func,
            deps=table.deps,
            reads=table.reads,
            writes=table.writes,
            node_type=NodeType(
                _choice(table.node_type, [kind.value for kind in NodeType], f"{context}: node_type")
            ),
            node_role=NodeRole(
                _choice(table.node_role, [role.value for role in NodeRole], f"{context}: node_role")
            ),
            resources=table.resources,
            stream=table.stream,
            retries=table.retries,
            retry_on=tuple(resolve(name, f"{context}: retry_on") for name in table.retry_on),
            config=table.config,
        )
    return pipeline


def _checked(raw: Mapping[str, Any], kind: type[S], context: str) -> S:
    for key in raw:
        if key not in kind.__struct_fields__:
            raise InvalidPipelineFile(
                f"{context}: unknown key {key!r}{nearest(key, kind.__struct_fields__)}"
            )
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise InvalidPipelineFile(f"{context}: {error}") from error


def _choice(text: str, choices: Iterable[str], context: str) -> str:
    """Return `text` in lower case, so that siiRL's `ENV_INTERACT` is accepted too."""
    if text.lower() not in choices:
        raise InvalidPipelineFile(f"{context} is {text!r}{nearest(text.lower(), choices)}")
    return text.lower()
