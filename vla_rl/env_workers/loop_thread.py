"""An event loop with a runtime, in a separate thread, for callers without a loop."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from vla_rl.actors import Runtime

T = TypeVar("T")


class LoopThread:
    """Runs coroutines for synchronous code. `close` ends the runtime and all its actors.

    Args:
        name: name of the thread and of its runtime.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._stop = asyncio.Event()
        self._ready: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, Runtime]] = (
            concurrent.futures.Future()
        )
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self._loop, self.runtime = self._ready.result()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine in the thread's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """End the runtime and the thread; closing again does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._live())
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)

    async def _live(self) -> None:
        async with Runtime(name=self._name) as runtime:
            self._ready.set_result((asyncio.get_running_loop(), runtime))
            await self._stop.wait()
