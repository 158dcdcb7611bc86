"""The timeline opens in Perfetto, whole or cut off."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from disks import SmallDisk

from vla_rl.graph import Executor, Pipeline, Slice, TaskGraph, TraceWriter, write_trace


@pytest.fixture
def graph(clock: Any) -> TaskGraph:
    async def rollout(update: int) -> AsyncIterator[int]:
        await asyncio.sleep(0)
        clock.now += 2.0
        yield update
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        clock.now += 1.0

    async def score(group: int) -> int:
        return group

    async def learn(scores: list[int]) -> None:
        clock.now += 0.5

    return (
        Pipeline("srpo", inputs="update")
        .add_node("rollout", rollout, reads="update", writes="groups")
        .add_node("score", score, reads={"group": "groups"}, writes="scores", stream=True)
        .add_node("update", learn, reads="scores", resources="device")
        .build()
    )


async def test_a_trace_has_a_lane_a_node_and_its_times_in_microseconds(
    graph: TaskGraph, clock: Any, run_all: Any, tmp_path: Path
) -> None:
    updates = await run_all(graph, 2, clock=clock)
    events = json.loads(write_trace(tmp_path / "trace.json", graph, updates).read_text())
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {0: "updates", 1: "rollout", 2: "score", 3: "update"}
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["graph srpo"]
    spans = [e for e in events if e["ph"] == "X"]
    learned = [(e["name"], e["ts"], e["dur"]) for e in spans if lanes[e["tid"]] == "update"]
    assert learned == [("update 0", 3.0e6, 0.5e6), ("update 1", 6.5e6, 0.5e6)]
    assert {e["args"]["update"] for e in spans} == {0, 1}
    (first,) = [e for e in spans if e["name"] == "update 0"]
    assert first["args"] == {
        "update": 0,
        "status": "completed",
        "waited": "dependency",
        "waited_for": "score",
        "resources": ["device"],
    }
    begins, ends = ([e["ts"] for e in events if e["ph"] == phase] for phase in "be")
    assert (begins, ends) == ([0.0, 3.5e6], [3.5e6, 7.0e6])


async def test_other_processes_have_lanes_of_their_own_beside_the_nodes(
    graph: TaskGraph, clock: Any, run_all: Any, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    with TraceWriter(path, graph) as writer:
        for update in await run_all(graph, 2, clock=clock):
            writer.write(update, slices={"rank 0": (Slice("step", 1.0, 1.5),), "rank 1": ()})
    events = [event for event in json.loads(path.read_text()) if event["pid"] == 2]
    named = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert named == ["other processes", "rank 0", "rank 1"]
    steps = [event for event in events if event["ph"] == "X"]
    assert [(each["ts"], each["dur"], each["tid"]) for each in steps] == [(1e6, 0.5e6, 0)] * 2


async def test_what_was_written_before_a_crash_opens(
    graph: TaskGraph, clock: Any, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    writer = TraceWriter(path, graph)
    async with asyncio.timeout(20), Executor(graph, clock=clock).run(2) as updates:
        async for update in updates:
            writer.write(update)
            cut_off = path.read_text()  # what is on disk if the process ends here
            events = json.loads(cut_off + "]")
            assert {e["args"]["update"] for e in events if e["ph"] == "X"} == set(
                range(update.index + 1)
            )
    writer.close()
    writer.close()
    assert json.loads(path.read_text()) == events
    with pytest.raises(ValueError, match="is closed"):
        writer.write(update)


async def test_a_full_disk_costs_the_trace_nothing_that_comes_later(
    graph: TaskGraph, clock: Any, run_all: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, disk = tmp_path / "trace.json", SmallDisk(monkeypatch)
    writer = TraceWriter(path, graph)
    first, second, third = await run_all(graph, 3, clock=clock)
    writer.write(first)
    disk.room = 500  # half of the next update
    with pytest.raises(OSError, match="No space left"):
        writer.write(second)
    assert json.loads(path.read_text() + "]")  # what is there is whole
    disk.room = None
    for update in (second, third):
        writer.write(update)
    writer.close()
    events = json.loads(path.read_text())
    assert [e["id"] for e in events if e["ph"] == "b"] == [0, 1, 2]


async def test_a_failed_update_can_be_traced_too(tmp_path: Path, run_all: Any) -> None:
    from vla_rl.graph import NodeFailed

    async def fail() -> int:
        raise RuntimeError

    async def use(x: int) -> None: ...

    graph = Pipeline("p").add_node("bad", fail, writes="x").add_node("use", use, reads="x").build()
    with pytest.raises(NodeFailed) as caught:
        await run_all(graph)
    assert caught.value.report is not None
    events = json.loads(
        write_trace(tmp_path / "trace.json", graph, [caught.value.report]).read_text()
    )
    assert [(e["name"], e["args"]["status"]) for e in events if e["ph"] == "X"] == [
        ("bad 0", "failed")
    ]
