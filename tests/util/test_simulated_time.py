"""Waiting takes no time on a clock that jumps, and keeps its order."""

import asyncio
import time

import pytest

from vla_rl.util.simulated_time import run_in_simulated_time


def test_an_hour_of_waiting_passes_at_once_and_in_order() -> None:
    woken: list[tuple[str, float]] = []

    async def sleep(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, asyncio.get_running_loop().time()))

    async def main() -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(sleep("late", 3600.0))
            group.create_task(sleep("early", 60.0))
        return asyncio.get_running_loop().time()

    before = time.monotonic()
    assert run_in_simulated_time(main()) == 3600.0
    assert woken == [("early", 60.0), ("late", 3600.0)]
    assert time.monotonic() - before < 60.0


def test_a_deadline_is_met_on_the_simulated_clock() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.sleep(10.0)
        return asyncio.get_running_loop().time()

    assert run_in_simulated_time(main()) == 5.0


def test_tasks_that_wait_for_each_other_end_in_an_error() -> None:
    async def main() -> None:
        await asyncio.sleep(2.5)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match=r"at 2\.500 s of simulated time every task waits"):
        run_in_simulated_time(main())
