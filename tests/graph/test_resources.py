"""Whoever needs a resource waits in line: oldest update first, nobody overtakes, nothing is lost to
a cancellation.
"""

import asyncio
from typing import Any

import pytest

from vla_rl.graph import GraphError, Resource


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
