"""Whatever the graph looks like: every node once an update, after all it depends on, in the order
of updates.

Random graphs of streams: what `build` does not refuse never hangs, and no item is lost, doubled or out
of order.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import uvloop
from hypothesis import assume, given, settings, strategies as st

from vla_rl.graph import DROP, Executor, InvalidStream, NodeFailed, NodeStatus, Pipeline, TaskGraph

Log = list[tuple[str, str, int]]


@st.composite
def shapes(draw: st.DrawFn) -> list[tuple[set[int], set[int], bool, int, bool]]:
    """For each node: earlier nodes it reads, earlier nodes it only waits for, device or not,
    pauses, stream or not.
    """
    nodes = []
    for number in range(draw(st.integers(1, 9))):
        earlier = st.sets(st.integers(0, number - 1), max_size=3) if number else st.just(set[int]())
        nodes.append(
            (
                draw(earlier),
                draw(earlier),
                draw(st.booleans()),
                draw(st.integers(0, 4)),
                draw(st.booleans()),
            )
        )
    return nodes


def call_node(
    name: str, num_reads: int, pauses: int, log: Log, bad: str | None
) -> Callable[..., Any]:
    """A coroutine function with the parameters `update`, `r0`, `r1`, ..., which notes when it
    begins and ends.
    """

    async def work(update: int) -> int:
        log.append(("begin", name, update))
        for _ in range(pauses):
            await asyncio.sleep(0)
        if name == bad and update == 1:
            raise RuntimeError(name)
        log.append(("end", name, update))
        return update

    parameters = ", ".join(["update", *(f"r{number}" for number in range(num_reads))])
    made: dict[str, Any] = {}
    exec(f"async def node({parameters}): return await work(update)", {"work": work}, made)
    return made["node"]  # type: ignore[no-any-return]


def source_node(
    name: str, num_reads: int, pauses: int, log: Log, bad: str | None
) -> Callable[..., Any]:
    """The same as an async generator of three items."""
    call = call_node(name, num_reads, pauses, log, bad)
    parameters = ", ".join(["update", *(f"r{number}" for number in range(num_reads))])

    async def items(update: int, **values: Any) -> AsyncIterator[int]:
        for number in range(3):
            if number == 2:
                await call(update=update, **values)
            yield number

    given = ", ".join(f"{p}={p}" for p in parameters.split(", "))
    made: dict[str, Any] = {}
    exec(
        f"async def node({parameters}):\n    async for i in items({given}): yield i",
        {"items": items},
        made,
    )
    return made["node"]  # type: ignore[no-any-return]


def build(
    shape: list[tuple[set[int], set[int], bool, int, bool]], log: Log, bad: str | None = None
) -> TaskGraph:
    pipeline = Pipeline("random", inputs="update")
    for number, (reads, deps, on_device, pauses, is_source) in reversed(list(enumerate(shape))):
        make = source_node if is_source else call_node
        pipeline.add_node(
            f"n{number}",
            make(f"n{number}", len(reads), pauses, log, bad),
            reads={
                "update": "update",
                **{f"r{i}": f"v{read}" for i, read in enumerate(sorted(reads))},
            },
            deps=[f"n{dep}" for dep in deps],
            writes=f"v{number}",
            resources="device" if on_device else (),
        )
    return pipeline.build()


def run(graph: TaskGraph, num_updates: int, max_in_flight: int) -> list[int]:
    async def main() -> list[int]:
        executor = Executor(graph, max_in_flight=max_in_flight, stream_capacity=1)
        async with asyncio.timeout(20), executor.run(num_updates) as updates:
            received = [update.index async for update in updates]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return received

    return asyncio.run(main())


@settings(max_examples=60, deadline=None)
@given(shape=shapes(), max_in_flight=st.integers(1, 3))
def test_nodes_run_once_an_update_in_a_topological_order(shape: Any, max_in_flight: int) -> None:
    log: Log = []
    graph = build(shape, log)
    assert run(graph, 3, max_in_flight) == [0, 1, 2]
    when = {event: position for position, event in enumerate(log)}
    assert len(when) == len(log) == 2 * 3 * len(shape)
    for update in range(3):
        for edge in graph.edges:
            assert when["end", edge.source, update] < when["begin", edge.target, update]
        for node in graph.nodes if update else ():
            assert when["end", node, update - 1] < when["begin", node, update]


@settings(max_examples=50, deadline=None)
@given(shape=shapes(), max_in_flight=st.integers(1, 3), data=st.data())
def test_a_failure_skips_exactly_what_is_downstream(
    shape: Any, max_in_flight: int, data: st.DataObject
) -> None:
    bad = f"n{data.draw(st.integers(0, len(shape) - 1))}"
    graph = build(shape, [], bad)
    with pytest.raises(NodeFailed) as caught:
        run(graph, 3, max_in_flight)
    assert (caught.value.node, caught.value.update) == (bad, 1)
    assert caught.value.report is not None
    for node, status in caught.value.report.statuses.items():
        if node == bad:
            assert status is NodeStatus.FAILED
        elif node in graph.downstream(bad):
            assert status is NodeStatus.SKIPPED
        else:
            assert status is NodeStatus.COMPLETED


NUM_ITEMS = 7
Shape = list[tuple[int | None, set[int], set[int]]]
"""For each node: the stream it takes items of (None: it is a source), the nodes it reads whole,
those it waits for."""


@st.composite
def stream_shapes(draw: st.DrawFn) -> Shape:
    nodes: Shape = [(None, set(), set())]
    for number in range(1, draw(st.integers(2, 8))):
        stream = draw(st.one_of(st.none(), st.integers(0, number - 1), st.integers(0, number - 1)))
        others = st.sets(st.integers(0, number - 1), max_size=2)
        whole = draw(others) if draw(st.booleans()) else set[int]()
        deps = draw(others) if draw(st.booleans()) else set[int]()
        nodes.append((stream, whole - {stream}, deps))
    return nodes


def function(is_source: bool, number: int, whole: list[int]) -> Callable[..., Any]:
    """A source of 0..6, or a node that leaves out each item that `number` divides.

    Both pause here and there.
    """

    async def one(item: int) -> Any:
        for _ in range((item * number) % 3):
            await asyncio.sleep(0)
        return DROP if number > 1 and item % number == 1 else item

    async def source() -> AsyncIterator[int]:
        for item in range(NUM_ITEMS):
            if (item + number) % 2:
                await asyncio.sleep(0)
            yield item

    names = [f"w{other}" for other in whole]
    made: dict[str, Any] = {}
    if is_source:
        code = f"async def node({', '.join(names)}):\n    async for item in source(): yield item"
    else:
        code = f"async def node({', '.join(['item', *names])}): return await one(item)"
    exec(code, {"one": one, "source": source}, made)
    return made["node"]  # type: ignore[no-any-return]


@settings(max_examples=60, deadline=None)
@given(
    shape=stream_shapes(),
    capacity=st.integers(1, 3),
    max_in_flight=st.integers(1, 3),
    device=st.sets(st.integers(0, 7)),
    uses_uvloop=st.booleans(),
)
def test_random_streams_arrive_whole_and_in_order(
    shape: Shape, capacity: int, max_in_flight: int, device: set[int], uses_uvloop: bool
) -> None:
    pipeline, expected = Pipeline("streams"), dict[int, list[int]]()
    for number, (stream, whole, deps) in enumerate(shape):
        reads = {f"w{other}": f"v{other}" for other in sorted(whole)}
        pipeline.add_node(
            f"n{number}",
            function(stream is None, number, sorted(whole)),
            reads=reads if stream is None else {"item": f"v{stream}", **reads},
            writes=f"v{number}",
            deps=[f"n{dep}" for dep in deps],
            stream=stream is not None,
            resources="device" if number in device else (),
        )
        given_items = list(range(NUM_ITEMS)) if stream is None else expected[stream]
        expected[number] = [
            x for x in given_items if stream is None or not (number > 1 and x % number == 1)
        ]
    try:
        graph = pipeline.build()
    except InvalidStream:
        assume(False)
        return

    async def main() -> None:
        names = [f"v{number}" for number in range(len(shape))]
        executor = Executor(
            graph, keep=names, stream_capacity=capacity, max_in_flight=max_in_flight
        )
        async with asyncio.timeout(20), executor.run(3) as updates:
            async for update in updates:
                assert update.values == {f"v{number}": items for number, items in expected.items()}

    (uvloop.run if uses_uvloop else asyncio.run)(main())
