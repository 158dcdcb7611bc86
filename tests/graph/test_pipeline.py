"""Built-in pipelines are changed, not copied."""

import pytest

from vla_rl.graph import DuplicateNode, Node, Pipeline, UnknownNode, Update


async def source() -> int:
    return 3


async def double(value: int) -> int:
    return 2 * value


async def add_one(value: int) -> int:
    return value + 1


async def scaled(value: int, factor: int) -> int:
    return factor * value


def built_in() -> Pipeline:
    """source -> double -> plus; 3, then 6, then 7."""
    return (
        Pipeline("built-in")
        .add_node("source", source, writes="value")
        .add_node("double", double, reads="value", writes="doubled")
        .add_node("plus", add_one, reads={"value": "doubled"}, writes="result")
    )


async def result(pipeline: Pipeline, run_all) -> int:  # type: ignore[no-untyped-def]
    updates: list[Update] = await run_all(pipeline.build())
    return updates[0].values["result"]  # type: ignore[no-any-return]


async def test_a_replaced_node_keeps_what_is_not_said_anew(run_all) -> None:  # type: ignore[no-untyped-def]
    pipeline = built_in().replace_node("double", scaled, config={"factor": 5})
    assert pipeline.node("double").writes == ("doubled",)
    assert await result(pipeline, run_all) == 16


async def test_a_replaced_config_keeps_the_function(run_all) -> None:  # type: ignore[no-untyped-def]
    pipeline = (
        built_in()
        .replace_node("double", scaled, config={"factor": 5})
        .replace_node("double", config={"factor": 7})
    )
    assert await result(pipeline, run_all) == 22


async def test_a_node_inserted_after_another_takes_over_its_readers(run_all) -> None:  # type: ignore[no-untyped-def]
    node = Node.declare("more", add_one, reads={"value": "doubled"}, writes="more")
    pipeline = built_in().insert_after("double", node, reroute={"doubled": "more"})
    assert pipeline.build().topological_order == ("source", "double", "more", "plus")
    assert await result(pipeline, run_all) == 8


def test_the_inserted_node_itself_reads_what_the_others_are_rerouted_from() -> None:
    node = Node.declare("more", add_one, reads={"value": "doubled"}, writes="more")
    pipeline = built_in().insert_after("double", node, reroute={"doubled": "more"})
    assert pipeline.node("more").reads == {"value": "doubled"}
    assert pipeline.node("plus").reads == {"value": "more"}


async def test_a_node_inserted_before_another_comes_between_it_and_its_inputs(run_all) -> None:  # type: ignore[no-untyped-def]
    node = Node.declare("more", add_one, reads="value", writes="more")
    pipeline = built_in().insert_before("double", node, reroute={"value": "more"})
    assert pipeline.build().topological_order == ("source", "more", "double", "plus")
    assert await result(pipeline, run_all) == 9


async def test_an_inserted_node_without_values_still_keeps_the_order(run_all) -> None:  # type: ignore[no-untyped-def]
    async def barrier() -> None: ...

    after = built_in().insert_after("source", Node.declare("barrier", barrier)).build()
    before = built_in().insert_before("double", Node.declare("barrier", barrier)).build()
    for graph in (after, before):
        assert graph.dependencies("barrier") == ("source",)
        assert set(graph.dependents("barrier")) == {"double"}


async def test_a_removed_nodes_readers_read_something_else(run_all) -> None:  # type: ignore[no-untyped-def]
    pipeline = built_in().remove_node("double", reroute={"doubled": "value"})
    assert await result(pipeline, run_all) == 4


def test_who_depended_on_a_removed_node_depends_on_what_it_depended_on() -> None:
    async def nothing() -> None: ...

    pipeline = (
        Pipeline("p")
        .add_node("a", nothing)
        .add_node("b", nothing, deps="a")
        .add_node("c", nothing, deps="b")
    )
    assert pipeline.remove_node("b").build().dependencies("c") == ("a",)


def test_who_depended_on_a_removed_node_depends_on_who_wrote_what_it_read() -> None:
    async def nothing() -> None: ...

    async def take(value: int) -> None: ...

    pipeline = (
        Pipeline("p").add_node("a", source, writes="value").add_node("b", take, reads="value")
    )
    pipeline.add_node("c", nothing, deps="b")
    assert pipeline.remove_node("b").build().dependencies("c") == ("a",)


def test_who_read_from_a_removed_node_still_waits_for_what_that_waited_for() -> None:
    async def nothing() -> None: ...

    pipeline = built_in().add_node("first", nothing).replace_node("double", deps="first")
    graph = pipeline.remove_node("double", reroute={"doubled": "value"}).build()
    assert set(graph.dependencies("plus")) == {"source", "first"}


def test_a_copy_is_changed_without_changing_the_original() -> None:
    original = built_in()
    original.copy().remove_node("plus")
    assert [node.id for node in original.nodes] == ["source", "double", "plus"]


def test_a_pipeline_from_a_built_graph_is_changed_into_another_one() -> None:
    graph = built_in().build()
    assert Pipeline.from_graph(graph).remove_node("plus").build().topological_order == (
        "source",
        "double",
    )
    assert graph.topological_order == ("source", "double", "plus")


def test_an_edit_of_an_unknown_node_names_the_nearest() -> None:
    node = Node.declare("n", source, writes="n")
    with pytest.raises(UnknownNode, match="did you mean 'double'"):
        built_in().replace_node("dubble", double)
    with pytest.raises(UnknownNode, match="did you mean 'plus'"):
        built_in().remove_node("pluss")
    with pytest.raises(UnknownNode):
        built_in().insert_after("nowhere", node)
    with pytest.raises(DuplicateNode, match="already has a node 'plus'"):
        built_in().insert_before("double", Node.declare("plus", source, writes="n"))
