"""Failures of a node while it runs, with the unfinished update as their report."""

from vla_rl.errors import GraphError
from vla_rl.graph.update import Update


class NodeFailed(GraphError):
    """Failure of a node in one update.

    Its dependents were cancelled; the nodes that do not depend on it finished.

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
    """A value that a node read and cannot use.

    The node that wrote the value is reported as the failed one.

    Args:
        parameter: the function's parameter with the value.
        problem: what the value is, and what was expected.
    """

    def __init__(self, parameter: str, problem: str) -> None:
        self.parameter, self.problem = parameter, problem
        super().__init__(f"{parameter}: {problem}")
