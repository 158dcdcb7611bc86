"""A coroutine whose first part ran outside the task that it belongs to.

A short call then needs no turn of the loop, and a longer one continues as if its task had begun it.
"""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


class BegunCall:
    """Awaiting it resumes the coroutine at its current position, as its own task would have.

    Args:
        running: suspended after its first `send`; None if it was ended by `error`.
        waits_for: what it yielded to the loop: a future, or None for one turn.
        error: the exception that ended it; raised again when this is awaited.
    """

    def __init__(
        self,
        running: Coroutine[Any, Any, Any] | None,
        waits_for: Any = None,
        error: BaseException | None = None,
    ) -> None:
        self._running, self._waits_for, self._error = running, waits_for, error
        self.cancellation: asyncio.CancelledError | None = None
        """Cancellation that arrived for the coroutine before it was awaited."""

    def __await__(self) -> Generator[Any, Any, Any]:
        running = self._running
        if self._error is not None or running is None:
            raise self._error or RuntimeError(
                "a call that was begun has neither a coroutine nor an error."
            )
        waits_for, cancellation = self._waits_for, self.cancellation
        if cancellation is not None and (waits_for is None or not waits_for.cancel()):
            step, value = running.throw, cancellation
        else:
            step, value = yield from _outcome(running, waits_for)
        while True:
            try:
                waits_for = step(value)
            except StopIteration as done:
                return done.value
            step, value = yield from _outcome(running, waits_for)


def _outcome(
    running: Coroutine[Any, Any, Any], waits_for: Any
) -> Generator[Any, Any, tuple[Any, Any]]:
    """Wait as the coroutine asks; return how to resume it, and with which value."""
    try:
        value = yield waits_for
    except BaseException as error:
        return running.throw, error
    return running.send, value
