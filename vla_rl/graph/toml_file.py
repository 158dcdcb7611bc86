"""Pipelines from TOML: the same names as in `Pipeline.add_node`, functions by path."""

import os
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, Required, TypedDict, TypeVar, get_type_hints

import msgspec

from vla_rl.graph.errors import InvalidPipelineFile, nearest
from vla_rl.graph.node import Names, Node, NodeFields, NodeRole, NodeType
from vla_rl.graph.paths import resolve

T = TypeVar("T")


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
            document = tomllib.load(file)
        except (ValueError, RecursionError) as error:  # not TOML, or bytes that are not text
            raise InvalidPipelineFile(f"{where} is not TOML in UTF-8: {error}") from error
    whole = _checked(document, PipelineTable, where)
    return whole, [_node(number, raw, where) for number, raw in enumerate(whole["node"], start=1)]


def _node(number: int, raw: Mapping[str, Any], where: str) -> Node:
    context = f"{where}, node {raw.get('id', number)!r}"
    named = dict(raw)
    for key, kinds in (("node_type", NodeType), ("node_role", NodeRole)):
        if isinstance(raw.get(key), str):
            values = [kind.value for kind in kinds]
            named[key] = kinds(_choice(raw[key], values, f"{context}: {key}"))
    if isinstance(raw.get("retry_on"), list):
        named["retry_on"] = [
            resolve(path, f"{context}: retry_on") if isinstance(path, str) else path
            for path in raw["retry_on"]
        ]
    table = _checked(named, NodeTable, context)
    return Node.declare(**table)


def _checked(raw: Mapping[str, Any], kind: type[T], context: str) -> T:
    known = get_type_hints(kind)
    for key in raw:
        if key not in known:
            raise InvalidPipelineFile(f"{context}: unknown key {key!r}{nearest(key, known)}")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise InvalidPipelineFile(f"{context}: {error}") from error


def _choice(text: str, choices: Iterable[str], context: str) -> str:
    """Return `text` in lower case, so that siiRL's `ENV_INTERACT` is accepted too."""
    if text.lower() not in choices:
        raise InvalidPipelineFile(f"{context} is {text!r}{nearest(text.lower(), choices)}")
    return text.lower()
