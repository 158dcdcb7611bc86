"""Deliberate faults: kill and freeze simulators of a run at random, to test that it survives."""

import asyncio
import logging
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

logger = logging.getLogger(__name__)


@asynccontextmanager
async def chaos(
    pids: Callable[[], Sequence[int]], every_s: float | None, seed: int
) -> AsyncIterator[None]:
    """While the context is open, repeatedly kill (SIGKILL) or freeze (SIGSTOP) one of `pids()`.

    Args:
        pids: returns the processes that are running.
        every_s: mean seconds between two faults, a Poisson process; None does nothing.
        seed: seed of the times, the processes and the kinds of faults.
    """
    if every_s is None:
        yield
        return
    breaking = asyncio.create_task(_break(pids, every_s, random.Random(seed)), name="chaos")
    try:
        yield
    finally:
        breaking.cancel()
        await asyncio.wait((breaking,))
    if not breaking.cancelled():
        breaking.result()  # it ends by itself only if it failed


async def _break(pids: Callable[[], Sequence[int]], every_s: float, dice: random.Random) -> None:
    while True:
        await asyncio.sleep(dice.expovariate(1.0 / every_s))
        if not (up := pids()):
            continue
        pid, fault = dice.choice(up), dice.choice((signal.SIGKILL, signal.SIGSTOP))
        try:
            os.kill(pid, fault)
        except ProcessLookupError:  # it died meanwhile
            continue
        logger.warning("chaos: %s to simulator process %d", fault.name, pid)
