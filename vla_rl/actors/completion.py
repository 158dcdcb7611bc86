"""Work that is waited for to its end, also by a caller that is being cancelled."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def to_its_end(work: asyncio.Future[T]) -> T:
    """The result of `work`. A cancellation of the caller is let through only once that is done."""
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


async def run_to_its_end(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run `fn(*args)` in a thread. A cancellation is let through only once `fn` has returned: a thread cannot be stopped."""
    return await to_its_end(asyncio.ensure_future(asyncio.to_thread(fn, *args)))


async def carried_through(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """Await `work` to its end, also if the caller is cancelled meanwhile; return its result, and whether it was."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            is_cancelled = True
    return task.result(), is_cancelled
