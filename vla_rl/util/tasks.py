"""Tasks of asyncio: awaited to their end, left with the error that counts, run in simulated time.

In simulated time the clock of the loop jumps to the next timer, so that waiting takes no time. Code that
takes the time only from its loop (`asyncio.sleep`, `asyncio.timeout`, `loop.time()`) runs unchanged, in the
same order on every machine. Tests use it to simulate hours of scheduling, with faults, in seconds. It has
no I/O, no threads; if every task waits while no timer is set, it raises an error instead of hanging.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from types import TracebackType
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
            # `wait` and not `await work`: a cancellation of the caller would cancel the work too.
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
    # gather alone would raise the first error at once and leave the other calls running, without an
    # owner.
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def await_unless(work: Coroutine[Any, Any, T], *ends: asyncio.Event) -> T | None:
    """Await `work`; return None, and cancel it, if one of `ends` is set before."""
    task = asyncio.create_task(work)
    ended = [asyncio.create_task(each.wait()) for each in ends]
    try:
        await asyncio.wait((task, *ended), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for each in (task, *ended):
            each.cancel()
        await asyncio.gather(task, *ended, return_exceptions=True)


class TookTooLong(Exception):
    """The work that `limit_time` awaited took too long."""


async def limit_time(seconds: float | None, work: Awaitable[T]) -> T:
    """Return the result of `work`; cancel it after `seconds`.

    Raises: TookTooLong then; a TimeoutError of `work` itself, such as of a request that it makes, is
    another error.
    """
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if deadline.expired():
            raise TookTooLong from error
        raise


def is_being_cancelled() -> bool:
    """Return whether the running task was asked to end.

    If not, a CancelledError in it is an error of what it awaited.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def leave_group(
    tasks: asyncio.TaskGroup,
    kind: type[BaseException] | None,
    error: BaseException | None,
    traceback: TracebackType | None,
) -> None:
    """Leave `tasks` from the owner's `__aexit__`, waiting for all of them.

    A single error, of a task or of the owner's block, is raised as it was, traceback and notes
    included, so that callers catch it by its type; several are raised together as an
    `ExceptionGroup`.
    """
    only_error: Exception | None = None
    try:
        await tasks.__aexit__(kind, error, traceback)
    except ExceptionGroup as errors:
        if len(errors.exceptions) > 1:
            raise
        only_error = errors.exceptions[0]
    if only_error is not None and only_error is not error:
        raise only_error


Result = TypeVar("Result")


class _JumpingClock(selectors.SelectSelector):
    """Moves the clock forward by the time that the loop asks the operating system to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # asyncio passes None if no timer is set and nothing is ready: only I/O could wake it, and
        # there is none here.
        if timeout is None:
            raise RuntimeError(
                f"nothing will ever happen: at {self.now:.3f} s of simulated time every task "
                "waits and no timer is set"
            )
        if timeout > 0:
            self.now += timeout
        return []


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on a clock that starts at 0 and jumps from timer to timer."""

    def __init__(self) -> None:
        self._jumping_clock = _JumpingClock()
        super().__init__(self._jumping_clock)

    def time(self) -> float:
        """Return the seconds of simulated time since the loop was made."""
        return self._jumping_clock.now


def run_in_simulated_time(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` to its end on a `SimulatedTimeLoop` and return its result, as `asyncio.run` would.

    Raises: RuntimeError if a point is reached at which every task waits and no timer is set.
    """
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(main)
