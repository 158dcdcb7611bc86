"""Episodes that a test runs on a pool, and what it waits for meanwhile."""

import asyncio
import contextlib
import os
from pathlib import Path

import numpy as np

from vla_rl.env_workers import SimulatorPool
from vla_rl.errors import ActorDied
from vla_rl.types import EpisodeSpec

STILL = np.zeros((4, 7), np.float32)


async def run_episode(pool: SimulatorPool, spec: EpisodeSpec) -> list[float]:
    """Run one chunk; the hand's position after it."""
    async with pool.lease(spec) as env:
        await env.reset()
        outcome = await env.step_chunk(STILL)
        position: list[float] = outcome.observation["state"].tolist()
        return position


async def run_row_by_row(pool: SimulatorPool, spec: EpisodeSpec) -> None:
    async with pool.lease(spec) as env:
        await env.reset()
        for row in STILL:
            await env.step(row)


async def run_until_it_ends(pool: SimulatorPool, spec: EpisodeSpec) -> None:
    async with pool.lease(spec) as env:
        while True:
            await env.reset()


async def rerun_where_lost(pool: SimulatorPool, spec: EpisodeSpec) -> tuple[list[float], int]:
    """What a scheduler does: run the episode again for as long as its process dies."""
    for attempt in range(10):
        try:
            return await run_episode(pool, spec), attempt
        except ActorDied:
            continue
    raise AssertionError("it died ten times")


async def until_somebody_waits(pool: SimulatorPool) -> None:
    while pool.metrics()["simulation/waiting"] == 0:  # noqa: ASYNC110  # a turn of the loop at a time
        await asyncio.sleep(0)


async def until_gone(pid: int) -> None:
    """Until the process is reaped, which the runtime's loop does; a turn of the loop at a time."""
    while Path(f"/proc/{pid}").exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0)


async def until_there_is(name: bytes) -> None:
    """Until a process of that name has started, which is nobody's event here."""
    while not children_named(name):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def children_named(name: bytes) -> list[int]:
    """Processes below this one whose name begins like that."""
    found, waiting = [], [os.getpid()]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            waiting += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            if Path(f"/proc/{pid}/comm").read_bytes().startswith(name):
                found.append(pid)
    return found
