"""The caller's end: sends calls, matches answers, watches deadlines. Outlives the incarnations of
its actor.

Invariant: each call that was sent leaves `_pending` by an answer or by the end of the incarnation,
so no future outlives its peer. A place in the mailbox is held for exactly that long, also by a call
whose caller was cancelled.
"""

import asyncio
import enum
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from vla_rl.actors.actor import ActorMethod, MethodTable
from vla_rl.actors.call_limit import CallLimit
from vla_rl.actors.channel import Channel, Death
from vla_rl.actors.deadlines import DeadlineWatch
from vla_rl.actors.mailbox import Mailbox
from vla_rl.actors.pending import PendingBegun, PendingCall, PendingStream
from vla_rl.actors.remote_errors import ErrorReport, error_from
from vla_rl.actors.waits import Wait
from vla_rl.actors.wire import (
    ENVELOPE,
    ENVELOPE_SIZE,
    MAGIC,
    OWN_CALL,
    Frames,
    Kind,
    LagReport,
    MalformedMessage,
)
from vla_rl.errors import ActorDied, ActorFrozen

logger = logging.getLogger(__name__)

# plain numbers: access to an enum member costs a dictionary lookup for each message
_CALL, _RESULT, _ERROR, _ITEM = int(Kind.CALL), int(Kind.RESULT), int(Kind.ERROR), int(Kind.ITEM)
_unpack, _now = ENVELOPE.unpack_from, time.monotonic

STREAM_WINDOW = 16
"""Items of a stream that may be sent before the consumer has taken one."""

_LAG_WITHIN_S = 10.0


class State(enum.Enum):
    """State of an actor, as a call finds it."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    DEAD = "dead"


_RUNNING = State.RUNNING


class ActorClient:
    """Calls one actor. Each call begins in `call`, `begin`, `tell` or `stream`; each message back
    arrives in `on_message`.

    Args:
        name: the actor's name.
        mailbox: largest number of unanswered calls; further senders wait.
        deadlines_s: for each method, the longest time the actor may work on one call before it
            counts as frozen and is killed; None for ever. If a call waits behind another, its time
            starts when that one is answered.
        limits: by index of a method: shortens the deadline of each of its calls.
    """

    def __init__(
        self,
        name: str,
        table: MethodTable,
        mailbox: int,
        deadlines_s: Sequence[float | None],
        limits: Mapping[int, CallLimit] = MappingProxyType({}),
    ) -> None:
        self.name, self.table, self.state = name, table, State.STARTING
        self.mailbox = Mailbox(mailbox)
        self.num_rejected = 0
        self._deadlines_s, self._limits = deadlines_s, limits
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._labels = [f"{name}.{entry.name}" for entry in table.methods]
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = []
        self._error_decoder: msgspec.msgpack.Decoder[Any] | None = None
        self._pending: dict[int, PendingCall] = {}
        self._lag_reports: dict[int, PendingCall] = {}
        self._ids = itertools.count(OWN_CALL + 1)
        self._deadlines = DeadlineWatch(lambda: self._pending, self._poll, self._freeze)
        self._error: ActorDied | None = None
        self._settled = asyncio.Event()

    @property
    def pid(self) -> int:
        """Process id of the current incarnation; 0 in this loop, or if there is none."""
        return self._channel.pid if self._channel is not None else 0

    @property
    def end(self) -> ActorDied | None:
        """Error that ended the last incarnation; None while one is alive."""
        return self._error

    @property
    def num_pending(self) -> int:
        """Number of calls that wait for an answer."""
        return len(self._pending)

    @property
    def num_slots_taken(self) -> int:
        """Number of our shared-memory slots that the actor still reads."""
        return self._channel.codec.num_slots_taken if self._channel is not None else 0

    def waits(self) -> Iterator[Wait]:
        """Yield the tasks that wait for an answer of this actor.

        Called on the watchdog's thread.
        """
        for pending in (*self._pending.values(), *self._lag_reports.values()):
            if pending.task is not None and not pending.future.done():
                yield Wait(
                    pending.task.get_name(), f"{self.name}.{pending.method_name}", pending.since
                )

    # ---- calls

    async def call(self, method: ActorMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send a call and wait for its answer; a cancellation is passed on to the actor."""
        if kwargs or len(args) != method.num_plain_args:
            args = method.bind(args, kwargs)
        if self.state is not _RUNNING or not self.mailbox.try_enter():
            await self._enter()
        pending = PendingCall(
            self._loop, method, self._decoders[method.index], asyncio.current_task(self._loop)
        )
        call = self._send_call(method, args, pending)
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._cancel(call)
            raise

    def begin(
        self, method: ActorMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Awaitable[Any]:
        """Send a call now; await the result for its answer.

        If it cannot be sent now, it is sent when awaited.
        """
        bound = method.bind(args, kwargs)
        if self.state is not _RUNNING or not self.mailbox.try_enter():
            return self.call(method, args, kwargs)
        pending = PendingBegun(
            self._loop, method, self._decoders[method.index], asyncio.current_task(self._loop)
        )
        self._send_call(method, bound, pending)
        return pending.future

    async def tell(
        self, method: ActorMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Send a call without an answer; waits only for a place in the mailbox.

        An error is logged.
        """
        args = method.bind(args, kwargs)
        if self.state is not _RUNNING or not self.mailbox.try_enter():
            await self._enter()
        pending = PendingCall(self._loop, method, self._decoders[method.index], None)
        self._send_call(method, args, pending)
        pending.future.add_done_callback(self._log_untold_error)

    async def stream(
        self, method: ActorMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Iterate over a streaming method. Leaving the iteration stops the remote generator."""
        args = method.bind(args, kwargs)
        if self.state is not _RUNNING or not self.mailbox.try_enter():
            await self._enter()
        pending = PendingStream(
            self._loop, method, self._decoders[method.index], asyncio.current_task()
        )
        call = self._send_call(method, args, pending)
        ended = False
        try:
            self._grant(call, pending, STREAM_WINDOW)
            while True:
                if not pending.items:
                    if pending.future.done():
                        ended = True
                        pending.future.result()
                        return
                    await pending.until_news()
                    continue
                yield pending.items.popleft()
                pending.num_taken += 1
                if pending.num_taken * 2 >= STREAM_WINDOW:
                    self._grant(call, pending, pending.num_taken)
                    pending.num_taken = 0
        except GeneratorExit:
            ended = True
            self._cancel(call)
            await asyncio.wait([pending.future])
            raise
        finally:
            if not ended:
                self._cancel(call)
            if not pending.future.cancel() and not pending.future.cancelled():
                pending.future.exception()  # retrieved, or asyncio would log it

    def forgive(self, lost_s: float) -> None:
        """Exclude the last `lost_s` seconds, in which our loop did not run, from each call's
        deadline.
        """
        self._deadlines.forgive(lost_s)

    async def loop_lag(self) -> LagReport:
        """Return the timer delays of the actor's loop. Raises: TimeoutError if it does not report
        them; ActorDied.

        Takes no place in the mailbox: the actor answers while its calls run.
        """
        try:
            async with asyncio.timeout(_LAG_WITHIN_S):
                await self._until_running()
                report: LagReport = await self._ask_for_lag()
        except TimeoutError:
            why = (
                "it is restarting"
                if self.state is State.RESTARTING
                else "its loop is blocked, or its process is stopped"
            )
            raise TimeoutError(
                f"actor {self.name!r} (pid {self.pid}) did not report its lag within "
                f"{_LAG_WITHIN_S:g} s: {why}."
            ) from None
        return report

    def _ask_for_lag(self) -> asyncio.Future[Any]:
        channel = self._channel
        assert channel is not None
        lag = ActorMethod(
            0,
            "loop_lag",
            "loop_lag",
            self.table.constructor.signature,
            Any,
            LagReport,
            False,
            True,
            None,
            (),
            0,
        )
        pending = PendingCall(
            self._loop, lag, channel.codec.decoder(LagReport), asyncio.current_task()
        )
        call = next(self._ids)
        self._lag_reports[call] = pending
        channel.send(channel.codec.encode(Kind.LAG, 0, channel.actor_id, call, None, self.name))
        return pending.future

    # ---- incarnations

    def connect(self, channel: Channel) -> None:
        """Send calls to a new incarnation from now on.

        Raises: TypeError for an annotation that cannot be decoded.
        """
        self._decoders = [channel.codec.decoder(entry.result_type) for entry in self.table.methods]
        self._error_decoder = channel.codec.decoder(ErrorReport)
        self._channel = channel
        self._deadlines.answered_at = time.monotonic()
        self._settle(State.RUNNING, None)

    def disconnect(self, death: Death, state: State) -> None:
        """Fail each pending call, as the incarnation has ended.

        Later calls wait (RESTARTING) or raise (DEAD, STOPPED).
        """
        # it was frozen, and its process has ended only now
        if self._channel is None and self._error is not None:
            self._settle(state, self._error)
            return
        kind = ActorFrozen if death.frozen else ActorDied
        error = kind(self.name, death.pid, death.cause, death.last_words)
        self._channel = None
        self._settle(state, error)
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            entry.fail(kind(self.name, death.pid, death.cause, death.last_words))
            self.mailbox.leave()
        reports, self._lag_reports = self._lag_reports, {}
        for entry in reports.values():
            entry.fail(kind(self.name, death.pid, death.cause, death.last_words))
        self._deadlines.stop()

    def give_up(self, state: State, error: ActorDied) -> None:
        """Raise `error` in calls that wait for an incarnation, and in later ones: none
        will come.
        """
        self._settle(state, error)

    def last_error(self, why: str, cause: BaseException | None) -> ActorDied:
        """Return the error that ended the last incarnation, with the reason why there is no next
        one.
        """
        last = self._died()
        reason = (
            f"{last.cause}; {why}"
            if cause is None
            else f"{last.cause}; {why}; the last restart failed: {cause}"
        )
        return type(last)(self.name, last.pid, reason, last.last_words)

    def ask_to_stop(self) -> None:
        """Have the actor end after the calls that it has; later calls raise."""
        channel = self._channel
        if channel is not None:
            channel.send(channel.codec.encode(Kind.STOP, 0, channel.actor_id, 0, None, self.name))
        self.give_up(State.STOPPED, ActorDied(self.name, self.pid, "stopped by its owner"))

    def _settle(self, state: State, error: ActorDied | None) -> None:
        self.state, self._error = state, error
        if state is State.RESTARTING:
            self._settled.clear()
        else:
            self._settled.set()

    def on_message(self, frames: Frames) -> None:
        """Take one message from the channel; never raises."""
        head = frames[0]
        try:
            if len(head) < ENVELOPE_SIZE:
                raise MalformedMessage(
                    f"message of {len(head)} bytes, expected at least {ENVELOPE_SIZE}."
                )
            magic, kind, _, _, _, call = _unpack(head)
            pending = self._pending.get(call)
            if magic != MAGIC or pending is None or self._channel is None:
                if (
                    magic == MAGIC
                    and kind == _ERROR
                    and call == OWN_CALL
                    and self._channel is not None
                ):
                    self._log_failed_end(self._channel, frames)
                    return
                if (
                    magic == MAGIC
                    and kind == _RESULT
                    and self._channel is not None
                    and call in self._lag_reports
                ):
                    self._take_answer(kind, self._lag_reports.pop(call), frames)
                    return
                raise MalformedMessage(
                    f"answer to call {call}, which is not pending, or bytes that are not a message."
                )
            if kind == _ITEM:
                self._take_item(call, pending, frames)
            else:
                del self._pending[call]
                if not pending.method.concurrent:
                    now = _now()
                    if pending.limit is not None:
                        worked_s = now - max(pending.since, self._deadlines.answered_at)
                        pending.limit.note(pending.num_units, worked_s)
                    self._deadlines.answered_at = now
                self.mailbox.leave()
                self._take_answer(kind, pending, frames)
        except MalformedMessage as error:
            self.num_rejected += 1
            if self.num_rejected == 1:
                logger.warning(
                    "%s: rejected a message: %s Later ones are only counted.", self.name, error
                )

    # ---- inside

    async def _enter(self) -> None:
        """Wait for a place in the mailbox of a running incarnation.

        Raises: ActorDied if there will be none.
        """
        await self.mailbox.enter()
        try:
            await self._until_running()
        except BaseException:
            self.mailbox.leave()
            raise

    async def _until_running(self) -> None:
        """Wait for a running incarnation. Raises: ActorDied if there will be none."""
        while self.state is not State.RUNNING:
            if self.state is not State.RESTARTING:
                raise self._died()
            await self._settled.wait()

    def _died(self) -> ActorDied:
        error = self._error
        if error is None:
            return ActorDied(self.name, 0, f"it is {self.state.value}")
        return type(error)(error.name, error.pid, error.cause, error.last_words)

    def _send_call(self, method: ActorMethod, args: tuple[Any, ...], pending: PendingCall) -> int:
        channel = self._channel
        assert channel is not None
        call = next(self._ids)
        try:
            frames = channel.codec.encode(
                _CALL, method.index, channel.actor_id, call, args, self._labels[method.index]
            )
        except TypeError:
            self.mailbox.leave()
            raise
        self._pending[call] = pending
        channel.send(frames)
        pending.deadline_s = self._deadlines_s[method.index]
        if self._limits and (limit := self._limits.get(method.index)) is not None:
            pending.limit, pending.num_units = limit, limit.num_units(args)
            pending.deadline_s = self._shortest_deadline_of(pending)
        if (
            pending.deadline_s is not None
            and pending.since + pending.deadline_s < self._deadlines.next_look
        ):
            self._deadlines.expect_by(pending.since + pending.deadline_s)
        return call

    def _grant(self, call: int, pending: PendingStream, items: int) -> None:
        if call in self._pending and self._channel is not None:
            pending.num_granted += items
            pending.since = time.monotonic()
            if pending.deadline_s is not None:
                self._deadlines.expect_by(pending.since + pending.deadline_s)
            channel = self._channel
            channel.send(
                channel.codec.encode(Kind.CREDIT, items, channel.actor_id, call, None, self.name)
            )

    def _cancel(self, call: int) -> None:
        """Ask the actor to stop working on a call.

        The call stays pending until the actor has answered.
        """
        pending, channel = self._pending.get(call), self._channel
        if pending is not None and channel is not None:
            if isinstance(pending, PendingStream):
                pending.cancel()
                if pending.deadline_s is not None:
                    self._deadlines.expect_by(pending.since + pending.deadline_s)
            channel.send(
                channel.codec.encode(Kind.CANCEL, 0, channel.actor_id, call, None, self.name)
            )

    def _take_item(self, call: int, pending: PendingCall, frames: Frames) -> None:
        assert self._channel is not None
        if not isinstance(pending, PendingStream) or pending.num_granted == 0:
            raise MalformedMessage(f"an unexpected stream item from {pending.method_name}.")
        if pending.future.done():  # it failed: an item is missing, so later ones are dropped
            self._channel.codec.discard(frames)
            return
        try:
            item = self._channel.codec.decode(pending.decoder, frames)
        except msgspec.ValidationError as error:
            pending.fail(
                TypeError(
                    f"{self.name}.{pending.method_name} yielded another type than it "
                    f"declares: {error}"
                )
            )
            self._cancel(call)
            return
        pending.num_granted -= 1
        pending.since = time.monotonic()
        pending.add(item)

    def _take_answer(self, kind: int, pending: PendingCall, frames: Frames) -> None:
        assert self._channel is not None
        assert self._error_decoder is not None
        codec = self._channel.codec
        if pending.future.done():
            codec.discard(frames)
            return
        try:
            if kind == _RESULT:
                pending.future.set_result(codec.decode(pending.decoder, frames))
                pending.notify()
            elif kind == Kind.END:
                pending.succeed(None)
            elif kind == Kind.ERROR:
                report = codec.decode(self._error_decoder, frames)
                pending.fail(error_from(report, self.name, self._channel.pid))
            elif kind == Kind.CANCELLED:
                # cancelled by the actor: if the caller did it, the future is done
                pending.fail(
                    ActorDied(self.name, self._channel.pid, "stopped while this call was running")
                )
            else:
                raise MalformedMessage(f"answer of kind {kind}.")
        except msgspec.ValidationError as error:
            pending.fail(
                TypeError(
                    f"{self.name}.{pending.method_name} returned another type than it "
                    f"declares: {error}"
                )
            )
        except MalformedMessage as error:
            pending.fail(error)
            raise

    def _log_untold_error(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.error("%s: a call sent with tell() failed.", self.name, exc_info=error)

    def _log_failed_end(self, channel: Channel, frames: Frames) -> None:
        """Log the error that an actor reports about its own end. Raises: MalformedMessage."""
        assert self._error_decoder is not None
        try:
            report = channel.codec.decode(self._error_decoder, frames)
        except msgspec.ValidationError as problem:
            raise MalformedMessage(f"its last message cannot be read: {problem}.") from None
        error = error_from(report, self.name, channel.pid)
        logger.error(
            "actor %r (pid %d) failed while it ended, usually in its on_stop; it has ended anyway.",
            self.name,
            channel.pid,
            exc_info=error,
        )

    def _poll(self) -> None:
        if self._channel is not None:
            self._channel.poll()

    def _freeze(self, pending: PendingCall) -> None:
        channel = self._channel
        assert channel is not None
        if channel.is_ending:  # it died, and its channel reports that next
            return
        if not pending.concurrent and any(
            ahead.waits_for_caller_of(pending) for ahead in self._pending.values()
        ):
            self._refuse_inside_stream(pending)
            return
        if (
            pending.limit is not None
            and (deadline_s := self._shortest_deadline_of(pending)) != pending.deadline_s
        ):
            pending.deadline_s = deadline_s  # its limit has learned since
            self._deadlines.expect_by(_now())
            return
        cause = f"{pending.method_name} did not answer within {pending.deadline_s:.4g} s"
        if (
            pending.limit is not None
            and pending.deadline_s != self._deadlines_s[pending.method.index]
        ):
            cause += f" ({pending.limit.note_overdue(pending.num_units)})"
        self.disconnect(Death(channel.pid, cause, frozen=True), State.RESTARTING)
        channel.kill()

    def _shortest_deadline_of(self, pending: PendingCall) -> float | None:
        """Return the method's deadline, or the call's current limit if that is shorter."""
        deadline_s = self._deadlines_s[pending.method.index]
        learnt_s = pending.limit.limit_s(pending.num_units) if pending.limit is not None else None
        return (
            learnt_s
            if deadline_s is None or (learnt_s is not None and learnt_s < deadline_s)
            else deadline_s
        )

    def _refuse_inside_stream(self, pending: PendingCall) -> None:
        """Fail a call and the stream before it, which wait for each other.

        The actor works correctly.
        """
        for call, entry in list(self._pending.items()):
            if entry is pending or entry.waits_for_caller_of(pending):
                if entry is pending:  # the stream keeps its deadline, within which it has to end
                    entry.deadline_s = None
                entry.fail(
                    RuntimeError(
                        f"{self.name}.{pending.method_name} was called during the iteration "
                        "over a stream of the same "
                        "actor, which ends before the next call begins; call it after the "
                        "iteration, or mark one of the "
                        "two concurrent."
                    )
                )
                self._cancel(call)
        self._deadlines.expect_by(_now())
