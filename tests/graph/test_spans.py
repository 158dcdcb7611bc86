"""Times and critical paths, on a clock that only the nodes move."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from vla_rl.graph import Executor, Interval, Pipeline, Waited


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


async def test_a_long_run_does_not_remember_its_past() -> None:
    async def work(update: int) -> int:
        return update

    graph = Pipeline("p", inputs="update").add_node("a", work, reads="update", writes="x").build()

    def num_intervals() -> int:
        gc.collect()
        return sum(type(each) is Interval for each in gc.get_objects())

    before = num_intervals()
    async with asyncio.timeout(20), Executor(graph, max_in_flight=3).run(50) as updates:
        async for update in updates:
            (interval,) = update.spans["a"].intervals
            assert sum(1 for _ in interval.chain()) <= 4
            if update.index == 40:
                assert num_intervals() - before <= 10
