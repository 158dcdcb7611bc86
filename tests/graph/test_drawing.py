"""Drawings: the tree, mermaid, graphviz's language, and files with and without graphviz."""

import logging
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from vla_rl.graph import GraphError, NodeRole, NodeType, Pipeline, TaskGraph


async def collect(update: int) -> AsyncIterator[int]:
    yield update


async def keep(groups: int) -> int:
    return groups


async def learn(kept: list[int]) -> int:
    return len(kept)


async def log() -> None: ...


@pytest.fixture
def graph() -> TaskGraph:
    return (
        Pipeline("srpo", 'SRPO on "LIBERO"', inputs="update")
        .add_node(
            "rollout", collect, reads="update", writes="groups",
            node_type=NodeType.ENV_INTERACT, node_role=NodeRole.ROLLOUT,
        )
        .add_node("filter", keep, reads="groups", writes="kept", stream=True)
        .add_node("update", learn, reads="kept", writes="metrics", node_type=NodeType.MODEL_TRAIN, resources="device")
        .add_node("log", log, deps=("update", "rollout"))
        .build()
    )  # fmt: skip


def test_the_tree_shows_each_node_once_below_the_last_it_waits_for(graph: TaskGraph) -> None:
    assert str(graph).splitlines() == [
        'srpo: SRPO on "LIBERO"',
        "└── rollout: update -> groups*  [env_interact, rollout]",
        "    └── filter: each of groups -> kept*  [compute]",
        "        └── update: kept* -> metrics  [model_train] on device",
        "            └── log  [compute] after rollout",
        "(* a stream)",
    ]


def test_mermaid_has_every_node_and_a_different_arrow_for_values_streams_and_order(
    graph: TaskGraph,
) -> None:
    text = graph.mermaid()
    assert text.startswith("flowchart TD\n")
    assert 'n0["rollout<br/>env_interact, rollout"]' in text
    assert "n0 ==>|groups| n1" in text
    assert "n1 -->|kept| n2" in text
    assert "n2 -.-> n3" in text


def test_mermaid_escapes_what_would_break_it() -> None:
    graph = Pipeline("p").add_node('a "b" <c>', log).build()
    assert 'n0["a &quot;b&quot; &lt;c&gt;<br/>compute"]' in graph.mermaid()


@pytest.mark.parametrize(
    ("suffix", "begins"), [(".mmd", "flowchart"), (".dot", "digraph"), (".txt", "srpo:")]
)
def test_text_formats_need_no_program(
    graph: TaskGraph, tmp_path: Path, suffix: str, begins: str
) -> None:
    written = graph.draw(tmp_path / f"graph{suffix}")
    assert written == tmp_path / f"graph{suffix}"
    assert written.read_text().startswith(begins)


def test_dot_text_quotes_names(graph: TaskGraph, tmp_path: Path) -> None:
    text = graph.draw(tmp_path / "graph.dot").read_text()
    assert 'label="SRPO on \\"LIBERO\\""' in text
    assert '"rollout" -> "filter" [label="groups", penwidth=3];' in text
    assert '"update" -> "log" [style=dashed];' in text


def test_without_graphviz_mermaid_is_written_and_one_line_says_so(
    graph: TaskGraph,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, "vla_rl.graph"):
        written = graph.draw(tmp_path / "graph.svg")
    assert written == tmp_path / "graph.mmd"
    assert written.read_text() == graph.mermaid()
    assert [
        record.getMessage() for record in caplog.records if record.name.startswith("vla_rl")
    ] == [f"graphviz's `dot` is not on the PATH: wrote mermaid text to {written} instead"]


def install_dot(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small program named `dot`, found first on the PATH."""
    program = folder / "dot"
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_with_graphviz_dot_is_handed_the_graph(
    graph: TaskGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    install_dot(tmp_path, 'test "$2" = -o || exit 9\n{ echo "$1"; cat; } > "$3"\n', monkeypatch)
    written = graph.draw(tmp_path / f"graph.{suffix}")
    assert written.read_text().splitlines()[:2] == [f"-T{suffix}", 'digraph "srpo" {']


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_itself_understands_the_graph(graph: TaskGraph, tmp_path: Path) -> None:
    svg = graph.draw(tmp_path / "graph.svg").read_text()
    assert all(f">{name}</text>" in svg for name in ("rollout", "filter", "update", "log"))
    assert graph.draw(tmp_path / "graph.png").read_bytes().startswith(b"\x89PNG")


def test_a_failing_dot_is_quoted(
    graph: TaskGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_dot(tmp_path, 'cat > /dev/null; echo "no plugin for png" >&2; exit 1\n', monkeypatch)
    with pytest.raises(GraphError, match="exit code 1: no plugin for png"):
        graph.draw(tmp_path / "graph.png")


def test_an_unknown_image_format_is_refused(graph: TaskGraph, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"cannot draw into .*did you mean '.svg'"):
        graph.draw(tmp_path / "graph.svgz")


def test_the_graph_imports_neither_torch_nor_actors(tmp_path: Path) -> None:
    import subprocess
    import sys

    at_any_import = (
        "vla_rl.util.imports",
        "vla_rl.util.import_hooks",
        "vla_rl.util.import_hooks",
        "vla_rl.util.import_hooks",
        "vla_rl.util",
    )
    code = (
        "import sys, vla_rl.graph; print([m for m in sys.modules if m == 'torch' or "
        "m.startswith('vla_rl.')])"
    )
    done: Any = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = [
        name
        for name in eval(done.stdout)
        if not name.startswith(("vla_rl.graph", "vla_rl.errors", *at_any_import))
    ]
    assert loaded == []
