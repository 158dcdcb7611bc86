"""The node of the graph in which a coroutine runs, known also in the tasks that it starts."""

from contextvars import ContextVar
from typing import Final

CURRENT_NODE: Final[ContextVar[str | None]] = ContextVar("current_node", default=None)
"""Name and update of the node, such as `update[3]`; None outside of the graph."""
