"""Errors of a graph, one class for each mistake; all are `GraphError`, so one `except` catches
them.

Everything above `NodeFailed` is raised before anything runs.
"""

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vla_rl.errors import GraphError

if TYPE_CHECKING:
    from vla_rl.graph.update import Update


class InvalidNode(GraphError):
    """A node's own declaration is invalid: an empty id, a negative retry count, a name that is not
    an identifier.
    """


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
    """A streaming node that cannot stream: no stream to read, two of them, or one that would wait
    for itself.
    """


class InvalidPipelineFile(GraphError):
    """A TOML file that does not describe a pipeline: an unknown key, a wrong type, no node."""


class UnknownResource(GraphError):
    """A node needs a resource that the executor does not have, or more units than it has."""


class InvalidRun(GraphError):
    """An executor or a run got impossible arguments: inputs that do not match, no room for an
    update.
    """


class NodeFailed(GraphError):
    """A node failed in one update. Its dependents were cancelled; the nodes that do not depend on
    it finished.

    Args:
        node: id of the node.
        update: index of the update in which it failed.
        message: description of the failure.

    `__cause__` is the exception that the node's function raised. `report` is the unfinished update:
    statuses, spans, and the values of the nodes that finished. Other nodes that failed in the same
    update are in `__notes__`.
    """

    def __init__(self, node: str, update: int, message: str) -> None:
        self.node, self.update = node, update
        self.report: Update | None = None
        super().__init__(message)


class WrongOutput(NodeFailed):
    """A node returned something other than it declared in `writes`. Never retried."""


class WrongInput(GraphError):
    """A node's function cannot use a value that it read. The node that wrote the value is reported
    as the failed one.

    Args:
        parameter: the function's parameter with the value.
        problem: what the value is, and what was expected.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        self.parameter, self.problem = parameter, problem
        super().__init__(f"{parameter}: {problem}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` if a known name is close to `name`, else up to 12 known names,
    else an empty string.
    """
    candidates = list(known)
    if close := difflib.get_close_matches(name, candidates, n=1):
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(map(repr, candidates))}" if 0 < len(candidates) <= 12 else ""
