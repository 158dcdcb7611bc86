"""The thread that starts the processes of one engine, and lives as long as they do.

An engine asks the kernel to kill it when its parent dies, and the kernel takes the thread that
started a process for its parent (prctl(2), PR_SET_PDEATHSIG). So an engine needs a thread that
stays alive. In return, the kernel's list of that thread's children shows what vLLM has started,
from the first moment; vLLM itself reports it only once the engine is ready.
"""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from vla_rl.actors.completion import run_to_its_end

T = TypeVar("T")

KILL_AGAIN_S: Final = 0.1
"""Seconds between two attempts to kill work that keeps starting processes."""


class EngineThread:
    """One thread, from the first `run` to `close`. `name` is the prefix of the thread's name."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._thread_id: int | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work()` in the thread and return its result.

        A cancellation kills the processes that the thread has started, repeatedly until `work`
        ends; then it is raised.
        """
        done = asyncio.wrap_future(self._executor.submit(self._run, work))
        cancelled: asyncio.CancelledError | None = None
        while not done.done():
            try:
                await asyncio.wait([done], timeout=None if cancelled is None else KILL_AGAIN_S)
            except asyncio.CancelledError as error:
                cancelled = error
            if cancelled is not None:
                self.kill()
        if cancelled is not None:
            done.exception()  # the caller was cancelled and cannot use it
            raise cancelled
        return done.result()

    def processes(self) -> list[int]:
        """Return the ids of the processes that the thread has started and that were not reaped yet.

        The list is empty if the kernel lists no children (CONFIG_PROC_CHILDREN).
        """
        if self._thread_id is None:
            return []
        try:
            children = Path(f"/proc/self/task/{self._thread_id}/children").read_text(
                encoding="utf-8"
            )
        except FileNotFoundError:
            return []
        return [pid for pid in map(int, children.split()) if not _is_resource_tracker(pid)]

    def kill(self) -> None:
        """Send SIGKILL to all of them."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                pidfd = os.pidfd_open(pid)
                try:
                    # otherwise another process may have the number by now
                    if pid in self.processes():
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                finally:
                    os.close(pidfd)

    async def close(self) -> None:
        """Stop the thread; the kernel then kills the processes that it has started."""
        await run_to_its_end(self._executor.shutdown)

    def _run(self, work: Callable[[], T]) -> T:
        self._thread_id = threading.get_native_id()
        return work()


def _is_resource_tracker(pid: int) -> bool:
    """Return whether it is multiprocessing's resource tracker.

    That serves this whole process and ends by itself.
    """
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
