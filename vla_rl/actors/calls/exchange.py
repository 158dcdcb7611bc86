"""The messages of one actor's calls, on their way out or back.

    try_take_slot, or take_slot ─► send_call ─► the table of unanswered calls
                            grant_items, cancel_call: later messages about a call that has no answer yet
    each message that comes back ends a call, or adds an item to a stream

Invariant: each call that was sent leaves `unanswered` by an answer or by the end of the
incarnation. A slot in the mailbox is held for exactly that long, also by a call whose caller was
cancelled.
"""

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from vla_rl.actors.calls.actor import ActorMethod, MethodTable
from vla_rl.actors.calls.deadlines import CallDeadlines
from vla_rl.actors.calls.pending import (
    ActorLifecycle,
    ActorState,
    CallLimit,
    Mailbox,
    PendingCall,
    PendingStream,
)
from vla_rl.actors.processes.channels import Channel
from vla_rl.actors.wire.envelope import (
    ENVELOPE,
    ENVELOPE_SIZE,
    MAGIC,
    OWN_CALL,
    Frames,
    Kind,
    MalformedMessage,
)
from vla_rl.actors.wire.sockets import count_array_bytes
from vla_rl.errors import ActorDied
from vla_rl.util.error_reports import ErrorReport, restore_error

# plain numbers: access to an enum member costs a dictionary lookup for each message
_CALL = int(Kind.CALL)
_RUNNING = ActorState.RUNNING


class OutgoingCalls:
    """Sends calls to the current incarnation of an actor.

    Args:
        name: the actor's name.
        table: its methods.
        lifecycle: its state; calls wait for a running incarnation.
        mailbox: slots for unanswered calls.
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
        lifecycle: ActorLifecycle,
        mailbox: Mailbox,
        deadlines_s: Sequence[float | None],
        limits: Mapping[int, CallLimit],
        freeze: Callable[[str], None],
    ) -> None:
        self._name, self._lifecycle, self._mailbox = name, lifecycle, mailbox
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
            cancel=self.cancel_call,
        )

    def try_take_slot(self) -> bool:
        """Take a slot in the mailbox if a call may be sent now; return whether it may."""
        if self._lifecycle.state is not _RUNNING or not self._mailbox.try_take_slot():
            return False
        if self.channel is None or self.channel.has_room:
            return True
        self._mailbox.free_slot()
        return False

    async def take_slot(self) -> None:
        """Wait for a slot in the mailbox of a running incarnation, and for room on the way to it.

        Raises: ActorDied if there will be none.
        """
        # waits for                                   woken by
        # a slot: `Mailbox.take_slot`                 the answer that frees one, in order of request
        # an incarnation: `until_running`             READY of the next one, or the error that there is none
        # bytes on the way: `Channel.until_room`      RECEIVED of the reader, or the end of the link
        await self._mailbox.take_slot()
        try:
            await self._lifecycle.until_running()
            channel = None
            while channel is not self.channel:  # another incarnation, if it died meanwhile
                channel = self.channel
                assert channel is not None
                await channel.until_room()
                await self._lifecycle.until_running()
        except BaseException:
            self._mailbox.free_slot()
            raise

    def send_call(self, method: ActorMethod, args: tuple[Any, ...], pending: PendingCall) -> int:
        """Send a call that has its slot in the mailbox; return its number.

        Raises: TypeError for arguments that no message can hold; the slot is free again then.
        """
        channel = self.channel
        assert channel is not None
        call = next(self.ids)
        try:
            frames = channel.codec.encode(
                _CALL, method.index, channel.actor_id, call, args, self._labels[method.index]
            )
        except TypeError:
            self._mailbox.free_slot()
            raise
        # The table first: an actor in this loop may answer before `send_message` returns.
        self.unanswered[call] = pending
        channel.send_message(frames)
        self.deadlines.watch_call(pending, args)
        return call

    def grant_items(self, call: int, pending: PendingStream, items: int) -> None:
        """Allow the actor to send more items of a stream."""
        if call in self.unanswered and self.channel is not None:
            pending.num_granted += items
            pending.since = time.monotonic()
            self.deadlines.watch_stream(pending)
            self._send_message(self.channel, Kind.CREDIT, items, call)

    def cancel_call(self, call: int) -> None:
        """Ask the actor to stop working on a call.

        The call stays unanswered until the actor has answered.
        """
        pending, channel = self.unanswered.get(call), self.channel
        # The slot stays taken until the answer comes: a caller that cancels and calls again in a loop would
        # otherwise have any number of calls at work in the actor.
        if pending is not None and channel is not None:
            if isinstance(pending, PendingStream):
                pending.cancel()
                self.deadlines.watch_stream(pending)
            self._send_message(channel, Kind.CANCEL, 0, call)

    def fail_calls(self) -> None:
        """Fail each unanswered call with the actor's death, as the incarnation has ended."""
        # Emptied before anything fails: a caller that is woken may send its next call at once.
        calls = [*self.unanswered.values()]
        self.unanswered.clear()
        for call in calls:
            call.fail(self._lifecycle.make_exit_error())
            self._mailbox.free_slot()
        self.deadlines.stop_watching()

    def ask_to_stop(self) -> None:
        """Have the actor end after the calls that it has."""
        if self.channel is not None:
            self._send_message(self.channel, Kind.STOP, 0, 0)

    def _send_message(self, channel: Channel, kind: Kind, index: int, call: int) -> None:
        channel.send_message(
            channel.codec.encode(kind, index, channel.actor_id, call, None, self._name)
        )


logger = logging.getLogger(__name__)

# plain numbers: access to an enum member costs a dictionary lookup for each message
_RESULT, _ERROR, _ITEM = int(Kind.RESULT), int(Kind.ERROR), int(Kind.ITEM)
_unpack = ENVELOPE.unpack_from


class Answers:
    """Hands the messages of an actor to the calls that wait for them.

    No message can break it: what cannot be read is counted, and its call fails.

    Args:
        name: the actor's name.
        calls: the table of unanswered calls; an answered one leaves it here.
        questions: those to the actor's process that have no answer yet.
        mailbox: its slots; an answer frees one.
        deadlines: deadlines of the calls.
        cancel: asks the actor to stop working on a call.

    Attributes:
        num_rejected: number of messages that could not be read.
    """

    def __init__(
        self,
        name: str,
        calls: dict[int, PendingCall],
        questions: dict[int, PendingCall],
        mailbox: Mailbox,
        deadlines: CallDeadlines,
        cancel: Callable[[int], None],
    ) -> None:
        self._name, self._calls, self._questions = name, calls, questions
        self._mailbox, self._deadlines, self._cancel = mailbox, deadlines, cancel
        self._channel: Channel | None = None
        self._error_decoder: msgspec.msgpack.Decoder[Any] | None = None
        self.num_rejected = 0

    def set_channel(self, channel: Channel) -> None:
        """Take the messages of a new incarnation from now on."""
        self._error_decoder = channel.codec.get_decoder(ErrorReport)
        self._channel = channel

    def clear_channel(self) -> None:
        """Reject all messages until the next incarnation."""
        self._channel = None

    def on_message(self, frames: Frames) -> None:
        """Take one message from the channel; never raises."""
        head = frames[0]
        try:
            if len(head) < ENVELOPE_SIZE:
                raise MalformedMessage(
                    f"message of {len(head)} bytes, expected at least {ENVELOPE_SIZE}."
                )
            magic, kind, _, _, _, call = _unpack(head)
            pending = self._calls.get(call)
            channel = self._channel
            if magic != MAGIC or channel is None:
                raise MalformedMessage("bytes that are not a message of a living actor.")
            if pending is None:
                self._take_unasked(channel, kind, call, frames)
            elif kind == _ITEM:
                self._take_item(channel, call, pending, frames)
            else:
                try:
                    self._take_answer(channel, kind, pending, frames)
                finally:
                    del self._calls[call]
                    self._mailbox.free_slot()
                    self._deadlines.record_answer(pending)
        # One line, however many there are: a peer that sends rubbish must not fill a disk with our log.
        except MalformedMessage as error:
            self.num_rejected += 1
            if self.num_rejected == 1:
                logger.warning(
                    "%s: rejected a message: %s Later ones are only counted.", self._name, error
                )

    def _take_unasked(self, channel: Channel, kind: int, call: int, frames: Frames) -> None:
        """Take an answer of the actor's process, or the report of its end."""
        if kind in (_RESULT, _ERROR) and call in self._questions:
            try:
                self._take_answer(channel, kind, self._questions[call], frames)
            finally:
                del self._questions[call]
        elif kind == _ERROR and call == OWN_CALL:
            self._log_failed_end(channel, frames)
        else:
            raise MalformedMessage(f"answer to call {call}, which is not pending.")

    def _take_item(self, channel: Channel, call: int, pending: PendingCall, frames: Frames) -> None:
        # An item beyond the credit would let one actor fill the memory of its caller.
        if not isinstance(pending, PendingStream) or pending.num_granted == 0:
            raise MalformedMessage(f"an unexpected stream item from {pending.method_name}.")
        if pending.future.done():  # it failed: an item is missing, so later ones are dropped
            channel.codec.discard(frames)
            return
        num_bytes = count_array_bytes(
            frames
        )  # counted first: large frames are gone once they are read
        try:
            item = channel.codec.decode(pending.decoder, frames)
        except msgspec.ValidationError as error:
            pending.fail(
                TypeError(
                    f"{self._name}.{pending.method_name} yielded another type than it "
                    f"declares: {error}"
                )
            )
            self._cancel(call)
            return
        except MalformedMessage as error:
            pending.fail(error)
            self._cancel(call)
            raise
        pending.add_item(item, num_bytes)

    def _take_answer(
        self, channel: Channel, kind: int, pending: PendingCall, frames: Frames
    ) -> None:
        codec = channel.codec
        if pending.future.done():
            # nobody reads it, but its arrays hold slots of shared memory until they are released
            codec.discard(frames)
            return
        try:
            if kind == _RESULT:
                pending.future.set_result(codec.decode(pending.decoder, frames))
                pending.wake_waiter()
            elif kind == Kind.END:
                pending.succeed(None)
            elif kind == Kind.ERROR:
                assert self._error_decoder is not None
                report = codec.decode(self._error_decoder, frames)
                pending.fail(restore_error(report, self._name, channel.pid))
            elif kind == Kind.CANCELLED:
                # cancelled by the actor: if the caller did it, the future is done
                pending.fail(
                    ActorDied(self._name, channel.pid, "stopped while this call was running")
                )
            else:
                raise MalformedMessage(f"answer of kind {kind}.")
        except msgspec.ValidationError as error:
            pending.fail(
                TypeError(
                    f"{self._name}.{pending.method_name} returned another type than it "
                    f"declares: {error}"
                )
            )
        except MalformedMessage as error:
            pending.fail(error)
            raise
        except Exception as error:  # whatever the message does, its call ends
            problem = MalformedMessage(f"its answer cannot be read: {error!r}")
            pending.fail(problem)
            raise problem from error

    def _log_failed_end(self, channel: Channel, frames: Frames) -> None:
        """Log the error that an actor reports about its own end. Raises: MalformedMessage."""
        assert self._error_decoder is not None
        try:
            report = channel.codec.decode(self._error_decoder, frames)
        except msgspec.ValidationError as problem:
            raise MalformedMessage(f"its last message cannot be read: {problem}.") from None
        error = restore_error(report, self._name, channel.pid)
        logger.error(
            "actor %r (pid %d) failed while it ended, usually in its on_stop; it has ended anyway.",
            self._name,
            channel.pid,
            exc_info=error,
        )
