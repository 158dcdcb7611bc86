"""Find calls that an actor should have answered by now, with one timer for all of its calls."""

import asyncio
import math
import time
from collections.abc import Callable, Mapping

from vla_rl.actors.actor import MethodTable
from vla_rl.actors.pending import PendingCall

_CONFIRM_AFTER_S = 0.005
_CONFIRM_WITHIN_S = 1.0


def deadlines_of(
    table: MethodTable, actors: float | None, by_name: Mapping[str, float]
) -> list[float | None]:
    """Return the deadline of each method (s).

    It is that by the method's name, else by its mark in the class, else the actor's.

    Raises: ValueError for a name that no method has, or a deadline that is not positive.
    """
    if actors is not None and not actors > 0:
        raise ValueError(f"deadline_s is {actors}, expected more than 0 seconds, or None for ever.")
    for name, deadline_s in by_name.items():
        if name not in table.by_name or not deadline_s > 0:
            raise ValueError(
                f"deadline of {name} is {deadline_s} s, expected more than 0 s, for one of "
                f"{[*table.by_name]}."
            )
    return [by_name.get(entry.name) or entry.deadline_s or actors for entry in table.methods]


class DeadlineWatch:
    """Watches the unanswered calls of one actor, given in the order in which they were sent.

    A serial actor works on one call at a time: the time of a call that waits behind another starts
    when that one is answered. A stream without credit waits for its consumer, so its time is not
    counted. A call that the consumer itself makes meanwhile is counted, since otherwise neither
    would ever end.

    Args:
        calls: the live table of unanswered calls.
        poll: delivers answers that have arrived but were not read.
        on_overdue: called with the call whose deadline has passed.
    """

    def __init__(
        self,
        calls: Callable[[], Mapping[int, PendingCall]],
        poll: Callable[[], None],
        on_overdue: Callable[[PendingCall], None],
    ) -> None:
        self._calls, self._poll, self._on_overdue = calls, poll, on_overdue
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.next_look = math.inf
        """Time of the next check (time.monotonic seconds); `schedule_check` only matters before it."""
        self.answered_at = 0.0
        """Time at which the actor last answered a serial call (time.monotonic seconds); its owner
        writes this."""

    def schedule_check(self, due: float) -> None:
        """Have the calls checked at `due` or earlier."""
        if self.next_look <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.next_look = due
        self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._check)

    def stop(self) -> None:
        """Stop watching, until the next `schedule_check`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.next_look = math.inf

    def forgive(self, lost_s: float) -> None:
        """Exclude the last `lost_s` seconds from each call's deadline.

        Our loop, and perhaps the actor, did not run.
        """
        now = time.monotonic()
        # never into the future: a call sent during the pause would get more than its deadline
        for pending in self._calls().values():
            pending.since = min(now, pending.since + lost_s)
        self.answered_at = min(now, self.answered_at + lost_s)

    def _check(self, confirmed: bool = False) -> None:
        """Report an overdue call; otherwise schedule the next check.

        Our own loop may have been busy for longer than the deadline, with the answer waiting in the
        socket. So read the socket first, and let the loop take a turn before the actor counts as
        frozen. If the loop stood still for longer than a second, `forgive` is called within the
        second for which this then waits.
        """
        late_s = time.monotonic() - self.next_look
        self._timer, self.next_look = None, math.inf
        self._poll()
        now = time.monotonic()
        due, overdue = self._next_due(now)
        if overdue is None:
            if due < float("inf"):
                self.schedule_check(due)
        elif confirmed:
            self._on_overdue(overdue)
        else:
            # as late as this timer was, our loop was: it needs as long to read what waits in its sockets
            self.next_look = now
            again_s = min(max(late_s, _CONFIRM_AFTER_S), _CONFIRM_WITHIN_S)
            self._timer = self._loop.call_later(again_s, self._check, True)

    def _next_due(self, now: float) -> tuple[float, PendingCall | None]:
        """Return when the next deadline may pass, and the call whose deadline has passed."""
        next_due, ahead = float("inf"), None
        for pending in self._calls().values():
            if pending.deadline_s is not None and pending.expects_answer:
                if pending.concurrent:
                    due = pending.since + pending.deadline_s
                elif ahead is not None and ahead.waits_for_caller_of(pending):
                    due = max(pending.since, ahead.since) + pending.deadline_s
                elif ahead is not None:
                    due = now + pending.deadline_s
                else:
                    due = max(pending.since, self.answered_at) + pending.deadline_s
                if due <= now:
                    return due, pending
                next_due = min(next_due, due)
            if ahead is None and not pending.concurrent:
                ahead = pending
        return next_due, None
