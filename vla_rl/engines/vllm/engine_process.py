"""The process of one engine, through the kernel: its end, how it ended, and its kill."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable


class EngineProcess:
    """One process, known from the moment it reports its id; `close` lets go of it.

    Attributes:
        pid: process id; 0 before it is known.
    """

    def __init__(self) -> None:
        self.pid = 0
        self._pidfd: int | None = None

    def watch(self, pid: int, on_end: Callable[[], object]) -> None:
        """Call `on_end` at once when it ends: the kernel makes its descriptor readable then."""
        self.pid, self._pidfd = pid, os.pidfd_open(pid)

        def ended() -> None:
            self._stop_watching()
            on_end()

        asyncio.get_running_loop().add_reader(self._pidfd, ended)

    def how_it_ended(self) -> str:
        """Describe how it ended, as far as the system still knows.

        Only the first to reap a process gets its exit status.
        """
        try:
            end = (
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
                if self.pid
                else None
            )
        except ChildProcessError:
            end = None
        if end is None:
            return "its process is gone"
        if end.si_code == os.CLD_EXITED:
            return f"its process ended with status {end.si_status}"
        return f"its process was killed by {signal.Signals(end.si_status).name}"

    def kill(self) -> None:
        """Kill it through its descriptor, because another process may have its number by now."""
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching, and close the descriptor."""
        if self._pidfd is not None:
            self._stop_watching()
            os.close(self._pidfd)
            self._pidfd = None

    def _stop_watching(self) -> None:
        assert self._pidfd is not None
        asyncio.get_running_loop().remove_reader(self._pidfd)
