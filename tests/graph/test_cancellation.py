"""Leaving a run, by whatever door, leaves nothing running and nothing held."""

# ruff: noqa: PT012 - leaving the block is what is tested

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from vla_rl.graph import Executor, NodeOutput, Pipeline, Resource, TaskGraph


class Probe:
    """Counts nodes that began and nodes that ended, with slow clean-up."""

    def __init__(self) -> None:
        self.began = self.ended = 0
        self.order: list[str] = []

    async def hang(self) -> None:
        """Wait until cancelled, then take a while to clean up."""
        self.began += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.ended += 1

    async def stream(self) -> AsyncIterator[int]:
        """One item, then wait until cancelled."""
        self.began += 1
        try:
            yield 1
            await asyncio.Event().wait()
        finally:
            self.ended += 1

    async def hang_on_item(self, item: int) -> None:
        """Wait until cancelled."""
        await self.hang()

    def graph(self) -> TaskGraph:
        """Four nodes that never end, one waiting for the device, and one that never starts."""
        return (
            Pipeline("p")
            .add_node("hang", self.hang)
            .add_node("source", self.stream, writes="n")
            .add_node("reader", self.hang_on_item, reads={"item": "n"}, stream=True)
            .add_node("device", self.hang, resources="device")
            .add_node("waiting", self.hang, resources="device")
            .add_node("never", self.hang, deps="hang")
            .build()
        )

    async def until_all_hang(self) -> None:
        """Until the four are inside."""
        while self.began < 4:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def check(self, executor: Executor) -> None:
        """Nothing is left."""
        assert self.began == self.ended == 4
        assert executor.resources["device"].in_use == 0
        assert executor.resources["device"].num_waiting == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_leaving_the_block_early_cancels_and_waits() -> None:
    probe = Probe()
    executor = Executor(probe.graph())
    async with asyncio.timeout(20):
        async with executor.run(1):
            await probe.until_all_hang()
        probe.check(executor)


async def test_an_error_in_the_body_cancels_and_waits() -> None:
    probe = Probe()
    executor = Executor(probe.graph())
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(20), executor.run(1):
            await probe.until_all_hang()
            raise ZeroDivisionError
    probe.check(executor)


async def test_cancelling_the_loop_cancels_and_waits() -> None:
    probe = Probe()
    executor = Executor(probe.graph())

    async def train() -> None:
        async with executor.run(1) as updates:
            async for _ in updates:
                pytest.fail("no update can end")

    async with asyncio.timeout(20):
        task = asyncio.create_task(train())
        await probe.until_all_hang()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        probe.check(executor)


async def test_a_second_cancellation_during_clean_up_still_waits_for_every_task() -> None:
    cleaning, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaning.set()
            await may_end.wait()
            ended.set()

    async def train() -> None:
        async with Executor(Pipeline("p").add_node("a", slow_to_end).build()).run(1) as updates:
            await anext(updates)

    async with asyncio.timeout(20):
        task = asyncio.create_task(train())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await cleaning.wait()
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended.is_set()


async def test_a_deadline_around_the_loop_works() -> None:
    probe = Probe()
    executor = Executor(probe.graph())
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as deadline, executor.run(1) as updates:
            await probe.until_all_hang()
            deadline.reschedule(asyncio.get_running_loop().time())
            await anext(updates)
    probe.check(executor)


async def test_every_update_in_flight_is_cancelled_the_newest_first(until: Any) -> None:
    order: list[str] = []
    inside = 0

    def hang_in(name: str, bad_update: int) -> Any:
        async def work(update: int) -> None:
            nonlocal inside
            if update == bad_update:
                inside += 1
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    order.append(f"{name} in update {update}")
                    raise

        return work

    graph = (
        Pipeline("p", inputs="update")
        .add_node("first", hang_in("first", 0), reads="update")
        .add_node("second", hang_in("second", 0), reads="update")
        .add_node("third", hang_in("third", 1), reads="update")
        .build()
    )
    async with asyncio.timeout(20), Executor(graph, max_in_flight=2).run():
        await until(lambda: inside == 3)
    assert order == ["third in update 1", "second in update 0", "first in update 0"]


async def test_a_node_cancelled_while_it_waits_for_its_second_resource_gives_back_the_first(
    until: Any,
) -> None:
    async def both() -> None: ...

    graph = Pipeline("p").add_node("both", both, resources=("device", "disk")).build()
    disk = Resource("disk")
    executor = Executor(graph, resources={"disk": disk})
    async with asyncio.timeout(20), disk:
        async with executor.run(1):
            await until(lambda: disk.num_waiting == 1)
            assert executor.resources["device"].in_use == 1
        assert executor.resources["device"].in_use == 0


async def test_updates_that_the_loop_was_not_given_are_kept_as_far_as_they_came() -> None:
    async def learn(update: int) -> NodeOutput:
        return NodeOutput(values={"learnt": update}, metrics={"train/loss": 0.5 + update})

    async def hang_in_the_second(update: int, learnt: int) -> None:
        if update == 1:
            reached.set()
            await asyncio.Event().wait()

    reached = asyncio.Event()
    graph = (
        Pipeline("p", inputs="update")
        .add_node("learn", learn, reads="update", writes="learnt")
        .add_node("show", hang_in_the_second, reads=("update", "learnt"))
        .build()
    )
    run = Executor(graph, max_in_flight=2).run(3)
    given = []
    async with asyncio.timeout(5):
        async with run as updates:
            async for update in updates:
                given.append(update.index)
                await reached.wait()
                break
    assert given == [0]
    (second,) = run.cut_short
    assert (second.index, dict(second.metrics)) == (1, {"train/loss": 1.5})
    assert {node: status.value for node, status in second.statuses.items()} == {
        "learn": "completed",
        "show": "skipped",
    }
