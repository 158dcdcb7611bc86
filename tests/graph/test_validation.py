"""What `build` accepts, what it refuses, and what each refusal says."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from vla_rl.graph import (
    CyclicGraph,
    DuplicateNode,
    GraphError,
    InvalidNode,
    InvalidStream,
    MissingProducer,
    NodeRole,
    NodeType,
    Pipeline,
    TwoWriters,
    UnknownDependency,
    UnknownFunction,
    UnknownNode,
    load_pipeline,
)
from vla_rl.util.imports import suggest


async def source() -> int:
    return 1


async def double(value: int) -> int:
    return 2 * value


async def add(left: int, right: int, offset: int = 0) -> int:
    return left + right + offset


async def count() -> AsyncIterator[int]:
    yield 1


async def item_plus(item: int, offset: int) -> int:
    return item + offset


async def nothing() -> None: ...


def refused(pipeline: Pipeline, error: type[GraphError], *words: str) -> None:
    """Building raises exactly `error`, and its message has all the words."""
    with pytest.raises(error) as caught:
        pipeline.build()
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


def test_nodes_may_be_added_in_any_order() -> None:
    graph = Pipeline("p").add_node("b", double, reads="value").add_node("a", source, writes="value")
    refused(graph.copy().add_node("c", nothing, deps="d"), UnknownDependency)
    assert graph.replace_node("b", writes="twice").build().topological_order == ("a", "b")


def test_deps_order_nodes_that_share_no_value() -> None:
    graph = (
        Pipeline("p").add_node("second", nothing, deps="first").add_node("first", nothing).build()
    )
    assert graph.topological_order == ("first", "second")
    assert graph.edges[0].value is None


def test_a_cycle_is_refused_and_shown() -> None:
    pipeline = Pipeline("p").add_node("a", double, reads={"value": "y"}, writes="x")
    refused(
        pipeline.add_node("b", double, reads={"value": "x"}, writes="y"), CyclicGraph, "a -> b -> a"
    )


def test_a_node_that_reads_what_it_writes_is_a_cycle() -> None:
    refused(
        Pipeline("p").add_node("a", double, reads={"value": "x"}, writes="x"), CyclicGraph, "a -> a"
    )


def test_a_cycle_through_deps_is_refused() -> None:
    refused(
        Pipeline("p").add_node("a", nothing, deps="b").add_node("b", nothing, deps="a"),
        CyclicGraph,
        "a -> b -> a",
    )


def test_a_read_that_nobody_writes_is_refused() -> None:
    pipeline = (
        Pipeline("p")
        .add_node("a", source, writes="values")
        .add_node("b", double, reads="value", writes="y")
    )
    refused(
        pipeline,
        MissingProducer,
        "'b' reads 'value'",
        "did you mean 'values'?",
        "Pipeline(inputs=...)",
    )


def test_two_writers_of_one_name_are_refused() -> None:
    pipeline = Pipeline("p").add_node("a", source, writes="x").add_node("b", source, writes="x")
    refused(pipeline, TwoWriters, "'a' and 'b' both write 'x'")


def test_a_node_may_not_write_an_input() -> None:
    refused(
        Pipeline("p", inputs="update").add_node("a", source, writes="update"),
        TwoWriters,
        "an input of 'p'",
    )


def test_two_nodes_of_one_id_are_refused() -> None:
    refused(
        Pipeline("p").add_node("a", nothing).add_node("a", nothing),
        DuplicateNode,
        "two nodes 'a'",
        "replace_node",
    )


def test_an_unknown_dependency_is_refused() -> None:
    pipeline = Pipeline("p").add_node("rollout", nothing).add_node("b", nothing, deps="rolout")
    refused(pipeline, UnknownDependency, "'b' depends on 'rolout'", "did you mean 'rollout'?")


def test_an_empty_pipeline_is_refused() -> None:
    with pytest.raises(GraphError, match="no nodes"):
        Pipeline("p").build()


def test_a_stream_node_must_read_exactly_one_stream() -> None:
    config = {"offset": 1}
    pipeline = Pipeline("p", inputs="item").add_node(
        "a", item_plus, reads="item", stream=True, writes="x", config=config
    )
    refused(pipeline, InvalidStream, "'a' is stream=True and reads 0 streams")
    two = Pipeline("p").add_node("a", count, writes="left").add_node("b", count, writes="right")
    refused(
        two.add_node("c", add, reads=("left", "right"), stream=True),
        InvalidStream,
        "reads 2 streams",
    )


def test_a_generator_writes_exactly_one_stream_and_is_not_called_per_item() -> None:
    refused(
        Pipeline("p").add_node("a", count, writes=("x", "y")),
        InvalidStream,
        "expected exactly one name",
    )
    refused(Pipeline("p").add_node("a", count), InvalidStream, "expected exactly one name")
    refused(
        Pipeline("p").add_node("a", count, writes="x", stream=True),
        InvalidStream,
        "must be a coroutine function",
    )


def test_a_stream_node_writes_at_most_one_name() -> None:
    pipeline = Pipeline("p").add_node("a", count, writes="value")
    refused(
        pipeline.add_node("b", double, reads="value", stream=True, writes=("x", "y")),
        InvalidStream,
        "at most one",
    )


def test_a_stream_that_would_wait_for_its_own_end_is_refused() -> None:
    async def mean(items: list[int]) -> float:
        return sum(items) / len(items)

    async def centered(item: int, baseline: float) -> float:
        return item - baseline

    pipeline = (
        Pipeline("p")
        .add_node("rollout", count, writes="items")
        .add_node("mean", mean, reads="items", writes="baseline")
        .add_node(
            "score",
            centered,
            reads={"item": "items", "baseline": "baseline"},
            writes="scores",
            stream=True,
        )
    )
    refused(
        pipeline,
        InvalidStream,
        "'score' takes the items of 'rollout' as they come",
        "Drop stream=True",
    )


def test_a_stream_behind_a_stream_that_would_wait_for_the_first_ones_end_is_refused() -> None:
    async def both(item: int, all_items: list[int]) -> None: ...

    pipeline = (
        Pipeline("p")
        .add_node("rollout", count, writes="items")
        .add_node("twice", double, reads={"value": "items"}, writes="doubled", stream=True)
        .add_node("score", both, reads={"item": "doubled", "all_items": "items"}, stream=True)
    )
    refused(pipeline, InvalidStream, "'score'")


def test_a_dependency_on_the_writer_of_a_stream_does_not_stop_the_stream() -> None:
    pipeline = Pipeline("p").add_node("a", count, writes="value")
    graph = pipeline.add_node("b", double, deps="a", reads="value", writes="x", stream=True).build()
    assert [(edge.value, edge.streamed) for edge in graph.edges] == [("value", True)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"writes": "not a name"}, "expected a Python identifier"),
        ({"retries": -1}, "retries is -1"),
        ({"retry_on": (asyncio.CancelledError,)}, "a cancellation is never retried"),
        ({"resources": {"device": 0}}, "needs 0 of 'device'"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused_at_once(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidNode, match=re.escape(words)):
        Pipeline("p").add_node("a", source, **options)


def test_ids_must_not_be_empty() -> None:
    with pytest.raises(InvalidNode, match="non-empty"):
        Pipeline("p").add_node("", source)
    with pytest.raises(InvalidNode, match="non-empty"):
        Pipeline("")


CUSTOM = """
from vla_rl.graph import Pipeline

async def source(): return 1

def pipeline(): return Pipeline("custom").add_node("a", source, writes="x")
def graph(node_id): return Pipeline("custom").add_node(node_id, source, writes="x").build()
def number(): return 3
constant = 3
"""


def test_a_custom_pipeline_is_loaded_by_path(import_folder: Path) -> None:
    (import_folder / "my_pipelines.py").write_text(CUSTOM)
    assert load_pipeline("my_pipelines:pipeline").build().topological_order == ("a",)
    assert load_pipeline("my_pipelines:graph", "b").build().topological_order == ("b",)
    with pytest.raises(GraphError, match="returned int, expected a Pipeline"):
        load_pipeline("my_pipelines:number")
    with pytest.raises(UnknownFunction, match="has no function 'constant'"):
        load_pipeline("my_pipelines:constant")
    with pytest.raises(UnknownFunction, match="did you mean 'pipeline'"):
        load_pipeline("my_pipelines:pipelin")


def diamond() -> Pipeline:
    """source -> (left, right) -> sum."""
    return (
        Pipeline("diamond", "two ways")
        .add_node("source", source, writes="value", node_type=NodeType.DATA_LOAD)
        .add_node("left", double, reads="value", writes="left", node_role=NodeRole.REFERENCE)
        .add_node("right", double, reads=("value",), writes=("right",))
        .add_node(
            "sum", add, reads=("left", "right"), writes=("total",), node_type=NodeType.MODEL_TRAIN
        )
    )


def test_a_graph_knows_its_order_its_ends_and_its_neighbours() -> None:
    graph = diamond().build()
    assert graph.topological_order == ("source", "left", "right", "sum")
    assert (graph.entry_nodes, graph.exit_nodes, graph.outputs) == (
        ("source",),
        ("sum",),
        ("total",),
    )
    assert graph.dependencies("sum") == ("left", "right")
    assert graph.dependents("source") == ("left", "right")
    assert graph.downstream("source") == ("left", "right", "sum")
    assert graph.upstream("sum") == ("source", "left", "right")
    assert graph.writer("left") == "left"
    assert [node.id for node in graph.nodes_by_type(NodeType.COMPUTE)] == ["left", "right"]
    assert [node.id for node in graph.nodes_by_role(NodeRole.REFERENCE)] == ["left"]


def test_a_question_about_an_unknown_node_names_the_nearest() -> None:
    with pytest.raises(UnknownNode, match="did you mean 'source'"):
        diamond().build().dependents("sorce")


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("rewrad", ["reward", "update"], "; did you mean 'reward'?"),
        ("zzz", ["reward", "update"], "; known: 'reward', 'update'"),
        (
            "zzz",
            [f"n{number}" for number in range(12)],
            "; known: 'n0', 'n1', 'n2', 'n3', 'n4', 'n5', 'n6', 'n7', 'n8', 'n9', 'n10', 'n11'",
        ),
        ("zzz", [f"n{number}" for number in range(13)], ""),
        ("zzz", [], ""),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest_or_with_up_to_twelve_known_ones(
    name: str, known: list[str], hint: str
) -> None:
    assert suggest(name, known) == hint
