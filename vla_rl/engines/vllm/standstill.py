"""Tell an engine that stands still from an observer that was not there to look.

Pure: no thread, no clock. The state that the kernel shows for a process decides, so a slow or starved one is never taken
for a stopped one.
"""

from pathlib import Path
from typing import Final

STOPPED_S: Final = 1.5
"""Seconds for which a process is stopped before it counts as frozen. Job managers stop and resume the processes of a job
one after another, which takes less."""

LONGEST_GAP_S: Final = 1.0
"""Most seconds that count between two looks. During a longer gap the observer was stopped itself (Ctrl-Z) or starved, so
what it waited for could not reach it."""


class Standstill:
    """The verdict on one process, or on a few that count as one.

    Attributes:
        lived_s: seconds since the first look, in which no gap between two looks counts for more than `LONGEST_GAP_S`.
    """

    def __init__(self) -> None:
        self.lived_s = 0.0
        self._last_look: float | None = None
        self._stopped_since: float | None = None

    def pass_time(self, now: float) -> float:
        """Count the time until `now`, in seconds of a monotonic clock, and return `lived_s`."""
        if self._last_look is not None:
            self.lived_s += min(now - self._last_look, LONGEST_GAP_S)
        self._last_look = now
        return self.lived_s

    def observe(self, now: float, is_stopped: bool) -> bool:
        """Return whether the process is frozen: stopped at every look for `STOPPED_S` of lived time."""
        lived_s = self.pass_time(now)
        if not is_stopped:
            self._stopped_since = None
            return False
        if self._stopped_since is None:
            self._stopped_since = lived_s
        return lived_s - self._stopped_since >= STOPPED_S


def is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped the process; False if a debugger holds it or it is dead."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(") ")[2].startswith("T")
