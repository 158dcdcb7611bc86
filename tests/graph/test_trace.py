"""Times, critical paths and the trace that shows them, on a clock that only the nodes move."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from disks import SmallDisk

from vla_rl.graph import (
    Executor,
    Pipeline,
    Slice,
    TaskGraph,
    TraceWriter,
    Waited,
    write_trace,
)


def path_of(update: Any) -> list[tuple[str, int, float, Waited]]:
    return [(s.node, s.update, s.duration_s, s.waited) for s in update.critical_path.segments]


async def test_a_chain_is_its_own_critical_path(run_all: Any, clock: Any) -> None:
    async def rollout() -> int:
        clock.now += 10.1
        return 1

    async def learn(x: int) -> None:
        clock.now += 2.3

    graph = (
        Pipeline("p")
        .add_node("rollout", rollout, writes="x")
        .add_node("update", learn, reads="x")
        .build()
    )
    updates = await run_all(graph, 4, clock=clock)
    assert (
        str(updates[3].critical_path) == "update 3: 12.4 s = rollout 10.1 s (81 %) -> update "
        "2.3 s (19 %)"
    )
    assert updates[3].critical_path.bottleneck == "rollout"
    span = updates[0].spans["update"]
    assert (span.start, span.end, span.busy_s) == pytest.approx((10.1, 12.4, 2.3))


async def test_of_two_branches_the_one_that_ended_last_bounds_the_update(
    run_all: Any, clock: Any
) -> None:
    long_may_end = asyncio.Event()

    async def short() -> int:
        clock.now = 3.0
        long_may_end.set()
        return 1

    async def long() -> int:
        await long_may_end.wait()
        clock.now = 8.0
        return 2

    async def join(a: int, b: int) -> None:
        clock.now = 9.0

    graph = (
        Pipeline("p")
        .add_node("short", short, writes="a")
        .add_node("long", long, writes="b")
        .add_node("join", join, reads=("a", "b"))
        .build()
    )
    (update,) = await run_all(graph, clock=clock)
    # both began at 0; `join` waited for `long`, which ended at 8
    assert path_of(update) == [
        ("long", 0, 8.0, Waited.NOTHING),
        ("join", 0, 1.0, Waited.DEPENDENCY),
    ]


async def test_waiting_for_the_device_points_at_who_held_it(run_all: Any, clock: Any) -> None:
    async def hold() -> None:
        clock.now += 3.0
        await asyncio.sleep(0)

    async def wait() -> None:
        clock.now += 2.0

    pipeline = (
        Pipeline("p")
        .add_node("holder", hold, resources="device")
        .add_node("waiter", wait, resources="device")
    )
    (update,) = await run_all(pipeline.build(), clock=clock)
    assert path_of(update) == [
        ("holder", 0, 3.0, Waited.NOTHING),
        ("waiter", 0, 2.0, Waited.RESOURCE),
    ]


async def test_waiting_for_the_update_before_points_into_it(run_all: Any, clock: Any) -> None:
    """Both updates are admitted at 0.

    Update 1's node can only begin when update 0's has ended, at 4.
    """

    async def work() -> None:
        clock.now += 4.0

    graph = Pipeline("p").add_node("rollout", work).build()
    first, second = await run_all(graph, 2, clock=clock, max_in_flight=2)
    assert path_of(first) == [("rollout", 0, 4.0, Waited.NOTHING)]
    assert path_of(second) == [
        ("rollout", 0, 4.0, Waited.NOTHING),
        ("rollout", 1, 4.0, Waited.PREVIOUS_UPDATE),
    ]
    expected = "update 1: 8.0 s = rollout of update 0 4.0 s (50 %) -> rollout 4.0 s (50 %)"
    assert str(second.critical_path) == expected


async def test_a_slow_reader_of_a_stream_bounds_the_update(run_all: Any, clock: Any) -> None:
    """Items are made at 1 and 2.

    Each takes the reader 5 s: it works from 1 to 11, without a pause.
    """
    all_made = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        await asyncio.sleep(0)
        clock.now = 1.0
        yield 1
        await asyncio.sleep(0)
        clock.now = 2.0
        yield 2
        all_made.set()

    async def slow(item: int) -> int:
        await all_made.wait()
        clock.now = 1.0 + 5.0 * item
        return item

    graph = (
        Pipeline("p")
        .add_node("source", source, writes="n")
        .add_node("slow", slow, reads={"item": "n"}, writes="out", stream=True)
        .build()
    )
    (update,) = await run_all(graph, clock=clock)
    assert update.critical_path.shares == {
        "source": pytest.approx(1.0),
        "slow": pytest.approx(10.0),
    }
    first = update.spans["slow"].intervals[0]
    assert (first.start, first.end) == (1.0, 11.0)


async def test_news_of_what_had_happened_before_does_not_count_as_waiting(
    run_all: Any, clock: Any
) -> None:
    """The writer ends at 0, long before the reader; only the reader was waited for."""

    async def source() -> AsyncIterator[int]:
        await asyncio.sleep(0)
        yield 1

    async def slow(item: int) -> None:
        clock.now = 5.0

    graph = Pipeline("p").add_node("source", source, writes="n")
    graph.add_node("slow", slow, reads={"item": "n"}, stream=True)
    (update,) = await run_all(graph.build(), clock=clock)
    assert update.critical_path.shares["slow"] == pytest.approx(5.0)


async def test_a_fast_reader_of_a_stream_leaves_its_writer_on_the_path(
    run_all: Any, clock: Any
) -> None:
    """Items are made at 4 and 8, each takes the reader 1 s, so it waits from 5 to 8 and
    ends at 9.
    """
    taken = asyncio.Semaphore(0)

    async def source() -> AsyncIterator[int]:
        for number in (1, 2):
            clock.now = 4.0 * number
            yield number
            await taken.acquire()

    async def fast(item: int) -> int:
        clock.now += 1.0
        taken.release()
        return item

    graph = (
        Pipeline("p")
        .add_node("source", source, writes="n")
        .add_node("fast", fast, reads={"item": "n"}, writes="out", stream=True)
        .build()
    )
    (update,) = await run_all(graph, clock=clock)
    shares = update.critical_path.shares
    assert sum(shares.values()) == pytest.approx(9.0)
    assert update.critical_path.bottleneck == "source"
    assert [(i.start, i.end) for i in update.spans["fast"].intervals][:2] == [
        (4.0, 5.0),
        (8.0, 9.0),
    ]
    assert update.spans["fast"].busy_s == pytest.approx(2.0)


async def test_a_writer_that_waited_for_room_points_at_the_reader(run_all: Any, clock: Any) -> None:
    writer_is_full = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        for number in range(4):
            if number == 3:
                writer_is_full.set()
            yield number

    async def slow(item: int) -> None:
        if item == 0:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            clock.now = 6.0

    graph = Pipeline("p").add_node("source", source, writes="n")
    graph.add_node("slow", slow, reads={"item": "n"}, stream=True)
    (update,) = await run_all(graph.build(), clock=clock, stream_capacity=1)
    assert Waited.FULL_STREAM in {interval.waited for interval in update.spans["source"].intervals}
    assert update.critical_path.bottleneck == "slow"


async def test_shares_always_add_up_to_the_update(run_all: Any) -> None:
    async def work(update: int) -> int:
        await asyncio.sleep(0)
        return update

    async def source(update: int) -> AsyncIterator[int]:
        for number in range(5):
            await asyncio.sleep(0)
            yield number

    async def per_item(item: int) -> int:
        await asyncio.sleep(0)
        return item

    graph = (
        Pipeline("p", inputs="update")
        .add_node("a", work, reads="update", writes="x", resources="device")
        .add_node("source", source, reads="update", writes="n", resources="device")
        .add_node(
            "score", per_item, reads={"item": "n"}, writes="s", stream=True, resources="device"
        )
        .add_node("b", work, reads={"update": "x"}, writes="y", deps="score", resources="device")
        .build()
    )
    for update in await run_all(graph, 20, max_in_flight=3, stream_capacity=1):
        assert sum(update.critical_path.shares.values()) == pytest.approx(update.duration_s)


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
            writer.write_update(update, slices={"rank 0": (Slice("step", 1.0, 1.5),), "rank 1": ()})
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
            writer.write_update(update)
            cut_off = path.read_text()  # what is on disk if the process ends here
            events = json.loads(cut_off + "]")
            assert {e["args"]["update"] for e in events if e["ph"] == "X"} == set(
                range(update.index + 1)
            )
    writer.close()
    writer.close()
    assert json.loads(path.read_text()) == events
    with pytest.raises(ValueError, match="is closed"):
        writer.write_update(update)


async def test_a_full_disk_costs_the_trace_nothing_that_comes_later(
    graph: TaskGraph, clock: Any, run_all: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, disk = tmp_path / "trace.json", SmallDisk(monkeypatch)
    writer = TraceWriter(path, graph)
    first, second, third = await run_all(graph, 3, clock=clock)
    writer.write_update(first)
    disk.room = 500  # half of the next update
    with pytest.raises(OSError, match="No space left"):
        writer.write_update(second)
    assert json.loads(path.read_text() + "]")  # what is there is whole
    disk.room = None
    for update in (second, third):
        writer.write_update(update)
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
