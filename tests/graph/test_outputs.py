"""The return value of a node is checked against the names that it declared to write."""

from typing import Any

import pytest

from vla_rl.graph import NodeOutput
from vla_rl.graph.node import DROP
from vla_rl.graph.node_run import unpack_call, unpack_item
from vla_rl.graph.update import WrongOutput


@pytest.mark.parametrize(
    ("writes", "result", "values", "metrics"),
    [
        ((), None, {}, {}),
        (("a",), 3, {"a": 3}, {}),
        (("a",), {"b": 1}, {"a": {"b": 1}}, {}),  # one name: the whole value is its value
        (("a", "b"), {"b": 2, "a": 1}, {"a": 1, "b": 2}, {}),
        (("a",), NodeOutput(batch=3, metrics={"m": 1.0}), {"a": 3}, {"m": 1.0}),
        (("a",), NodeOutput(values={"a": None}), {"a": None}, {}),
        ((), NodeOutput(metrics={"m": 2.0}), {}, {"m": 2.0}),
    ],
)
def test_values_are_given_by_name(
    writes: tuple[str, ...], result: Any, values: dict[str, Any], metrics: dict[str, float]
) -> None:
    assert unpack_call("n", 0, writes, result) == (values, metrics)


@pytest.mark.parametrize(
    ("writes", "result", "said"),
    [
        (("a",), None, r"returned None; it writes \['a'\]: expected a value \(is a `return` miss"),
        (("a",), DROP, "returned DROP.*only a node with stream=True can leave an item out"),
        ((), 3, "returned int '3'.*expected None, or a name in writes"),
        (("a", "b"), [1, 2], "returned list.*expected a dict or NodeOutput"),
        (("a", "b"), {"a": 1, "bb": 2}, "missing 'b', undeclared 'bb'; did you mean 'b'"),
        (("a",), NodeOutput(metrics={"m": 1.0}), "returned a NodeOutput without batch"),
        (("a",), NodeOutput(batch=1, values={"a": 1}), "a NodeOutput with both batch and values"),
    ],
)
def test_another_value_is_refused_with_what_was_expected(
    writes: tuple[str, ...], result: Any, said: str
) -> None:
    with pytest.raises(WrongOutput, match=f"node 'n' in update 4 .*{said}"):
        unpack_call("n", 4, writes, result)


def test_a_node_of_a_stream_may_leave_an_item_out_and_may_not_forget_it() -> None:
    assert unpack_item("n", 0, ("a",), DROP) == (DROP, {})
    assert unpack_item("n", 0, ("a",), 3) == (3, {})
    assert unpack_item("n", 0, (), None) == (DROP, {})
    with pytest.raises(WrongOutput, match="`return DROP` leaves an item out"):
        unpack_item("n", 0, ("a",), None)
