"""Check a node's return value against the names it declared to write."""

from collections.abc import Mapping
from typing import Any

from vla_rl.graph.errors import nearest
from vla_rl.graph.failures import WrongOutput
from vla_rl.graph.node import DROP, NOTHING, NodeOutput

_NO_METRICS: Mapping[str, float] = {}


def unpack_call(
    node: str, update: int, writes: tuple[str, ...], result: object
) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """Return the values by name and the metrics of a node that was called once.

    Raises `WrongOutput`.
    """
    metrics = _NO_METRICS
    if isinstance(result, NodeOutput):
        metrics = result.metrics
        if result.values is not None:
            if result.batch is not NOTHING:
                raise _wrong(
                    node,
                    update,
                    writes,
                    "a NodeOutput with both batch and values",
                    "one of the two",
                )
            return _named(node, update, writes, result.values), metrics
        result = None if result.batch is NOTHING else result.batch
        if result is None and len(writes) == 1 and metrics is not _NO_METRICS:
            raise _wrong(
                node,
                update,
                writes,
                "a NodeOutput without batch",
                "NodeOutput(batch=..., metrics=...)",
            )
    if result is DROP:
        raise _wrong(
            node,
            update,
            writes,
            "DROP",
            "a value; only a node with stream=True can leave an item out",
        )
    if len(writes) == 1:
        if result is None:
            raise _wrong(
                node, update, writes, "None",
                "a value (is a `return` missing?); NodeOutput(values={name: None}) writes a None on purpose",
            )  # fmt: skip
        return {writes[0]: result}, metrics
    if not writes:
        if result is not None:
            raise _wrong(node, update, writes, _kind(result), "None, or a name in writes")
        return {}, metrics
    if not isinstance(result, Mapping):
        raise _wrong(
            node,
            update,
            writes,
            _kind(result),
            "a dict or NodeOutput(values=...) with exactly these keys",
        )
    return _named(node, update, writes, result), metrics


def unpack_item(
    node: str, update: int, writes: tuple[str, ...], result: object
) -> tuple[Any, Mapping[str, float]]:
    """Return an item of a stream, or `DROP`, and its metrics.

    Always `DROP` for a node that writes nothing.
    """
    if result is DROP:
        return DROP, _NO_METRICS
    if result is None and writes:
        raise _wrong(node, update, writes, "None", "an item; `return DROP` leaves an item out")
    values, metrics = unpack_call(node, update, writes, result)
    return (values[writes[0]] if writes else DROP), metrics


def _named(
    node: str, update: int, writes: tuple[str, ...], values: Mapping[str, Any]
) -> Mapping[str, Any]:
    if values.keys() == set(writes):
        return values
    missing = [name for name in writes if name not in values]
    undeclared = [name for name in values if name not in writes]
    problems = [f"missing {name!r}" for name in missing]
    problems += [f"undeclared {name!r}{nearest(str(name), missing)}" for name in undeclared]
    raise _wrong(
        node, update, writes, f"the keys {list(values)}", f"exactly these: {', '.join(problems)}"
    )


def _wrong(node: str, update: int, writes: tuple[str, ...], got: str, expected: str) -> WrongOutput:
    return WrongOutput(
        node,
        update,
        f"node {node!r} in update {update} returned {got}; it writes {list(writes)}: expected "
        f"{expected}",
    )


def _kind(value: object) -> str:
    return "None" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
