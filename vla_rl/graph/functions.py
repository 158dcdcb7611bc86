"""Checks that a function is async and has exactly the parameters that its node fills."""

import enum
import inspect
from collections.abc import Mapping
from typing import Any

from vla_rl.graph.errors import NotAsync, SignatureMismatch, nearest
from vla_rl.graph.node import Node


class FunctionKind(enum.Enum):
    """Ways to run a node's function."""

    CALL = "call"
    """A coroutine function, called once."""

    SOURCE = "source"
    """An async generator function: its items are a stream."""

    PER_ITEM = "per item"
    """A coroutine function, called for each item of a stream."""


def kind_of(node: Node, func: Any) -> FunctionKind:
    """Return how the function is run. Raises `NotAsync` for anything that is not async."""
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
            f"node {node.id!r}: {_listed(both)} is filled both by reads and by config; keep one"
        )
    _check_filled(signature, "reads", node.reads, parameters)
    _check_filled(signature, "config", node.config, parameters)
    required = {
        name for name, parameter in parameters.items() if parameter.default is parameter.empty
    }
    if missing := required - node.reads.keys() - node.config.keys():
        raise SignatureMismatch(
            f"{signature} needs {_listed(missing)}, which the node does not fill; add it to reads "
            "or to config"
        )


def _check_filled(
    signature: str, where: str, given: Mapping[str, Any], parameters: Mapping[str, Any]
) -> None:
    for name in given:
        if name not in parameters:
            raise SignatureMismatch(
                f"{signature} has no parameter {name!r}, which {where} "
                f"fills{nearest(name, parameters)}"
                + (
                    "; if the value has another name, write reads={'parameter': 'value'}"
                    if where == "reads"
                    else ""
                )
            )


def _listed(names: set[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))
