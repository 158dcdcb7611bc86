"""The deadlines of one actor's calls: set when a call is sent, and enforced when one has passed.

sent ─► deadline of its method, or of what earlier calls took ─► DeadlineWatch ─► overdue
overdue ─► inside a stream that waits for its own caller: both fail, and the actor goes on
        └► else the actor counts as frozen
"""

import time
from collections.abc import Callable, Mapping, Sequence

from vla_rl.actors.call_limit import CallLimit
from vla_rl.actors.channel import Channel
from vla_rl.actors.deadlines import DeadlineWatch
from vla_rl.actors.pending import PendingCall

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

    def start(self) -> None:
        """Begin with a new incarnation, which has answered nothing yet."""
        self._watch.answered_at = _now()

    def stop(self) -> None:
        """Stop watching: the incarnation has ended, and its calls with it."""
        self._watch.stop()

    def forgive(self, lost_s: float) -> None:
        """Exclude the last `lost_s` seconds, in which our loop did not run, from each deadline."""
        self._watch.forgive(lost_s)

    def note_sent(self, pending: PendingCall, args: tuple[object, ...]) -> None:
        """Set the deadline of a call that was sent just now."""
        index = pending.method.index
        pending.deadline_s = deadline_s = self._deadlines_s[index]
        if self._limits and (limit := self._limits.get(index)) is not None:
            pending.limit, pending.num_units = limit, limit.num_units(args)
            pending.deadline_s = deadline_s = self._shortest_s(pending)
        # most calls are due after one that is watched already: they set no timer of their own
        if deadline_s is not None and pending.since + deadline_s < self._watch.next_look:
            self._watch.schedule_check(pending.since + deadline_s)

    def note_turn(self, pending: PendingCall) -> None:
        """Watch a stream whose deadline starts again: it got credit, or was asked to stop."""
        if pending.deadline_s is not None:
            self._watch.schedule_check(pending.since + pending.deadline_s)

    def note_answered(self, pending: PendingCall) -> None:
        """Learn from an answered call, and start the time of the one behind it."""
        if pending.method.concurrent:
            return
        now = _now()
        if pending.limit is not None:
            worked_s = now - max(pending.since, self._watch.answered_at)
            pending.limit.note(pending.num_units, worked_s)
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
            ahead.waits_for_caller_of(pending) for ahead in self._calls.values()
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
            cause += f" ({pending.limit.note_overdue(pending.num_units)})"
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
            if entry is pending or entry.waits_for_caller_of(pending):
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
