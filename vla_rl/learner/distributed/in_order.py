"""Calls to one rank: in order, a few at a time; and a row for a rank that has none of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from torch import Tensor

S = TypeVar("S")
T = TypeVar("T")

IN_FLIGHT: Final = 2
"""Micro-batches that a rank has at a time: one is computed, the next is prepared."""


async def in_order(call: Callable[[S], Awaitable[T]], inputs: Iterable[S]) -> list[T]:
    """Make a call for each input, in order and a few at a time."""
    free = asyncio.Semaphore(IN_FLIGHT)

    async def one(value: S) -> T:
        async with free:
            return await call(value)

    return await asyncio.gather(*(one(value) for value in inputs))


def idle_row(num_read: Tensor) -> Tensor:
    """Return the shortest row, for passes of ranks that have no row of their own."""
    return num_read.argmin()[None]
