"""Pipelines from TOML files."""

from pathlib import Path
from typing import Any

import pytest

from vla_rl.graph import InvalidPipelineFile, NodeRole, NodeType, Pipeline, UnknownFunction

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
    path.write_text(text)
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
