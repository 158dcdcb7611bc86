"""A node: an async function, the names it reads and writes, the resources it needs.

A node's function receives values by name and returns values; it never sees the graph, the executor
or a whole config. It is checked to be async and to have exactly the parameters that its node fills.
"""

import enum
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self, TypeAlias, TypedDict, Unpack, final

from vla_rl.errors import GraphError
from vla_rl.util.imports import suggest


class InvalidNode(GraphError):
    """Invalid declaration of a node, such as an empty id or a name that is not an identifier."""


class NotAsync(GraphError):
    """A node's function is neither a coroutine function nor an async generator function."""


class SignatureMismatch(GraphError):
    """A function's parameters do not match the values it reads and the config it is given."""


class NodeType(enum.Enum):
    """Kind of work of a node; shown in drawings and queried with `TaskGraph.nodes_by_type`."""

    COMPUTE = "compute"
    DATA_LOAD = "data_load"
    ENV_INTERACT = "env_interact"
    MODEL_INFERENCE = "model_inference"
    MODEL_TRAIN = "model_train"
    PUT_TO_BUFFER = "put_to_buffer"
    GET_FROM_BUFFER = "get_from_buffer"
    BARRIER_SYNC = "barrier_sync"
    CUSTOM = "custom"


class NodeRole(enum.Enum):
    """Role of a node in the algorithm.

    Shown in drawings and queried with `TaskGraph.nodes_by_role`.
    """

    DEFAULT = "default"
    ACTOR = "actor"
    ADVANTAGE = "advantage"
    CRITIC = "critic"
    ROLLOUT = "rollout"
    REFERENCE = "reference"
    REWARD = "reward"
    DYNAMIC_SAMPLING = "dynamic_sampling"


class NodeStatus(enum.Enum):
    """State of a node in one update."""

    PENDING = "pending"
    """It waits for its dependencies."""

    READY = "ready"
    """All dependencies are ready; it waits for a resource or for the first item of its stream."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"

    SKIPPED = "skipped"
    """It never ran, or was cancelled, because a dependency failed or because the run ended."""


@final
class _DropType(enum.Enum):
    DROP = "drop"

    def __repr__(self) -> str:
        return "DROP"


DROP = _DropType.DROP
"""Returned by a streaming node to leave an item out. It is counted in `Span.num_dropped`."""


@final
class _NothingType(enum.Enum):
    NOTHING = "nothing"


NOTHING = _NothingType.NOTHING


@dataclass(frozen=True, slots=True)
class NodeOutput:
    """Return value of a node that also reports metrics or several values.

    Args:
        batch: the value of the one name that the node writes.
        values: the values of all names that it writes, if there are several.
        metrics: numbers about this node's work, merged into `Update.metrics`; for a stream, the
            mean over its items.

    Example:
        NodeOutput(batch=kept, metrics={"filter/kept": 0.75})
        NodeOutput(values={"rewards": rewards, "successes": successes})
    """

    batch: Any = NOTHING
    values: Mapping[str, Any] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)


NodeFunction: TypeAlias = Callable[..., Awaitable[Any]] | Callable[..., AsyncIterator[Any]]
"""A coroutine function, or an async generator function whose items are a stream."""

Names: TypeAlias = str | Sequence[str]
"""One name, or several."""


class NodeFields(TypedDict, total=False):
    """Fields of a node beside its id and function, in the forms that declarations accept.

    `Pipeline.add_node`, `Pipeline.replace_node`, `Node.declare` and pipeline files take them.
    """

    deps: Names
    """Nodes that must have finished first. The writers of the values that the node reads need not
    be named."""

    reads: Names | Mapping[str, str]
    """Values passed to the function as keyword arguments; `{parameter: value}` if the names
    differ."""

    writes: Names
    """Values that the node writes. One: the return value. Several: the keys of the dict, or
    `NodeOutput`, that it returns."""

    node_type: NodeType
    """Kind of work, for drawings and queries; it does not change how the node runs."""

    node_role: NodeRole
    """Role in the algorithm, for drawings and queries too."""

    resources: Names | Mapping[str, int]
    """Held while the function runs, one unit of each; `{name: units}` for more. A stream holds them
    while it makes an item, not while it waits."""

    stream: bool
    """Call the function once for each item of the one streamed value it reads, as it arrives and in
    that order. The return value is an item of the value it writes; `DROP` leaves the item out.
    Without `stream`, a streamed value arrives as the list of all its items, once it is complete."""

    retries: int
    """Number of times that a call which raised one of `retry_on` is repeated at once. An async
    generator is only restarted if it has not yielded an item."""

    retry_on: tuple[type[Exception], ...]
    """Exceptions after which a call is repeated."""

    config: Mapping[str, Any]
    """Values of the function's remaining parameters."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One step of a pipeline; `Node.declare` accepts the short forms of `NodeFields`.

    Example:
        Node.declare("filter", keep_informative, reads="groups", writes="kept", stream=True)
    """

    id: str
    """Unique in its pipeline."""

    func: NodeFunction | str
    """A coroutine function, an async generator function (its items are a stream), or
    `"module:name"`."""

    deps: tuple[str, ...] = ()
    reads: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    node_type: NodeType = NodeType.COMPUTE
    node_role: NodeRole = NodeRole.DEFAULT
    resources: Mapping[str, int] = field(default_factory=dict)
    stream: bool = False
    retries: int = 0
    retry_on: tuple[type[Exception], ...] = (Exception,)
    config: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def declare(cls, id: str, func: NodeFunction | str, **fields: Unpack[NodeFields]) -> Self:
        """Declare a node. Raises: InvalidNode."""
        return cls(id=id, func=func, **_to_long_forms(fields))

    def change(self, func: NodeFunction | str | None, **fields: Unpack[NodeFields]) -> Self:
        """Return the node with other fields. A new function drops the old one's `config`."""
        # The old function's configuration would be refused by the signature of nearly every other
        # one.
        replaced: dict[str, Any] = {} if func is None else {"func": func, "config": {}}
        return replace(self, **{**replaced, **_to_long_forms(fields)})

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not self.id:
            raise InvalidNode(f"a node's id is {self.id!r}, expected a non-empty string")
        for kind, names in (
            ("reads", (*self.reads, *self.reads.values())),
            ("writes", self.writes),
        ):
            for name in names:
                if not isinstance(name, str) or not name.isidentifier():
                    raise InvalidNode(
                        f"node {self.id!r}: {kind} names {name!r}, expected a Python identifier"
                    )
        if type(self.retries) is not int or self.retries < 0:
            raise InvalidNode(
                f"node {self.id!r}: retries is {self.retries!r}, expected a whole number >= 0"
            )
        for error in self.retry_on:
            if not (isinstance(error, type) and issubclass(error, Exception)):
                raise InvalidNode(
                    f"node {self.id!r}: retry_on names {error!r}, expected subclasses of "
                    "Exception; a cancellation is never retried"
                )
        for name, units in self.resources.items():
            if type(units) is not int or units < 1:
                raise InvalidNode(
                    f"node {self.id!r}: needs {units!r} of {name!r}, expected a whole number >= 1"
                )


@dataclass(frozen=True, slots=True)
class Edge:
    """`target` waits for `source`: for its end, or, along a stream, for each of its items.

    Example:
        Edge("rollout", "filter", "groups", streamed=True)
        Edge("save", "publish", None)
    """

    source: str
    target: str

    value: str | None
    """Name of the value that is passed along it; None if only the order matters."""

    streamed: bool = False


def as_names(names: Names) -> tuple[str, ...]:
    """Return a tuple of names, from one name or several."""
    return (names,) if isinstance(names, str) else tuple(names)


def _as_reads(reads: Names | Mapping[str, str]) -> dict[str, str]:
    """Return value names by parameter; a bare name is both."""
    return dict(reads) if isinstance(reads, Mapping) else {name: name for name in as_names(reads)}


def _as_units(resources: Names | Mapping[str, int]) -> dict[str, int]:
    """Return units by resource; a bare name needs one unit."""
    return (
        dict(resources) if isinstance(resources, Mapping) else dict.fromkeys(as_names(resources), 1)
    )


_LONG_FORMS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "deps": as_names,
    "reads": _as_reads,
    "writes": as_names,
    "resources": _as_units,
    "retry_on": tuple,
    "config": dict,
}


def _to_long_forms(fields: NodeFields) -> dict[str, Any]:
    """Return the given fields in the long forms that `Node` stores; None counts as not given."""
    return {
        name: _LONG_FORMS[name](value) if name in _LONG_FORMS else value
        for name, value in fields.items()
        if value is not None
    }


class FunctionKind(enum.Enum):
    """Ways to run a node's function."""

    CALL = "call"
    """A coroutine function, called once."""

    SOURCE = "source"
    """An async generator function: its items are a stream."""

    PER_ITEM = "per item"
    """A coroutine function, called for each item of a stream."""


def get_function_kind(node: Node, func: Any) -> FunctionKind:
    """Return how the function is run. Raises `NotAsync` for anything that is not async."""
    # A class with an async __call__ would pass the check below, and calling it makes an instance.
    if inspect.isclass(func):
        raise NotAsync(
            f"node {node.id!r}: {func.__qualname__} is a class, expected `async def`, or an "
            "instance with an async __call__"
        )
    for candidate in (func, getattr(func, "__call__", None)):  # noqa: B004 - an object with an async __call__ will do
        if inspect.isasyncgenfunction(candidate):
            return FunctionKind.SOURCE
        if inspect.iscoroutinefunction(candidate):
            return FunctionKind.PER_ITEM if node.stream else FunctionKind.CALL
    what = f"the function {func.__qualname__}" if hasattr(func, "__qualname__") else f"{func!r}"
    raise NotAsync(
        f"node {node.id!r}: {what} is not async, expected `async def`; for work that blocks, write "
        "one that awaits `asyncio.to_thread(...)`"
    )


def check_signature(node: Node, func: Any) -> None:
    """Raise `SignatureMismatch` unless reads and config fill all parameters of `func`."""
    parameters = inspect.signature(func).parameters
    signature = (
        f"node {node.id!r}: {getattr(func, '__qualname__', repr(func))}{inspect.signature(func)}"
    )
    for parameter in parameters.values():
        if parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise SignatureMismatch(
                f"{signature} takes {str(parameter)!r}; a node's values are passed by keyword, "
                "one named parameter each"
            )
    if both := node.reads.keys() & node.config.keys():
        raise SignatureMismatch(
            f"node {node.id!r}: {_list_names(both)} is filled both by reads and by config; keep one"
        )
    _check_filled(signature, "reads", node.reads, parameters)
    _check_filled(signature, "config", node.config, parameters)
    required = {
        name for name, parameter in parameters.items() if parameter.default is parameter.empty
    }
    if missing := required - node.reads.keys() - node.config.keys():
        raise SignatureMismatch(
            f"{signature} needs {_list_names(missing)}, which the node does not fill; add it to reads "
            "or to config"
        )


def _check_filled(
    signature: str, where: str, given: Mapping[str, Any], parameters: Mapping[str, Any]
) -> None:
    for name in given:
        if name not in parameters:
            raise SignatureMismatch(
                f"{signature} has no parameter {name!r}, which {where} "
                f"fills{suggest(name, parameters)}"
                + (
                    "; if the value has another name, write reads={'parameter': 'value'}"
                    if where == "reads"
                    else ""
                )
            )


def _list_names(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
