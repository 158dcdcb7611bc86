"""Which functions fit a node, by name or by path, which fields a node has, and what its function may
return.
"""

import asyncio
import dataclasses
import functools
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from vla_rl.graph import (
    GraphError,
    InvalidNode,
    Node,
    NodeFields,
    NodeOutput,
    NodeRole,
    NodeType,
    NotAsync,
    Pipeline,
    SignatureMismatch,
    UnknownFunction,
)
from vla_rl.graph.node import DROP
from vla_rl.graph.node_run import unpack_call, unpack_item
from vla_rl.graph.update import WrongOutput


async def double(value: int) -> int:
    return 2 * value


async def add(left: int, right: int, offset: int = 0) -> int:
    return left + right + offset


def refused(pipeline: Pipeline, error: type[GraphError], *words: str) -> None:
    """Building raises exactly `error`, and its message has all the words."""
    with pytest.raises(error) as caught:
        pipeline.build()
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


async def with_kwargs(**values: int) -> None: ...


async def with_args(*values: int) -> None: ...


async def positional(value: int, /) -> None: ...


def test_a_plain_function_is_refused() -> None:
    def plain() -> int:
        return 1

    refused(
        Pipeline("p").add_node("a", plain, writes="x"),
        NotAsync,
        "node 'a'",
        "plain is not async",
        "to_thread",
    )


def test_methods_partials_and_objects_with_an_async_call_are_functions_too() -> None:
    class Scorer:
        async def score(self, value: int) -> int:
            return value

        async def __call__(self, value: int) -> int:
            return value

    pipeline = Pipeline("p", inputs="value")
    for name, func in (
        ("m", Scorer().score),
        ("o", Scorer()),
        ("p", functools.partial(add, right=1, left=2)),
    ):
        reads = () if name == "p" else "value"
        pipeline.add_node(name, func, reads=reads, writes=name)
    assert len(pipeline.build().nodes) == 3


def test_a_class_with_an_async_call_is_refused_because_calling_it_gives_an_instance() -> None:
    class Scorer:
        async def __call__(self) -> int:
            return 1

    refused(
        Pipeline("p").add_node("a", Scorer, writes="x"),
        NotAsync,
        "node 'a'",
        "is a class",
        "an instance",
    )


@pytest.mark.parametrize(
    ("func", "reads", "config", "words"),
    [
        (double, (), {}, ("needs 'value'", "add it to reads or to config")),
        (
            double,
            ("values",),
            {},
            ("no parameter 'values'", "did you mean 'value'?", "reads={'parameter': 'value'}"),
        ),
        (double, ("value",), {"ofset": 1}, ("no parameter 'ofset'",)),
        (add, ("value",), {"left": 1, "ofset": 1}, ("no parameter 'value'",)),
        (
            add,
            (),
            {"left": 1, "right": 2, "ofset": 1},
            ("no parameter 'ofset'", "did you mean 'offset'?"),
        ),
        (double, ("value",), {"value": 1}, ("both by reads and by config",)),
        (with_kwargs, ("value",), {}, ("'**values: int'", "by keyword")),
        (with_args, ("value",), {}, ("'*values: int'", "by keyword")),
        (positional, ("value",), {}, ("by keyword",)),
    ],
)
def test_a_function_whose_parameters_do_not_match_is_refused(
    func: Any, reads: tuple[str, ...], config: dict[str, int], words: tuple[str, ...]
) -> None:
    pipeline = Pipeline("p", inputs=("value", "values")).add_node(
        "a", func, reads=reads, config=config
    )
    refused(pipeline, SignatureMismatch, "node 'a'", *words)


def test_a_value_may_have_another_name_than_the_parameter_it_fills() -> None:
    graph = (
        Pipeline("p", inputs="reward")
        .add_node("a", double, reads={"value": "reward"}, writes="x")
        .build()
    )
    assert graph.nodes["a"].reads == {"value": "reward"}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("asyncio:slep", ("'asyncio' has no function 'slep'", "did you mean 'sleep'?")),
        ("asyncio.taks:sleep", ("'asyncio.taks' cannot be found", "did you mean 'asyncio.tasks'?")),
        ("asynci:sleep", ("'asynci' cannot be found", "did you mean 'asyncio'?")),
        ("asyncio.sleep", ("expected 'module:name', such as 'asyncio:sleep'",)),
        ("asyncio:", ("expected 'module:name'",)),
        ("asyncio:Queue.gett", ("has no function 'Queue.gett'", "did you mean 'get'?")),
    ],
)
def test_an_unknown_function_path_is_refused(path: str, words: tuple[str, ...]) -> None:
    refused(Pipeline("p").add_node("a", path), UnknownFunction, "node 'a'", *words)


def test_an_error_inside_the_functions_own_module_is_not_hidden(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        Pipeline("p").add_node("a", "needs_more:f").build()


def test_a_function_by_path_is_resolved() -> None:
    graph = Pipeline("p").add_node("nap", "asyncio:sleep", config={"delay": 0}).build()
    assert graph.nodes["nap"].func is asyncio.sleep


SHORT: NodeFields = {
    "deps": "before",
    "reads": "groups",
    "writes": "rewards",
    "node_type": NodeType.CUSTOM,
    "node_role": NodeRole.REWARD,
    "resources": "device",
    "stream": True,
    "retries": 2,
    "retry_on": (OSError,),
    "config": {"bonus": 1},
}
LONG = {
    **SHORT,
    "deps": ("before",),
    "reads": {"groups": "groups"},
    "writes": ("rewards",),
    "resources": {"device": 1},
}
FILE = """
id = "p"
[[node]]
id = "reward"
func = "my:reward"
deps = "before"
reads = "groups"
writes = "rewards"
node_type = "custom"
node_role = "reward"
resources = "device"
stream = true
retries = 2
retry_on = ["builtins:OSError"]
config = { bonus = 1 }
"""


async def nothing() -> None:
    pass


def test_the_fields_that_declarations_take_are_those_that_a_node_stores() -> None:
    stored = {field.name for field in dataclasses.fields(Node)}
    assert set(get_type_hints(NodeFields)) == stored - {"id", "func"} == set(SHORT)


def test_every_way_to_declare_a_node_takes_every_field(tmp_path: Path) -> None:
    expected = Node(id="reward", func="my:reward", **LONG)  # type: ignore[arg-type]
    assert Node.declare("reward", "my:reward", **SHORT) == expected
    assert Pipeline("p").add_node("reward", "my:reward", **SHORT).nodes == (expected,)
    changed = Pipeline("p").add_node("reward", nothing).replace_node("reward", "my:reward", **SHORT)
    assert changed.nodes == (expected,)
    (tmp_path / "p.toml").write_text(FILE)
    assert Pipeline.from_toml(tmp_path / "p.toml").nodes == (expected,)


def test_a_field_given_as_none_is_not_given() -> None:
    pipeline = Pipeline("p").add_node("n", nothing, **SHORT)
    pipeline.replace_node("n", reads=None, config=None)  # type: ignore[arg-type]
    assert pipeline.node("n") == Node.declare("n", nothing, **SHORT)


def test_a_field_that_a_node_does_not_have_is_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        Node.declare("n", nothing, colour="red")  # type: ignore[call-arg]
    with pytest.raises(InvalidNode, match="retries is -1"):
        Node.declare("n", nothing, retries=-1)


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
