"""Ctrl-C and SIGTERM: the first asks the run to stop in order, the second ends it at once."""

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """Listens while its block is open.

    The second signal ends the process without clean-up. Its children die with it, and what they share with it has no name
    that could be left behind.

    Args:
        then: what stopping in order does, for the person who asked.
    """

    def __init__(self, then: str = "saving a checkpoint") -> None:
        self._then, self._asked = then, asyncio.Event()

    def __enter__(self) -> Self:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    @property
    def is_asked(self) -> bool:
        """True once the run was asked to stop."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Ask the run to stop in order."""
        self._asked.set()

    async def unless_asked(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`; cancel it when the run is asked to stop, and wait until it has cleaned up.

        Raises: what `work` raises; CancelledError where the caller itself was cancelled.
        """
        doing, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait((doing, asked), return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            doing.cancel()
            await asyncio.wait((doing, asked))
        if not doing.cancelled():
            doing.result()

    def _received(self, number: signal.Signals) -> None:
        if self.is_asked:
            print(f"{number.name} again: stopping at once", file=sys.stderr, flush=True)
            os._exit(128 + number)
        print(
            f"{number.name}: stopping in order and {self._then}; once more stops at once",
            file=sys.stderr,
            flush=True,
        )
        self.ask()


async def carried_through(work: Coroutine[Any, Any, T]) -> tuple[T, bool]:
    """The result of `work`, awaited to its end even where the caller is cancelled meanwhile; and whether it was."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            is_cancelled = True
    return task.result(), is_cancelled
