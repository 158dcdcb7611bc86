"""A node's fields are declared once, and every way to declare or change a node takes them all."""

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest

from vla_rl.graph import InvalidNode, Node, NodeFields, NodeRole, NodeType, Pipeline

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
