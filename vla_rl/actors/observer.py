"""Find the frozen processes of one runtime: a separate thread looks at all of them twice a second.

A look at a process with a heartbeat is a read of shared memory; only a process that missed a beat
costs system calls. The loop is woken only for a frozen process, and checks it once more before the
process is killed.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vla_rl.actors.heartbeat import Heartbeat, ProcessState, Verdict
from vla_rl.actors.process_state import ProcessEye

LOOK_EVERY_S = 0.5


@dataclass(eq=False, kw_only=True)
class Watched:
    """One process under observation."""

    pid: Callable[[], int]
    """Return its process id; 0 until there is one."""
    beat: Callable[[], int]
    """See `Heartbeat.observe`."""
    owes_beat: Callable[[], bool]
    """Return whether it has to beat now; if not, it only counts as frozen if it is stopped."""
    stopped_after_s: float
    silent_after_s: float
    """See `Heartbeat`."""
    on_frozen: Callable[[str], None]
    """Called on the loop, once, with a description of the observation; has to kill the process."""
    is_reported: bool = field(init=False, default=False)
    """Whether the loop was notified and has not checked yet."""
    _heartbeat: Heartbeat = field(init=False)
    _eye: ProcessEye | None = field(init=False, default=None)
    _last_beat: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self._heartbeat = Heartbeat(
            look_every_s=LOOK_EVERY_S,
            stopped_after_s=self.stopped_after_s,
            silent_after_s=self.silent_after_s,
        )

    def look(self, now: float) -> Verdict:
        """Look at the process now; return the verdict."""
        if (pid := self.pid()) == 0:
            return Verdict.QUIET
        beat = self.beat()
        if beat != self._last_beat:
            self._last_beat = beat
            return self._heartbeat.observe(now, beat, ProcessState.RUNNING)
        if self._eye is None or self._eye.pid != pid:
            self._eye = ProcessEye(pid)
        state = self._eye.look()
        if state is ProcessState.ASLEEP and not self.owes_beat():
            state = ProcessState.RUNNING
        return self._heartbeat.observe(now, beat, state)

    def describe(self, verdict: Verdict) -> str:
        """Describe the observation of a frozen process."""
        if verdict is Verdict.STOPPED:
            return f"it was stopped by a signal for {self._heartbeat.stopped_s:.1f} s"
        return f"it gave no sign of life for {self._heartbeat.silent_s:.1f} s and used no CPU time"


class ProcessObserver:
    """Observes processes from its first `watch` until `close`.

    Its methods are called on the loop.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._watched: dict[Watched, None] = {}
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def watch(self, watched: Watched) -> None:
        """Start observing a process."""
        self._watched[watched] = None
        self._loop = asyncio.get_running_loop()
        if self._thread is None and not self._is_closed.is_set():
            thread = threading.Thread(
                target=self._observe, name=f"observer of {self._name}", daemon=True
            )
            thread.start()
            self._thread = thread

    def forget(self, watched: Watched) -> None:
        """Stop observing a process; one that is not observed is ignored."""
        self._watched.pop(watched, None)

    def close(self) -> None:
        """Stop observing."""
        self._is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def _observe(self) -> None:
        while not self._is_closed.wait(LOOK_EVERY_S):
            # a separate function, so that this thread keeps no reference to ended processes
            self._look_at_all()

    def _look_at_all(self) -> None:
        # one atomic step, during which the loop cannot change it
        for watched in list(self._watched):
            if not watched.is_reported and watched.look(time.monotonic()).is_frozen:
                watched.is_reported = True
                self._tell_loop(watched)

    def _tell_loop(self, watched: Watched) -> None:
        assert self._loop is not None
        # the loop has ended, and all of its processes with it
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._look_again, watched)

    def _look_again(self, watched: Watched) -> None:
        """Confirm a verdict on the loop.

        The loop may have been busy, and the process may have continued since, or ended.
        """
        if watched not in self._watched:
            return
        verdict = watched.look(time.monotonic())
        if verdict.is_frozen:
            self.forget(watched)
            watched.on_frozen(watched.describe(verdict))
        watched.is_reported = False
