"""Items flow on one by one, in order, through bounded channels."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.graph.test_failures import (
    Unlucky,
    failure_of,
)
from vla_rl.graph import (
    DROP,
    Executor,
    NodeFailed,
    NodeOutput,
    NodeStatus,
    Pipeline,
    WrongOutput,
)


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def double(item: int) -> int:
    return 2 * item


async def keep_odd(item: int) -> Any:
    return item if item % 2 else DROP


async def total(items: list[int]) -> int:
    return sum(items)


async def test_an_item_is_taken_before_the_next_one_is_made(run_all: Any) -> None:
    taken = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        yield 1
        await taken.wait()  # never set unless the reader got item 1 while this node still runs
        yield 2

    async def take(item: int) -> int:
        taken.set()
        return 10 * item

    graph = (
        Pipeline("p")
        .add_node("source", source, writes="items")
        .add_node("take", take, deps="source", reads={"item": "items"}, writes="tens", stream=True)
        .add_node("sum", total, reads={"items": "tens"}, writes="total")
        .build()
    )
    (update,) = await run_all(graph)
    assert update.values["total"] == 30


async def test_streams_pass_through_several_nodes_in_order_and_drop_what_they_drop(
    run_all: Any,
) -> None:
    graph = (
        Pipeline("p")
        .add_node("source", numbers, writes="n", config={"count": 6})
        .add_node("odd", keep_odd, reads={"item": "n"}, writes="kept", stream=True)
        .add_node("double", double, reads={"item": "kept"}, writes="doubled", stream=True)
        .build()
    )
    (update,) = await run_all(graph)
    assert update.values == {"doubled": [2, 6, 10]}  # 1, 3, 5 doubled; 0, 2, 4 dropped
    assert (update.spans["odd"].num_items, update.spans["odd"].num_dropped) == (3, 3)
    assert (update.spans["double"].num_items, update.spans["double"].attempts) == (3, 3)


async def test_a_stream_has_a_reader_of_items_and_a_reader_of_the_list_at_once(
    run_all: Any,
) -> None:
    seen: list[int] = []

    async def watch(item: int) -> None:
        seen.append(item)

    graph = (
        Pipeline("p")
        .add_node("source", numbers, writes="n", config={"count": 4})
        .add_node("watch", watch, reads={"item": "n"}, stream=True)
        .add_node("double", double, reads={"item": "n"}, writes="doubled", stream=True)
        .add_node("sum", total, reads={"items": "n"}, writes="total")
        .build()
    )
    (update,) = await run_all(graph, stream_capacity=1)
    assert update.values == {"doubled": [0, 2, 4, 6], "total": 6}
    assert seen == [0, 1, 2, 3]


async def test_an_empty_stream_is_an_empty_list(run_all: Any) -> None:
    graph = (
        Pipeline("p")
        .add_node("source", numbers, writes="n", config={"count": 0})
        .add_node("double", double, reads={"item": "n"}, writes="doubled", stream=True)
        .build()
    )
    (update,) = await run_all(graph)
    assert update.values == {"doubled": []}


async def test_a_stream_node_waits_for_its_whole_values_first(run_all: Any) -> None:
    go = asyncio.Event()

    async def factor() -> int:
        await go.wait()
        return 5

    async def source() -> AsyncIterator[int]:
        yield 1
        go.set()
        yield 2

    async def times(item: int, factor: int) -> int:
        return item * factor

    graph = (
        Pipeline("p")
        .add_node("source", source, writes="n")
        .add_node("factor", factor, writes="factor")
        .add_node(
            "times", times, reads={"item": "n", "factor": "factor"}, writes="out", stream=True
        )
        .build()
    )
    (update,) = await run_all(graph)
    assert update.values["out"] == [5, 10]


@pytest.mark.parametrize("capacity", [1, 3])
async def test_a_full_stream_makes_its_writer_wait(capacity: int) -> None:
    made: list[int] = []
    go = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        for number in range(10):
            made.append(number)
            yield number

    async def slow(item: int) -> int:
        await go.wait()
        return item

    graph = (
        Pipeline("p")
        .add_node("source", source, writes="n")
        .add_node("slow", slow, reads={"item": "n"}, writes="out", stream=True)
        .build()
    )
    async with asyncio.timeout(20), Executor(graph, stream_capacity=capacity).run(1) as updates:
        for _ in range(100):
            await asyncio.sleep(0)
        # one item with the reader, `capacity` in the channel, one in the writer's hands
        assert len(made) == capacity + 2
        go.set()
        assert (await anext(updates)).values["out"] == list(range(10))


async def test_writer_and_reader_of_a_stream_take_turns_on_one_device(run_all: Any) -> None:
    inside = 0

    async def source() -> AsyncIterator[int]:
        nonlocal inside
        for number in range(20):
            assert inside == 0
            inside += 1
            await asyncio.sleep(0)
            inside -= 1
            yield number

    async def infer(item: int) -> int:
        nonlocal inside
        assert inside == 0
        inside += 1
        await asyncio.sleep(0)
        inside -= 1
        return item

    graph = (
        Pipeline("p")
        .add_node("source", source, writes="n", resources="device")
        .add_node(
            "infer", infer, reads={"item": "n"}, writes="out", stream=True, resources="device"
        )
        .build()
    )
    for update in await run_all(graph, 3, max_in_flight=2, stream_capacity=1):
        assert update.values["out"] == list(range(20))


async def test_metrics_of_a_stream_are_the_mean_over_its_items(run_all: Any) -> None:
    async def score(item: int) -> NodeOutput:
        return NodeOutput(batch=item, metrics={"score": item})

    graph = (
        Pipeline("p")
        .add_node("source", numbers, writes="n", config={"count": 4})
        .add_node("score", score, reads={"item": "n"}, writes="scores", stream=True)
        .build()
    )
    (update,) = await run_all(graph)
    assert update.metrics == {"score": 1.5}  # (0 + 1 + 2 + 3) / 4
    assert update.values["scores"] == [0, 1, 2, 3]


async def test_a_stream_node_that_returns_none_is_told_about_drop(run_all: Any) -> None:
    async def forgot(item: int) -> None: ...

    graph = (
        Pipeline("p")
        .add_node("source", numbers, writes="n", config={"count": 2})
        .add_node("forgot", forgot, reads={"item": "n"}, writes="out", stream=True)
        .build()
    )
    with pytest.raises(WrongOutput, match=r"'forgot' in update 0 returned None.*DROP"):
        await run_all(graph)


async def test_a_function_for_a_list_in_the_place_of_one_for_items_is_told_about_stream(
    run_all: Any,
) -> None:
    async def total(items: list[int]) -> int:
        return sum(items)

    graph = (
        Pipeline("p")
        .add_node("source", numbers, writes="n", config={"count": 2})
        .add_node("total", total, reads={"items": "n"}, writes="out", stream=True)
        .build()
    )
    with pytest.raises(NodeFailed, match=r"items is one item of the stream; with stream=False"):
        await run_all(graph)


async def test_a_generator_is_closed_when_its_update_is_left() -> None:
    closed = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
            yield 3
        finally:
            await asyncio.sleep(0)
            closed.set()

    async def stuck(item: int) -> None:
        await asyncio.Event().wait()

    graph = (
        Pipeline("p")
        .add_node("source", source, writes="n")
        .add_node("stuck", stuck, reads={"item": "n"}, stream=True)
    ).build()
    async with asyncio.timeout(20):
        async with Executor(graph, stream_capacity=1).run(1):
            for _ in range(50):
                await asyncio.sleep(0)
            assert not closed.is_set()
        assert closed.is_set()


async def test_each_item_of_a_stream_is_tried_again_by_itself(run_all: Any) -> None:
    calls: list[int] = []

    async def source() -> AsyncIterator[int]:
        yield 1
        yield 2

    async def every_second_try(item: int) -> int:
        calls.append(item)
        if len(calls) % 2:
            raise Unlucky
        return item

    pipeline = Pipeline("p").add_node("source", source, writes="n")
    pipeline.add_node(
        "score", every_second_try, reads={"item": "n"}, writes="out", stream=True, retries=1
    )
    (update,) = await run_all(pipeline.build())
    assert update.values["out"] == [1, 2]
    assert calls == [1, 1, 2, 2]


@pytest.mark.parametrize("given_before", [0, 1])
async def test_a_generator_is_begun_again_only_while_it_has_given_nothing(
    run_all: Any, given_before: int
) -> None:
    num_started = 0

    async def source() -> AsyncIterator[int]:
        nonlocal num_started
        num_started += 1
        for _ in range(given_before):
            yield 0
        if num_started == 1:
            raise Unlucky
        yield 1

    pipeline = Pipeline("p").add_node("source", source, writes="n", retries=3)
    if given_before == 0:
        (update,) = await run_all(pipeline.build())
        assert (update.values["n"], num_started) == ([1], 2)
    else:
        assert (await failure_of(run_all, pipeline)).node == "source"
        assert num_started == 1


async def test_a_failing_reader_does_not_hold_up_the_writer_of_its_stream(run_all: Any) -> None:
    async def source() -> AsyncIterator[int]:
        for number in range(50):
            yield number

    async def bad(item: int) -> int:
        raise Unlucky

    async def good(item: int) -> int:
        return item

    pipeline = (
        Pipeline("p")
        .add_node("source", source, writes="n")
        .add_node("bad", bad, reads={"item": "n"}, writes="x", stream=True)
        .add_node("after", good, reads={"item": "x"}, writes="y", stream=True)
        .add_node("good", good, reads={"item": "n"}, writes="z", stream=True)
    )
    failure = await failure_of(run_all, pipeline, stream_capacity=1)
    assert failure.node == "bad"
    assert failure.report is not None
    assert failure.report.values == {"z": list(range(50))}
    assert failure.report.statuses["after"] is NodeStatus.SKIPPED


async def test_a_failing_writer_cancels_the_readers_of_its_stream(run_all: Any) -> None:
    was_cancelled = asyncio.Event()
    has_item = asyncio.Event()

    async def source() -> AsyncIterator[int]:
        yield 1
        await has_item.wait()
        raise Unlucky

    async def stuck(item: int) -> int:
        has_item.set()
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    pipeline = Pipeline("p").add_node("source", source, writes="n")
    pipeline.add_node("stuck", stuck, reads={"item": "n"}, writes="x", stream=True)
    failure = await failure_of(run_all, pipeline)
    assert failure.node == "source"
    assert was_cancelled.is_set()
