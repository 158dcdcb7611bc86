"""Ranks that compute the passes of a learner: a process alone, or several in a group.

    rows ─► dealt ─► rank 0: pass, pass, pass    of each rank two at a time: one is computed, the next
                     rank 1: pass, pass, idle    one is prepared

A process alone is one rank without a group (`OneRank`), and needs nothing of `distributed`. In a group
with sharded weights each pass is a collective: ranks with fewer rows make idle passes, whose rows count
for nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from torch import Tensor

from vla_rl.engines.device_lane import DeviceLane, to_host
from vla_rl.learner.config import MicroBatchSize
from vla_rl.learner.plan import plan_passes
from vla_rl.types import Observation
from vla_rl.util.stalls import note_progress

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

IN_FLIGHT: Final = 2
"""Micro-batches that a rank has at a time: one is computed, the next is prepared."""


@dataclass(frozen=True)
class Pass:
    """One pass of a rank."""

    index: Tensor
    """Its rows, int64 [M]."""

    is_idle: bool
    """Whether the rows are there only because each rank has to make a pass."""

    is_last: bool
    """Whether it is the rank's last one, in which gradients of all ranks meet."""


class Ranks(Protocol):
    """The ranks of a learner."""

    @property
    def makes_idle_passes(self) -> bool:
        """Whether all ranks make as many passes as the one that has most."""
        ...

    def deal_rows(self, lengths: Tensor, size: MicroBatchSize) -> Sequence[Sequence[Tensor]]:
        """Return the micro-batches of each rank, of rows with these numbers of tokens."""
        ...

    async def compute(
        self, work: Callable[[Any, S], Coroutine[Any, Any, T]], dealt: Sequence[S]
    ) -> Sequence[T]:
        """Let each rank work on its part; return the results by part."""
        ...

    def with_local_images(
        self, rank: Any, observations: Sequence[Observation], indices: Iterable[Tensor]
    ) -> AbstractAsyncContextManager[tuple[Observation, ...]]:
        """Return the observations as a rank can read them, which will read these rows."""
        ...

    async def read_tensors(self, tensors: Sequence[Tensor], work: str) -> list[Tensor]:
        """Return results of passes on the host."""
        ...


class LocalRank:
    """The one rank of a process alone: it computes on this process's device lane.

    Subclasses have the methods of `distributed.rank.LearnerRank` that their learner, critic or imitator
    calls.

    Args:
        lane: shared with the engines.
    """

    def __init__(self, lane: DeviceLane) -> None:
        self._lane, self._turn = lane, asyncio.Lock()

    async def compute_pass(
        self, prepare: Callable[[S], T], inputs: S, compute: Callable[[T], R], work: str
    ) -> R:
        """Prepare a micro-batch on the host, and compute it on the lane."""
        batch = await self._lane.prepare(prepare, inputs)
        # submitted once the one before is done: in between, every waiting batch of an engine gets its
        # turn
        async with self._turn:
            return await self._lane.run(compute, batch, work=work)


class OneRank:
    """`Ranks` of a process alone: one rank without a group."""

    makes_idle_passes = False

    def __init__(self, rank: LocalRank, lane: DeviceLane) -> None:
        self._rank, self._lane = rank, lane

    def deal_rows(self, lengths: Tensor, size: MicroBatchSize) -> Sequence[Sequence[Tensor]]:
        """Return the micro-batches of all rows."""
        return plan_passes(lengths, size, 1)

    async def compute(
        self, work: Callable[[Any, S], Coroutine[Any, Any, T]], dealt: Sequence[S]
    ) -> Sequence[T]:
        """Let the rank work; a cancellation ends it at once, because no other rank waits for it."""
        return [await work(self._rank, dealt[0])]

    def with_local_images(
        self, rank: Any, observations: Sequence[Observation], indices: Iterable[Tensor]
    ) -> AbstractAsyncContextManager[tuple[Observation, ...]]:
        """Return the observations as they are."""
        return nullcontext(tuple(observations))

    async def read_tensors(self, tensors: Sequence[Tensor], work: str) -> list[Tensor]:
        """Copy the results of passes to the host, in one copy for all."""
        return await self._lane.run(to_host, *tensors, work=work)


async def compute_passes(
    ranks: Ranks,
    dealt: Sequence[Sequence[Tensor]],
    lengths: Tensor,
    observations: Sequence[Observation],
    call: Callable[[Any, tuple[Observation, ...], Pass], Awaitable[T]],
    *,
    begin: Callable[[Any], Awaitable[None]] | None,
    end: Callable[[Any], Awaitable[None]] | None = None,
    least: int = 0,
) -> list[T]:
    """Let each rank compute its micro-batches; return their results, rank by rank.

    Args:
        ranks: who computes.
        dealt: micro-batches of each rank, as indices of rows.
        lengths: number of tokens of each row.
        observations: of all rows.
        call: makes one pass on a rank, given the observations as it can read them.
        begin, end: what a rank does before and after its passes.
        least: passes that each rank makes at least: 1 if gradients of all ranks meet in the last one.
    """
    if ranks.makes_idle_passes:
        least = max(least, *map(len, dealt))
    # the shortest row: an idle pass is computed for nothing but its part in a collective
    idle = lengths.argmin()[None]

    async def make_pass(rank: Any, local: tuple[Observation, ...], each: Pass) -> T:
        result = await call(rank, local, each)
        # an update of many rows takes minutes on a small machine, and is no stall
        note_progress("micro-batches")
        return result

    async def compute(rank: Any, parts: Sequence[Tensor]) -> list[T]:
        indices = [*parts, *[idle] * (least - len(parts))]
        passes = [
            Pass(index, number >= len(parts), number == len(indices) - 1)
            for number, index in enumerate(indices)
        ]
        async with ranks.with_local_images(rank, observations, indices) as local:
            if begin is not None:
                await begin(rank)
            found = await in_order(lambda each: make_pass(rank, local, each), passes)
        if end is not None:
            await end(rank)
        return found[: len(parts)]

    found = await ranks.compute(compute, dealt)
    return [each for of_rank in found for each in of_rank]


async def in_order(call: Callable[[S], Awaitable[T]], inputs: Iterable[S]) -> list[T]:
    """Make a call for each input, in order and a few at a time; the first error ends the others."""
    # two: with one, a rank would wait for its next rows; with all of them, their images would fill
    # the memory of its host
    free = asyncio.Semaphore(IN_FLIGHT)

    async def one(value: S) -> T:
        async with free:
            return await call(value)

    calls = [asyncio.ensure_future(one(value)) for value in inputs]
    try:
        return await asyncio.gather(*calls)
    finally:
        for each in calls:
            each.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
