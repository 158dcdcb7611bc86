"""Ctrl-C, SIGTERM and a terminal that closes (SIGHUP) stop a run in order.

A second Ctrl-C or SIGTERM ends it at once.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Listens for signals while its block is open.

    A second SIGINT or SIGTERM ends the process without clean-up. Its children die with it, and the
    memory they share has no name, so nothing is left behind. A second SIGHUP does not end it:
    closing a terminal sends it more than once, and often a SIGTERM after it. A SIGHUP that the
    process ignores, such as under `nohup`, stays ignored. Only the main thread gets signals: in any
    other one, a line says that none is listened to.

    Args:
        then: what stopping in order does, for the printed line.
    """

    def __init__(self, then: str = "saving a checkpoint") -> None:
        self._then, self._asked = then, asyncio.Event()
        self._may_force = False
        self._handled: list[signal.Signals] = []
        self.received: signal.Signals | None = None
        """First signal that asked the run to stop."""

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            _say(
                "this run is not in the main thread, so that no signal reaches it: Ctrl-C and "
                f"SIGTERM do not stop it in order; cancel its task to do so ({self._then})"
            )
            return self
        loop = asyncio.get_running_loop()
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._handled = [
            number for number in _SIGNALS if number is not signal.SIGHUP or not is_ignored
        ]
        for number in self._handled:
            loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._handled:
            loop.remove_signal_handler(number)
        if self.received is signal.SIGHUP:  # further SIGHUPs must not interrupt the last writes
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    @property
    def exit_status(self) -> int:
        """Exit status for a shell: 128 plus the signal's number; 0 without a signal."""
        return 0 if self.received is None else 128 + self.received

    @property
    def is_asked(self) -> bool:
        """True once the run was asked to stop."""
        return self._asked.is_set()

    def ask(self) -> None:
        """Ask the run to stop in order."""
        self._asked.set()

    async def unless_asked(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`; cancel it when the run is asked to stop, and wait until it has cleaned up.

        Raises: what `work` raises; CancelledError if the caller itself was cancelled.
        """
        await unless_set(self._asked, work)

    def _received(self, number: signal.Signals) -> None:
        if self._may_force and number is not signal.SIGHUP:
            _say(f"{number.name} again: stopping at once")
            os._exit(128 + number)
        is_first, self._may_force = (
            not self.is_asked,
            self._may_force or number is not signal.SIGHUP,
        )
        if not is_first:
            return
        self.received = number
        self.ask()  # before printing, because the terminal may be gone
        _say(f"{number.name}: stopping in order and {self._then}; once more stops at once")


async def unless_set(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`; cancel it when `event` is set, and wait until it has cleaned up.

    Raises: what `work` raises; CancelledError if the caller itself was cancelled.
    """
    doing, is_set = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((doing, is_set), return_when=asyncio.FIRST_COMPLETED)
    finally:
        # also if the caller is cancelled: `work` uses what the caller closes next
        is_set.cancel()
        doing.cancel()
        await asyncio.wait((doing, is_set))
    if not doing.cancelled():
        doing.result()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
