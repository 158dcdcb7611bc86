"""Random graphs of streams: what `build` does not refuse never hangs, and no item is lost, doubled
or out of order.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import uvloop
from hypothesis import assume, given, settings, strategies as st

from vla_rl.graph import DROP, Executor, InvalidStream, Pipeline

NUM_ITEMS = 7
Shape = list[tuple[int | None, set[int], set[int]]]
"""For each node: the stream it takes items of (None: it is a source), the nodes it reads whole,
those it waits for."""


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
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
    shape=shapes(),
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
