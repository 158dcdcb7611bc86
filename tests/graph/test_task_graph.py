"""What a built graph knows about its nodes."""

import pytest

from vla_rl.graph import (
    NodeRole,
    NodeType,
    Pipeline,
    UnknownNode,
)


async def source() -> int:
    return 1


async def double(value: int) -> int:
    return 2 * value


async def add(left: int, right: int, offset: int = 0) -> int:
    return left + right + offset


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
