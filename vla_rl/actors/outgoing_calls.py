"""The calls of one actor on their way out: a place in the mailbox, the message, and what follows it.

    try_enter, or enter ─► send ─► the table of unanswered calls
                            grant, cancel: later messages about a call that has no answer yet

Invariant: each call that was sent leaves `unanswered` by an answer or by the end of the
incarnation. A place in the mailbox is held for exactly that long, also by a call whose caller was
cancelled.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vla_rl.actors.actor import ActorMethod, MethodTable
from vla_rl.actors.call_deadlines import CallDeadlines
from vla_rl.actors.call_limit import CallLimit
from vla_rl.actors.channel import Channel
from vla_rl.actors.life import Life, State
from vla_rl.actors.mailbox import Mailbox
from vla_rl.actors.pending import PendingCall, PendingStream
from vla_rl.actors.wire import OWN_CALL, Kind

# plain numbers: access to an enum member costs a dictionary lookup for each message
_CALL = int(Kind.CALL)
_RUNNING = State.RUNNING


class OutgoingCalls:
    """Sends calls to the current incarnation of an actor.

    Args:
        name: the actor's name.
        table: its methods.
        life: its state; calls wait for a running incarnation.
        mailbox: places for unanswered calls.
        deadlines_s, limits: see `ActorClient`.
        freeze: called with the cause if the actor counts as frozen.

    Attributes:
        channel: channel to the current incarnation; None between two, and after the last.
        unanswered: calls that have no answer yet, by number, in the order in which they were sent.
        ids: numbers of calls, shared with all other questions to the actor.
        deadlines: deadlines of the unanswered calls.
    """

    def __init__(
        self,
        name: str,
        table: MethodTable,
        life: Life,
        mailbox: Mailbox,
        deadlines_s: Sequence[float | None],
        limits: Mapping[int, CallLimit],
        freeze: Callable[[str], None],
    ) -> None:
        self._name, self._life, self._mailbox = name, life, mailbox
        self._labels = [f"{name}.{entry.name}" for entry in table.methods]
        self.channel: Channel | None = None
        self.unanswered: dict[int, PendingCall] = {}
        self.ids = itertools.count(OWN_CALL + 1)
        self.deadlines = CallDeadlines(
            name,
            self.unanswered,
            lambda: self.channel,
            deadlines_s,
            limits,
            freeze=freeze,
            cancel=self.cancel,
        )

    def try_enter(self) -> bool:
        """Take a place in the mailbox if a call may be sent now; return whether it may."""
        if self._life.state is not _RUNNING or not self._mailbox.try_enter():
            return False
        if self.channel is None or self.channel.has_room:
            return True
        self._mailbox.leave()
        return False

    async def enter(self) -> None:
        """Wait for a place in the mailbox of a running incarnation, and for room on the way to it.

        Raises: ActorDied if there will be none.
        """
        await self._mailbox.enter()
        try:
            await self._life.until_running()
            channel = None
            while channel is not self.channel:  # another incarnation, if it died meanwhile
                channel = self.channel
                assert channel is not None
                await channel.until_room()
                await self._life.until_running()
        except BaseException:
            self._mailbox.leave()
            raise

    def send(self, method: ActorMethod, args: tuple[Any, ...], pending: PendingCall) -> int:
        """Send a call that has its place in the mailbox; return its number.

        Raises: TypeError for arguments that no message can hold; the place is free again then.
        """
        channel = self.channel
        assert channel is not None
        call = next(self.ids)
        try:
            frames = channel.codec.encode(
                _CALL, method.index, channel.actor_id, call, args, self._labels[method.index]
            )
        except TypeError:
            self._mailbox.leave()
            raise
        self.unanswered[call] = pending
        channel.send(frames)
        self.deadlines.note_sent(pending, args)
        return call

    def grant(self, call: int, pending: PendingStream, items: int) -> None:
        """Allow the actor to send more items of a stream."""
        if call in self.unanswered and self.channel is not None:
            pending.num_granted += items
            pending.since = time.monotonic()
            self.deadlines.note_turn(pending)
            self._tell(self.channel, Kind.CREDIT, items, call)

    def cancel(self, call: int) -> None:
        """Ask the actor to stop working on a call.

        The call stays unanswered until the actor has answered.
        """
        pending, channel = self.unanswered.get(call), self.channel
        if pending is not None and channel is not None:
            if isinstance(pending, PendingStream):
                pending.cancel()
                self.deadlines.note_turn(pending)
            self._tell(channel, Kind.CANCEL, 0, call)

    def fail(self) -> None:
        """Fail each unanswered call with the actor's death, as the incarnation has ended."""
        calls = [*self.unanswered.values()]
        self.unanswered.clear()
        for call in calls:
            call.fail(self._life.death())
            self._mailbox.leave()
        self.deadlines.stop()

    def ask_to_stop(self) -> None:
        """Have the actor end after the calls that it has."""
        if self.channel is not None:
            self._tell(self.channel, Kind.STOP, 0, 0)

    def _tell(self, channel: Channel, kind: Kind, index: int, call: int) -> None:
        channel.send(channel.codec.encode(kind, index, channel.actor_id, call, None, self._name))
