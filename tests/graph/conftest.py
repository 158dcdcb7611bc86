"""What several tests of the graph use: running a graph to its end, and a clock that is moved by
hand.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from vla_rl.graph import Executor, TaskGraph, Update

RunAll = Callable[..., Awaitable[list[Update]]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


class HandClock:
    """A clock that stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def run_all() -> RunAll:
    async def run_all(
        graph: TaskGraph,
        num_updates: int = 1,
        inputs: dict[str, Any] | None = None,
        first: int = 0,
        **options: Any,
    ) -> list[Update]:
        async with (
            asyncio.timeout(20),
            Executor(graph, **options).run(num_updates, first=first, inputs=inputs) as updates,
        ):
            return [update async for update in updates]

    return run_all


@pytest.fixture
def until() -> Until:
    async def until(condition: Callable[[], bool]) -> None:
        """Let the loop turn until something holds that nobody announces.

        The caller has a deadline.
        """
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)

    return until


@pytest.fixture(autouse=True)
async def nothing_left_running() -> AsyncIterator[None]:
    """Every test of the graph leaves no task behind but its own."""
    before = asyncio.all_tasks()
    yield
    left = [
        task
        for task in asyncio.all_tasks() - before
        if not task.done() and task is not asyncio.current_task()
    ]
    assert left == []
