"""Which functions fit a node."""

import functools
from typing import Any

import pytest

from vla_rl.graph import (
    GraphError,
    NotAsync,
    Pipeline,
    SignatureMismatch,
)


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
