"""Mistakes in a graph, one class for each; all are raised before anything runs.

All are `GraphError`, so one `except` catches them. Failures of a running node are in `failures`.
"""

import difflib
from collections.abc import Iterable

from vla_rl.errors import GraphError


class InvalidNode(GraphError):
    """Invalid declaration of a node, such as an empty id or a name that is not an identifier."""


class DuplicateNode(GraphError):
    """Two nodes with the same id."""


class UnknownNode(GraphError):
    """A query about, or an edit of, a node that the graph does not have."""


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


class NotAsync(GraphError):
    """A node's function is neither a coroutine function nor an async generator function."""


class SignatureMismatch(GraphError):
    """A function's parameters do not match the values it reads and the config it is given."""


class InvalidStream(GraphError):
    """A node that cannot stream: it reads no stream, or two, or would wait for itself."""


class InvalidPipelineFile(GraphError):
    """A TOML file that does not describe a pipeline: an unknown key, a wrong type, no node."""


class UnknownResource(GraphError):
    """A node needs a resource that the executor does not have, or more units than it has."""


class InvalidRun(GraphError):
    """Impossible arguments of an executor or a run, such as inputs that do not match."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if a known name is close to `name`, else up to 12 known names.

    Empty if there are more, or none.
    """
    candidates = list(known)
    if close := difflib.get_close_matches(name, candidates, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(map(repr, candidates))}" if 0 < len(candidates) <= 12 else ""
