"""Blocking work in a thread that is always waited for, even by a caller that is being cancelled."""

import asyncio
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def run_to_its_end(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """`fn(*args)` in a thread. A cancellation is let through only once `fn` has returned: a thread cannot be stopped."""
    work = asyncio.ensure_future(asyncio.to_thread(fn, *args))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # the caller is leaving and cannot use it
        raise cancelled
    return work.result()
