"""The deadlines of one actor's calls, enforced with one timer for all of them.

sent ─► deadline of its method, or of what earlier calls took ─► DeadlineWatch ─► overdue
overdue ─► inside a stream that waits for its own caller: both fail, and the actor goes on
        └► else the actor counts as frozen
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence

from vla_rl.actors.calls.actor import MethodTable
from vla_rl.actors.calls.pending import CallLimit, PendingCall
from vla_rl.actors.processes.channels import Channel

# An answer may lie in the socket unread, because our loop was busy: it is read before an actor is killed.
_CONFIRM_AFTER_S = 0.005
_CONFIRM_WITHIN_S = 1.0


def resolve_deadlines(
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


def resolve_limits(table: MethodTable, by_name: Mapping[str, CallLimit]) -> dict[int, CallLimit]:
    """Return limits by the index of their method. Raises: ValueError for a name that no method has."""
    for name in by_name:
        if name not in table.by_name:
            raise ValueError(f"there is a limit of {name}, expected one of {[*table.by_name]}.")
    return {table.by_name[name].index: limit for name, limit in by_name.items()}


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
        # One timer for all calls: one for each would be made and cancelled with every call.
        if self.next_look <= due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self.next_look = due
        self._timer = self._loop.call_later(max(0.0, due - time.monotonic()), self._check)

    def stop_timer(self) -> None:
        """Stop watching, until the next `schedule_check`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.next_look = math.inf

    def extend_deadlines(self, lost_s: float) -> None:
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
        frozen. If the loop stood still for longer than a second, `extend_deadlines` is called within the
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
                elif ahead is not None and ahead.waits_for_caller(pending):
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


_now = time.monotonic


class CallDeadlines:
    """Sets and enforces the deadline of each call.

    Args:
        name: the actor's name.
        calls: the live table of unanswered calls, in the order in which they were sent.
        channel: returns the channel to the current incarnation, if there is one.
        deadlines_s: deadline of each method; None for ever.
        limits: by index of a method: shortens the deadline of each of its calls.
        freeze: called with the cause if the actor counts as frozen.
        cancel: asks the actor to stop working on a call.
    """

    def __init__(
        self,
        name: str,
        calls: Mapping[int, PendingCall],
        channel: Callable[[], Channel | None],
        deadlines_s: Sequence[float | None],
        limits: Mapping[int, CallLimit],
        *,
        freeze: Callable[[str], None],
        cancel: Callable[[int], None],
    ) -> None:
        self._name, self._calls, self._channel = name, calls, channel
        self._deadlines_s, self._limits = deadlines_s, limits
        self._freeze, self._cancel = freeze, cancel
        self._watch = DeadlineWatch(lambda: self._calls, self._poll, self._on_overdue)

    def start_watching(self) -> None:
        """Begin with a new incarnation, which has answered nothing yet."""
        self._watch.answered_at = _now()

    def stop_watching(self) -> None:
        """Stop watching: the incarnation has ended, and its calls with it."""
        self._watch.stop_timer()

    def extend_deadlines(self, lost_s: float) -> None:
        """Exclude the last `lost_s` seconds, in which our loop did not run, from each deadline."""
        self._watch.extend_deadlines(lost_s)

    def watch_call(self, pending: PendingCall, args: tuple[object, ...]) -> None:
        """Set the deadline of a call that was sent just now."""
        index = pending.method.index
        pending.deadline_s = deadline_s = self._deadlines_s[index]
        if self._limits and (limit := self._limits.get(index)) is not None:
            pending.limit, pending.num_units = limit, limit.num_units(args)
            pending.deadline_s = deadline_s = self._shortest_s(pending)
        # most calls are due after one that is watched already: they set no timer of their own
        if deadline_s is not None and pending.since + deadline_s < self._watch.next_look:
            self._watch.schedule_check(pending.since + deadline_s)

    def watch_stream(self, pending: PendingCall) -> None:
        """Watch a stream whose deadline starts again: it got credit, or was asked to stop."""
        if pending.deadline_s is not None:
            self._watch.schedule_check(pending.since + pending.deadline_s)

    def record_answer(self, pending: PendingCall) -> None:
        """Learn from an answered call, and start the time of the one behind it."""
        if pending.method.concurrent:
            return
        now = _now()
        if pending.limit is not None:
            worked_s = now - max(pending.since, self._watch.answered_at)
            pending.limit.record_duration(pending.num_units, worked_s)
        self._watch.answered_at = now

    def _poll(self) -> None:
        channel = self._channel()
        if channel is not None:
            channel.poll()

    def _on_overdue(self, pending: PendingCall) -> None:
        channel = self._channel()
        assert channel is not None
        if channel.is_ending:  # it died, and its channel reports that next
            return
        if not pending.concurrent and any(
            ahead.waits_for_caller(pending) for ahead in self._calls.values()
        ):
            self._refuse_inside_stream(pending)
            return
        if pending.limit is not None and (limit_s := self._shortest_s(pending)) != (
            pending.deadline_s
        ):
            # other calls were answered after this one was sent, and its limit has learned since
            pending.deadline_s = limit_s
            self._watch.schedule_check(_now())
            return
        cause = f"{pending.method_name} did not answer within {pending.deadline_s:.4g} s"
        if (
            pending.limit is not None
            and pending.deadline_s != self._deadlines_s[pending.method.index]
        ):
            cause += f" ({pending.limit.record_overdue(pending.num_units)})"
        self._freeze(cause)

    def _shortest_s(self, pending: PendingCall) -> float | None:
        """Return the method's deadline, or the call's current limit if that is shorter."""
        own_s = self._deadlines_s[pending.method.index]
        learned_s = pending.limit.limit_s(pending.num_units) if pending.limit is not None else None
        if own_s is None or (learned_s is not None and learned_s < own_s):
            return learned_s
        return own_s

    def _refuse_inside_stream(self, pending: PendingCall) -> None:
        """Fail a call and the stream before it, which wait for each other.

        The actor works correctly.
        """
        for call, entry in list(self._calls.items()):
            if entry is pending or entry.waits_for_caller(pending):
                if entry is pending:  # the stream keeps its deadline, within which it has to end
                    entry.deadline_s = None
                entry.fail(
                    RuntimeError(
                        f"{self._name}.{pending.method_name} was called during the iteration over "
                        "a stream of the same actor, which ends before the next call begins; call "
                        "it after the iteration, or mark one of the two concurrent."
                    )
                )
                self._cancel(call)
        self._watch.schedule_check(_now())
