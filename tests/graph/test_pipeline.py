"""Built-in pipelines are changed, not copied: in code or in a file."""

from pathlib import Path
from typing import Any

import pytest

from vla_rl.graph import (
    DuplicateNode,
    InvalidPipelineFile,
    Node,
    NodeRole,
    NodeType,
    Pipeline,
    UnknownFunction,
    UnknownNode,
    Update,
)


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


MODULE = """
async def collect(update, how_many):
    for number in range(how_many):
        yield update + number

async def double(item, factor=2):
    return factor * item

async def total(items):
    return sum(items)
"""

FILE = """
id = "from_file"
description = "doubles and sums"
inputs = ["update"]

[[node]]
id = "rollout"
func = "toml_nodes:collect"
reads = "update"
writes = "groups"
node_type = "ENV_INTERACT"
node_role = "rollout"
config = { how_many = 3 }

[[node]]
id = "double"
func = "toml_nodes:double"
reads = { item = "groups" }
writes = ["doubled"]
stream = true
retries = 2
retry_on = ["builtins:ConnectionError", "builtins:TimeoutError"]
resources = { device = 1 }

[[node]]
id = "total"
func = "toml_nodes:total"
reads = { items = "doubled" }
writes = ["total"]
deps = ["rollout"]
"""


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toml_nodes.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def read(folder: Path, text: str) -> Pipeline:
    path = folder / "pipeline.toml"
    # with the mark at the beginning that editors of Windows write
    path.write_text(text, encoding="utf-8-sig")
    return Pipeline.from_toml(path)


async def test_a_pipeline_from_a_file_runs(nodes: Path, run_all: Any) -> None:
    pipeline = read(nodes, FILE)
    assert (pipeline.id, pipeline.description) == ("from_file", "doubles and sums")
    assert pipeline.node("rollout").node_type is NodeType.ENV_INTERACT
    assert pipeline.node("rollout").node_role is NodeRole.ROLLOUT
    assert pipeline.node("double").retry_on == (ConnectionError, TimeoutError)
    updates = await run_all(pipeline.build(), 2)
    # update 0: 2 * (0 + 1 + 2); update 1: 2 * (1 + 2 + 3)
    assert [update.values["total"] for update in updates] == [6, 12]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "deps =",
            "dep =",
            r"pipeline.toml, node 'total': unknown key 'dep'; did you mean 'deps'\?",
        ),
        (
            "description =",
            "descripton =",
            r"unknown key 'descripton'; did you mean 'description'\?",
        ),
        (
            "retries = 2",
            'retries = "two"',
            r"node 'double': Expected `int`, got `str` - at `\$.retries`",
        ),
        (
            '"ENV_INTERACT"',
            '"ENV_INTERACTION"',
            r"node_type is 'ENV_INTERACTION'; did you mean 'env_interact'\?",
        ),
        ('node_role = "rollout"', 'node_role = "roleout"', r"did you mean 'rollout'\?"),
        ('"ENV_INTERACT"', "3", r"node 'rollout': .* got `int` - at `\$.node_type`"),
        (
            '["builtins:ConnectionError", "builtins:TimeoutError"]',
            '"builtins:OSError"',
            "Expected `array`",
        ),
        ('"builtins:TimeoutError"]', "4]", r"node 'double': .* got `int` - at `\$.retry_on"),
        ('["builtins:ConnectionError",', '["builtins:len",', "Expected `type`"),
        ('func = "toml_nodes:total"', "", r"node 'total': Object missing required field `func`"),
        ('id = "from_file"', "", "missing required field `id`"),
        ("stream = true", "stream = yes", "is not TOML in UTF-8"),
    ],
)
def test_a_mistake_in_the_file_is_refused_with_its_place(
    nodes: Path, old: str, new: str, words: str
) -> None:
    assert old in FILE
    with pytest.raises(InvalidPipelineFile, match=words):
        read(nodes, FILE.replace(old, new))


def test_functions_in_a_file_are_checked_when_the_graph_is_built(nodes: Path) -> None:
    with pytest.raises(UnknownFunction, match="did you mean 'total'"):
        read(nodes, FILE.replace("toml_nodes:total", "toml_nodes:totle")).build()
    with pytest.raises(UnknownFunction, match="did you mean 'TimeoutError'"):
        read(nodes, FILE.replace("builtins:TimeoutError", "builtins:TimoutError"))


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Pipeline.from_toml(tmp_path / "nowhere.toml")
