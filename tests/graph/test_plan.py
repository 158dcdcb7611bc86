"""Who waits for whom: a plan says it once for every update, a drawing shows it, for resources it is a line.

In that line the oldest update comes first, nobody overtakes, nothing is lost to a cancellation.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from vla_rl.graph import (
    GraphError,
    InvalidRun,
    NodeRole,
    NodeType,
    Pipeline,
    Resource,
    TaskGraph,
    UnknownResource,
)
from vla_rl.graph.plan import Plan, make_plan


async def numbers() -> AsyncIterator[int]:
    yield 1


async def square(number: int) -> int:
    return number**2


async def total(numbers: list[int], squares: list[int]) -> int:
    return sum(numbers) + sum(squares)


def plan_of(keep: tuple[str, ...] = (), **capacities: int) -> Plan:
    graph = (
        Pipeline("sums", "sums of squares")
        .add_node("numbers", numbers, writes="numbers")
        .add_node("square", square, reads={"number": "numbers"}, writes="squares", stream=True)
        .add_node(
            "total",
            total,
            reads=("numbers", "squares"),
            writes="sum",
            resources={"device": 2, "disk": 1},
        )
        .build()
    )
    held = {name: Resource(name, capacity) for name, capacity in capacities.items()}
    return make_plan(graph, held, keep)


def test_a_node_waits_for_whole_values_and_takes_items_as_they_arrive() -> None:
    first, each, last = plan_of(device=2, disk=1).nodes
    assert (first.id, each.id, last.id) == ("numbers", "square", "total")
    assert (first.num_waits, each.num_waits, last.num_waits) == (0, 0, 2)
    assert first.stream_readers == (1,)
    assert each.item == "number"
    assert each.reads == ()
    assert last.reads == (("numbers", "numbers"), ("squares", "squares"))
    assert first.downstream == (1, 2)
    assert (first.collects, each.collects, last.collects) == (True, True, True)


def test_a_value_is_kept_if_nobody_reads_it_or_it_is_asked_for() -> None:
    plan = plan_of(device=2, disk=1)
    assert plan.kept == ("sum",)
    assert plan.num_readers == {"numbers": 1, "squares": 1}
    plan = plan_of(keep=("squares",), device=2, disk=1)
    assert plan.kept == ("sum", "squares")
    assert plan.num_readers == {"numbers": 1}


def test_resources_are_held_in_order_of_their_names() -> None:
    (*_, last) = plan_of(disk=1, device=3).nodes
    assert [(resource.name, units) for resource, units in last.resources] == [
        ("device", 2),
        ("disk", 1),
    ]


def test_what_the_executor_does_not_have_is_named() -> None:
    with pytest.raises(UnknownResource, match="node 'total' needs the resource 'disk'"):
        plan_of(device=2)
    with pytest.raises(UnknownResource, match="2 of the resource 'device', of which there are 1"):
        plan_of(device=1, disk=1)
    with pytest.raises(
        InvalidRun, match="keep names 'square', which no node of 'sums' writes; did"
    ):
        plan_of(keep=("square",), device=2, disk=1)


async def test_lower_priority_numbers_go_first_and_then_the_first_come(until: Any) -> None:
    device, order = Resource("device"), list[str]()

    async def use(name: str, priority: int) -> None:
        await device.wait(1, priority)
        order.append(name)
        device.release(1)

    assert device.try_take(1)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tg:
        for name, priority in (("late", 2), ("first", 1), ("second", 1)):
            tg.create_task(use(name, priority))
        await until(lambda: device.num_waiting == 3)
        device.release(1)
    assert order == ["first", "second", "late"]


async def test_nobody_overtakes_one_who_needs_more() -> None:
    device = Resource("device", 2)
    assert device.try_take(1)
    large = asyncio.create_task(device.wait(2, 0))
    await asyncio.sleep(0)
    assert not device.try_take(1)  # one unit is free, but somebody stands in line for two
    device.release(1)
    async with asyncio.timeout(20):
        await large
    assert device.in_use == 2


async def test_a_cancelled_wait_frees_the_line() -> None:
    device = Resource("device", 2)
    assert device.try_take(1)
    large, small = asyncio.create_task(device.wait(2, 0)), asyncio.create_task(device.wait(1, 1))
    await asyncio.sleep(0)
    large.cancel()
    async with asyncio.timeout(20):
        await small
    assert (device.in_use, device.num_waiting) == (2, 0)


async def test_units_granted_to_one_cancelled_in_the_same_breath_go_to_the_next() -> None:
    device = Resource("device")
    assert device.try_take(1)
    first, second = asyncio.create_task(device.wait(1, 0)), asyncio.create_task(device.wait(1, 1))
    await asyncio.sleep(0)
    device.release(1)  # granted to `first`, which does not run any more
    first.cancel()
    async with asyncio.timeout(20):
        await second
    assert (device.in_use, device.num_waiting) == (1, 0)


def test_a_resource_without_capacity_is_refused() -> None:
    with pytest.raises(GraphError, match="'device' has capacity 0"):
        Resource("device", 0)


@pytest.mark.parametrize(("capacity", "expected"), [(1, 1), (2, 2)])
async def test_nodes_that_need_one_resource_never_exceed_it(
    run_all: Any, capacity: int, expected: int
) -> None:
    inside, most = 0, 0

    async def work() -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        for _ in range(5):
            await asyncio.sleep(0)
        inside -= 1

    pipeline = Pipeline("p")
    for number in range(6):
        pipeline.add_node(f"n{number}", work, resources="device")
    await run_all(pipeline.build(), 3, resources={"device": capacity}, max_in_flight=2)
    assert (inside, most) == (0, expected)


async def test_a_node_that_holds_no_resource_runs_beside_one_that_does(run_all: Any) -> None:
    barrier = asyncio.Barrier(2)

    async def wait_at_barrier() -> None:
        await barrier.wait()

    await run_all(
        Pipeline("p")
        .add_node("a", wait_at_barrier, resources="device")
        .add_node("b", wait_at_barrier)
        .build()
    )


async def test_two_resources_are_taken_without_waiting_in_a_circle(run_all: Any) -> None:
    async def work() -> None:
        await asyncio.sleep(0)

    pipeline = Pipeline("p")
    for number in range(6):
        names = ("device", "disk") if number % 2 else ("disk", "device")
        pipeline.add_node(f"n{number}", work, resources=names)
    await run_all(pipeline.build(), 5, resources={"disk": 1}, max_in_flight=3)


async def test_the_device_is_shared_with_code_outside_the_graph(run_all: Any, until: Any) -> None:
    device = Resource("device")
    began = asyncio.Event()

    async def work() -> None:
        began.set()

    graph = Pipeline("p").add_node("a", work, resources="device").build()
    async with device:
        running = asyncio.create_task(run_all(graph, resources={"device": device}))
        await until(lambda: device.num_waiting == 1)
        assert not began.is_set()
    await running
    assert began.is_set()


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
