"""Await work to its end, even if the caller is being cancelled."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def await_end(work: asyncio.Future[T]) -> T:
    """Return the result of `work`.

    A cancellation of the caller is raised only once `work` is done.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # retrieve it: the caller is leaving and cannot use it
        raise cancelled
    return work.result()


async def run_in_thread(fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run `fn(*args)` in a thread.

    A cancellation is raised only once `fn` has returned: a thread cannot be stopped.
    """
    return await await_end(asyncio.ensure_future(asyncio.to_thread(fn, *args)))


async def finish_despite_cancellation(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """Await `work` to its end, even if the caller is cancelled.

    Return its result, and whether the caller was cancelled.
    """
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            is_cancelled = True
    return task.result(), is_cancelled


async def gather_all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Await all calls; return their results in order.

    The first error is raised once all have ended, so that none is left half done.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
