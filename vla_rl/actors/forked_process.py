"""A forked child as its channel sees it.

The server reports how it ended, and the kernel reports that it ended.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from vla_rl.actors.fork_protocol import Fork
from vla_rl.actors.spawned_process import OnExit, cause_of

_STATUS_WITHIN_S = 10.0
"""Time to wait for the server's report on a child's end: on a busy machine its only thread may be
delayed."""


class ForkedProcess:
    """One child of a fork server. See `StartedProcess`.

    Args:
        withdraw: takes it off the server's queue; returns False if it was requested already.
        request, fds: what its server sends, and closes with `close_fds`: stderr and shared memory.
        on_exit: see `OnExit`.
    """

    def __init__(
        self,
        withdraw: Callable[["ForkedProcess"], bool],
        request: Fork,
        fds: list[int],
        on_exit: OnExit,
    ) -> None:
        self._withdraw, self.request, self._on_exit = withdraw, request, on_exit
        self._loop = asyncio.get_running_loop()
        self.pid = 0
        rope, self._rope = os.pipe()  # the child dies when ours is closed, at the latest with us
        self.fds = [rope, *fds]
        self._pidfd = -1
        self._is_doomed = self._is_gone = False
        self.has_ended = False
        self._server_is_lost = False
        self._timer: asyncio.TimerHandle | None = None

    def close_fds(self) -> None:
        """Close the descriptors that were sent."""
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def kill(self) -> None:
        """Send SIGKILL; if it is not forked yet, it will not be, or will be killed at once."""
        self._is_doomed = True
        if self._pidfd >= 0:
            # its server has reaped it, and will report that
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        elif not self._is_gone and self._withdraw(self):
            self.end_unborn("killed before it was forked", ())

    def on_forked(self, pid: int, pidfd: int) -> None:
        """Record that the child was forked."""
        self.pid, self._pidfd = pid, pidfd
        self._loop.add_reader(pidfd, self._on_gone)
        if self._is_doomed:
            self.kill()

    def on_status(self, returncode: int) -> None:
        """Record that the server has reaped it."""
        self._end(cause_of(returncode))

    def on_server_lost(self) -> None:
        """Record that the server has ended: its report on this child's end will not come."""
        self._server_is_lost = True
        if self.has_ended:
            self._end_unknown()

    def end_unborn(self, cause: str, words: tuple[str, ...]) -> None:
        """Report the end of a child that was never forked."""
        self._finish(cause, words)

    def _on_gone(self) -> None:
        """Wait for the server's report on how it ended, unless the server itself has ended."""
        self.has_ended = True
        self._loop.remove_reader(self._pidfd)
        if self._server_is_lost:
            self._end_unknown()
        else:
            self._timer = self._loop.call_later(_STATUS_WITHIN_S, self._end_unknown)

    def _end_unknown(self) -> None:
        self._end(
            "unknown, since its fork server is gone"
            if self._server_is_lost
            else "unknown to its fork server"
        )

    def _end(self, cause: str) -> None:
        if self._is_gone:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        self._finish(cause, ())

    def _finish(self, cause: str, words: tuple[str, ...]) -> None:
        if self._is_gone:
            return
        self._is_gone = self.has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        os.close(self._rope)
        self.close_fds()
        self._on_exit(cause, words)
