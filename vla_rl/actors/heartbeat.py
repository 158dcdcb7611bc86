"""Decide whether a process is frozen, from an observer's measurements.

A plain class with no thread and no clock.

    its beat changed             it is alive; all counters start again
    STOPPED  (SIGSTOP)           counted; frozen after `stopped_after_s`
    ASLEEP   without a beat      counted; frozen after `silent_after_s`
    RUNNING  without a beat      not counted: it holds the interpreter lock, or waits for a core
    TRACED                       not counted: a debugger holds it

Only time in which the observer itself ran is counted: between two looks at most twice its interval.
A process is therefore frozen only after several looks. A process that stood still together with its
observer (Ctrl-Z and `fg`, a suspended machine, a machine with thirty times more work than cores) is
not.
"""

import enum
import math

_MOST_COUNTED = 2.0
"""Longest time between two looks that is counted, in intervals of the observer."""


class ObservedTime:
    """Time in which an observer ran, between looks at intervals of `look_every_s`."""

    def __init__(self, look_every_s: float) -> None:
        self._most_counted_s = _MOST_COUNTED * look_every_s
        self._seen_at = -math.inf
        self.total_s = 0.0
        """Time since the first look (s)."""

    def pass_time(self, now: float) -> float:
        """Count the time from the last look to `now`, and return the counted time (s).

        `now` is of a clock that never goes back.
        """
        counted_s = (
            0.0
            if self._seen_at == -math.inf
            else min(max(0.0, now - self._seen_at), self._most_counted_s)
        )
        self._seen_at = now
        self.total_s += counted_s
        return counted_s


class ProcessState(enum.Enum):
    """State of a process, as the kernel reports it."""

    RUNNING = enum.auto()
    """One of its threads runs, waits for a core or a device, or used CPU time since the last
    look."""
    ASLEEP = enum.auto()
    """All threads wait for something."""
    STOPPED = enum.auto()
    """Stopped by a signal; SIGCONT would continue it."""
    TRACED = enum.auto()
    """A debugger is attached."""


class Verdict(enum.Enum):
    """Conclusion from the observations so far."""

    ALIVE = enum.auto()
    QUIET = enum.auto()
    """No beat since the last look, but no reason yet to count it as frozen."""
    STOPPED = enum.auto()
    """Frozen: stopped for too long."""
    SILENT = enum.auto()
    """Frozen: asleep without a beat for too long."""

    @property
    def is_frozen(self) -> bool:
        """Whether the process has to be killed."""
        return self in (Verdict.STOPPED, Verdict.SILENT)


class Heartbeat:
    """Classifies one process from its observations, given in order.

    Args:
        look_every_s: interval at which its observer means to look.
        stopped_after_s: a process that was seen stopped for this long is frozen.
        silent_after_s: a process that was seen asleep for this long, without a beat, is frozen;
            infinite for a process that does not beat.
    """

    def __init__(
        self, *, look_every_s: float, stopped_after_s: float, silent_after_s: float = math.inf
    ) -> None:
        self._time = ObservedTime(look_every_s)
        self._stopped_after_s, self._silent_after_s = stopped_after_s, silent_after_s
        self._beat: int | None = None
        self.stopped_s = 0.0
        """Time for which it was seen stopped (s)."""
        self.silent_s = 0.0
        """Time for which it was seen stopped or asleep since its last beat (s)."""

    def observe(self, now: float, beat: int, state: ProcessState) -> Verdict:
        """Evaluate one look.

        Args:
            now: time of the look (s, any clock that does not go back).
            beat: any number that changes while the process is alive; a constant for one that does
                not beat.
            state: state of the process at that moment; ignored if the beat has changed.
        """
        counted_s = self._time.pass_time(now)
        # whatever the kernel says of it: a beat can only come from a process that runs
        if beat != self._beat:
            self._beat, self.stopped_s, self.silent_s = beat, 0.0, 0.0
            return Verdict.ALIVE
        self.stopped_s = self.stopped_s + counted_s if state is ProcessState.STOPPED else 0.0
        if state in (ProcessState.STOPPED, ProcessState.ASLEEP):
            self.silent_s += counted_s
        if self.stopped_s >= self._stopped_after_s:
            return Verdict.STOPPED
        if self.silent_s >= self._silent_after_s:
            return Verdict.SILENT
        return Verdict.QUIET
