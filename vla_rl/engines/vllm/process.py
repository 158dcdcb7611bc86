"""The processes of one engine, from their start to their end.

    its process ends ───────► ProcessDescriptor ─┐
    its process is stopped ─► EngineWatch ───────┼► mark_dead ─► died; every waiting caller goes on
    an answer is overdue, or an error ───────────┘

An engine asks the kernel to kill it when its parent dies, and the kernel takes the thread that started a
process for its parent (prctl(2), PR_SET_PDEATHSIG). So an engine needs a thread that stays alive:
`EngineThread`. In return, the kernel's list of that thread's children shows what vLLM has started, from
the first moment; vLLM itself reports it only once the engine is ready.

This is a second owner of processes beside the actors' runtime, from which it takes how an end and a freeze
are found and which time counts (`actors.processes`). An actor cannot own them without losing a promise:

- vLLM's client around its engine, both inside of an actor: the engine is then the actor's child. If a
  signal stops it, the actor's heart beats on, and it would not be replaced within 3 s; and each engine
  costs a process more, which imports torch and vLLM.
- vLLM's engine without a process of its own, stepped by an actor: vLLM 0.32 does not pause such an engine
  as an update needs. It refuses to drain, reports no aborted request, and changes weights below a batch
  that is still on its way, whose tokens would be named after the wrong version.
"""

import asyncio
import contextlib
import math
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, TypeVar

from vla_rl.actors.processes.liveness import (
    FreezeDetector,
    ObservedTime,
    ProcessState,
    find_stopped,
)
from vla_rl.actors.processes.started_process import ProcessDescriptor
from vla_rl.errors import ActorDied, ActorFrozen
from vla_rl.util.tasks import run_in_thread


def describe_exit(pid: int) -> str:
    """Describe how a process ended, as far as the system still knows.

    Only the first to reap a process gets its exit status.
    """
    try:
        end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) if pid else None
    except ChildProcessError:
        end = None
    if end is None:
        return "its process is gone"
    if end.si_code == os.CLD_EXITED:
        return f"its process ended with status {end.si_status}"
    return f"its process was killed by {signal.Signals(end.si_status).name}"


T = TypeVar("T")

KILL_AGAIN_S: Final = 0.1
"""Seconds between two attempts to kill work that keeps starting processes."""


class EngineThread:
    """One thread, from the first `run_work` to `stop_thread`. `name` is the prefix of the thread's name."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, name)
        self._thread_id: int | None = None

    async def run_work(self, work: Callable[[], T]) -> T:
        """Call `work()` in the thread and return its result.

        A cancellation kills the processes that the thread has started, repeatedly until `work`
        ends; then it is raised.
        """
        done = asyncio.wrap_future(self._executor.submit(self._run, work))
        cancelled: asyncio.CancelledError | None = None
        # vLLM waits for its process without a limit of ours, in a thread that cannot be
        # interrupted; it raises as soon as that process is gone.
        while not done.done():
            try:
                await asyncio.wait([done], timeout=None if cancelled is None else KILL_AGAIN_S)
            except asyncio.CancelledError as error:
                cancelled = error
            if cancelled is not None:
                self.kill_processes()
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
            # vLLM tells the process ids only once its engine is ready.
            children = Path(f"/proc/self/task/{self._thread_id}/children").read_text(
                encoding="utf-8"
            )
        except FileNotFoundError:
            return []
        return [pid for pid in map(int, children.split()) if not _is_resource_tracker(pid)]

    def kill_processes(self) -> None:
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

    async def stop_thread(self) -> None:
        """Stop the thread; the kernel then kills the processes that it has started."""
        await run_in_thread(self._executor.shutdown)

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


LOOK_EVERY_S: Final = 0.25
"""Seconds between two looks. A look costs about 20 µs and does not involve the process."""

STOPPED_AFTER_S: Final = 1.5
"""Seconds after which a stopped process counts as frozen. Job managers stop and resume the
processes of a job one after another, which takes less."""


class EngineWatch:
    """Checks an engine's processes from the running loop, between `start_watch` and `end_watch`.

    Deadlines count the time in which this process itself ran (`ObservedTime`). So after Ctrl-Z and
    `fg`, or on an overloaded machine, an engine that could not run either does not count as late.

    Args:
        processes: returns the ids of the processes to check.
        on_frozen: called with the id of a process that was stopped for `STOPPED_AFTER_S`; this ends
            the watch.
    """

    def __init__(
        self, processes: Callable[[], Iterable[int]], on_frozen: Callable[[int], None]
    ) -> None:
        self._processes, self._on_frozen = processes, on_frozen
        self._time = ObservedTime(LOOK_EVERY_S)
        self._heartbeat = FreezeDetector(look_every_s=LOOK_EVERY_S, stopped_after_s=STOPPED_AFTER_S)
        self._deadlines: dict[asyncio.Timeout, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._has_ended = False

    def start_watch(self) -> None:
        """Start checking."""
        self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look)

    def end_watch(self) -> None:
        """Stop checking; all waiting blocks time out at once."""
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for timeout in list(self._deadlines):
            _expire(timeout)

    @contextlib.asynccontextmanager
    async def limit(self, limit_s: float | None) -> AsyncIterator[asyncio.Timeout]:
        """Limit the block to `limit_s` seconds in which this process ran, and to the watch's end.

        None: to its end alone. See `asyncio.timeout`.
        """
        # The looks may be a quarter of a second old, and the block is to have its whole time.
        self._time.pass_time(asyncio.get_running_loop().time())
        async with asyncio.timeout(None) as timeout:
            self._deadlines[timeout] = math.inf if limit_s is None else self._time.total_s + limit_s
            if self._has_ended:
                _expire(timeout)
            try:
                yield timeout
            finally:
                del self._deadlines[timeout]

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LOOK_EVERY_S, self._look)
        now, stopped = loop.time(), find_stopped(self._processes())
        state = ProcessState.RUNNING if stopped is None else ProcessState.STOPPED
        verdict = self._heartbeat.observe(now, 0, state)
        self._time.pass_time(now)
        # Timers of the loop would count the time in which Ctrl-Z or a suspended machine held this
        # process, and expire together when it goes on.
        for timeout, deadline in list(self._deadlines.items()):
            if self._time.total_s >= deadline:
                _expire(timeout)
        if verdict.is_frozen and stopped is not None:
            self._on_frozen(stopped)


def _expire(timeout: asyncio.Timeout) -> None:
    if not timeout.expired():
        timeout.reschedule(asyncio.get_running_loop().time())


class EngineLifecycle:
    """The life of one engine's processes, from `start_watch` to `kill_and_release`.

    Args: `name`, of the engine, in messages.

    Attributes:
        died: set when it is dead.
        cause: cause of its death.
        pid: process id; 0 before the process has reported it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.died = asyncio.Event()
        self.cause = "not started"
        self._thread = EngineThread(name)
        self._watch = EngineWatch(self._processes, self._mark_frozen)
        self.pid = 0
        self._descriptor: ProcessDescriptor | None = None

    def start_watch(self) -> None:
        """Watch whatever `start_processes` starts."""
        self._watch.start_watch()

    async def start_processes(self, work: Callable[[], T]) -> T:
        """Start processes by `work()`, in the thread that they live as long as."""
        return await self._thread.run_work(work)

    def watch_process(self, pid: int) -> None:
        """Note the id that its process has reported: from now on, its end is noticed at once."""
        self.pid, self._descriptor = pid, ProcessDescriptor(pid, self.mark_ended)

    def limit(self, limit_s: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Limit a block that waits for it, as `EngineWatch.limit`: its death ends the block too."""
        return self._watch.limit(limit_s)

    def mark_dead(self, cause: str, *, frozen: bool = False) -> ActorDied:
        """Mark it as dead and return the error for callers.

        A frozen process is killed, so that it cannot answer later.
        """
        if not self.died.is_set():
            # The first cause is kept: closing an engine, or the error of a caller, comes after what
            # ended it.
            self.cause = cause
            self.died.set()
            self._watch.end_watch()  # vLLM raises in waiting calls too, but only after its clean-up
        if frozen:
            self._kill()
        return ActorFrozen(self._name, self.pid, cause) if frozen else self.make_exit_error()

    def mark_ended(self) -> ActorDied:
        """Mark it as dead because its process has ended, and return the error for callers."""
        return self.mark_dead(describe_exit(self.pid))

    def mark_overdue(self, cause: str) -> ActorDied:
        """Return the error after a missed deadline: the engine's death if it has died.

        Otherwise it counts as frozen and is killed.
        """
        return self.make_exit_error() if self.died.is_set() else self.mark_dead(cause, frozen=True)

    def make_exit_error(self) -> ActorDied:
        """Return the error that callers get from now on."""
        return ActorDied(self._name, self.pid, self.cause)

    async def kill_and_release(self) -> None:
        """Kill what still runs, and free what this process holds of it. Call `mark_dead` before."""
        self._kill()
        await self._thread.stop_thread()
        if self._descriptor is not None:
            self._descriptor.close()

    def _mark_frozen(self, pid: int) -> None:
        self.mark_dead(f"its process {pid} was stopped by a signal such as SIGSTOP", frozen=True)

    def _processes(self) -> list[int]:
        """Return the processes to watch: the engine's.

        Before its id is known, they are all processes started for it.
        """
        return [self.pid] if self.pid else self._thread.processes()

    def _kill(self) -> None:
        if self._descriptor is not None:
            self._descriptor.send_kill()
        self._thread.kill_processes()
