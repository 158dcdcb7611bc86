"""The caller's end: sends the calls of one actor, and outlives its incarnations.

    call, begin, tell, stream ─► Mailbox ─► Channel ─► actor ─► Answers
                                 CallDeadlines watch the calls, Life holds the actor's state

Invariant: each call that was sent leaves `_pending` by an answer or by the end of the incarnation,
so no future outlives its peer. A place in the mailbox is held for exactly that long, also by a call
whose caller was cancelled.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from vla_rl.actors.actor import ActorMethod, MethodTable
from vla_rl.actors.answers import Answers
from vla_rl.actors.call_deadlines import CallDeadlines
from vla_rl.actors.call_limit import CallLimit
from vla_rl.actors.channel import Channel, Death
from vla_rl.actors.lag_questions import LagQuestions
from vla_rl.actors.life import Life, State
from vla_rl.actors.mailbox import Mailbox
from vla_rl.actors.pending import PendingBegun, PendingCall, PendingStream
from vla_rl.actors.waits import Wait, note_death
from vla_rl.actors.wire import OWN_CALL, Kind, LagReport
from vla_rl.errors import ActorDied, ActorFrozen

logger = logging.getLogger(__name__)

# plain numbers: access to an enum member costs a dictionary lookup for each message
_CALL = int(Kind.CALL)

STREAM_WINDOW = 16
"""Items of a stream that may be sent before the consumer has taken one."""

_RUNNING = State.RUNNING


class ActorClient:
    """Calls one actor.

    Each call begins in `call`, `begin`, `tell` or `stream`; each message back arrives in
    `on_message`.

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
        self.name, self.table, self.mailbox = name, table, Mailbox(mailbox)
        self._loop = asyncio.get_running_loop()
        self.life = Life(name)
        self._channel: Channel | None = None
        self._labels = [f"{name}.{entry.name}" for entry in table.methods]
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = []
        self._pending: dict[int, PendingCall] = {}
        self._ids = itertools.count(OWN_CALL + 1)
        self._lag = LagQuestions(name, self.life, lambda: self._channel, self._ids)
        self._deadlines = CallDeadlines(
            name,
            self._pending,
            lambda: self._channel,
            deadlines_s,
            limits,
            freeze=self._freeze,
            cancel=self._cancel,
        )
        self._answers = Answers(
            name,
            self._pending,
            self._lag.unanswered,
            self.mailbox,
            self._deadlines,
            self._cancel,
        )
        self.on_message = self._answers.on_message  # without a call of ours in between

    @property
    def state(self) -> State:
        """State of the actor."""
        return self.life.state

    @property
    def pid(self) -> int:
        """Process id of the current incarnation; 0 in this loop, or if there is none."""
        return self._channel.pid if self._channel is not None else 0

    @property
    def end(self) -> ActorDied | None:
        """Error that ended the last incarnation; None while one is alive."""
        return self.life.error

    @property
    def num_rejected(self) -> int:
        """Number of messages of the actor that could not be read."""
        return self._answers.num_rejected

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
        for pending in (*self._pending.values(), *self._lag.unanswered.values()):
            if pending.task is not None and not pending.future.done():
                yield Wait(
                    pending.task.get_name(), f"{self.name}.{pending.method_name}", pending.since
                )

    # ---- calls

    async def call(self, method: ActorMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Send a call and wait for its answer; a cancellation is passed on to the actor."""
        if kwargs or len(args) != method.num_plain_args:
            args = method.bind(args, kwargs)
        if not self._try_enter():
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
        if not self._try_enter():
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
        if not self._try_enter():
            await self._enter()
        pending = PendingCall(self._loop, method, self._decoders[method.index], None)
        self._send_call(method, args, pending)
        pending.future.add_done_callback(self._log_untold_error)

    async def stream(
        self, method: ActorMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Iterate over a streaming method. Leaving the iteration stops the remote generator."""
        args = method.bind(args, kwargs)
        if not self._try_enter():
            await self._enter()
        pending = PendingStream(
            self._loop, method, self._decoders[method.index], asyncio.current_task()
        )
        call = self._send_call(method, args, pending)
        try:
            self._grant(call, pending, STREAM_WINDOW)
            while await pending.has_item():
                yield pending.items.popleft()
                if num_read := pending.count_read(STREAM_WINDOW // 2):
                    self._grant(call, pending, num_read)
        except GeneratorExit:
            self._cancel(call)
            await asyncio.wait([pending.future])
            raise
        finally:
            if not pending.future.done():
                self._cancel(call)
            if not pending.future.cancel() and not pending.future.cancelled():
                pending.future.exception()  # retrieved, or asyncio would log it

    def forgive(self, lost_s: float) -> None:
        """Exclude the last `lost_s` seconds, in which our loop did not run, from each deadline."""
        self._deadlines.forgive(lost_s)

    async def loop_lag(self) -> LagReport:
        """Return the timer delays of the actor's loop.

        Raises: TimeoutError if it does not report them; ActorDied.

        Takes no place in the mailbox: the actor answers while its calls run.
        """
        return await self._lag.ask()

    # ---- incarnations

    def connect(self, channel: Channel) -> None:
        """Send calls to a new incarnation from now on.

        Raises: TypeError for an annotation that cannot be decoded.
        """
        self._decoders = [channel.codec.decoder(entry.result_type) for entry in self.table.methods]
        self._answers.connect(channel)
        self._channel = channel
        self._deadlines.start()
        self.life.settle(State.RUNNING, None)

    def disconnect(self, death: Death, state: State) -> None:
        """Fail each pending call, as the incarnation has ended.

        Later calls wait (RESTARTING) or raise (DEAD, STOPPED).
        """
        # it was frozen, and its process has ended only now
        if self._channel is None and self.life.error is not None:
            self.life.settle(state, self.life.error)
            return
        kind = ActorFrozen if death.frozen else ActorDied
        self._channel = None
        self._answers.disconnect()
        # settled before a call fails: its caller may call again at once, and has to wait then
        error = kind(self.name, death.pid, death.cause, death.last_words)
        if state is not State.STOPPED:
            note_death(str(error))
        self.life.settle(state, error)
        unanswered = [*self._pending.values()]
        self._pending.clear()
        for entry in unanswered:
            entry.fail(self.life.death())
            self.mailbox.leave()
        self._lag.fail()
        self._deadlines.stop()

    def give_up(self, state: State, error: ActorDied) -> None:
        """Raise `error` in calls that wait for an incarnation, and in later ones."""
        self.life.settle(state, error)

    def ask_to_stop(self) -> None:
        """Have the actor end after the calls that it has; later calls raise."""
        channel = self._channel
        if channel is not None:
            channel.send(channel.codec.encode(Kind.STOP, 0, channel.actor_id, 0, None, self.name))
        self.give_up(State.STOPPED, ActorDied(self.name, self.pid, "stopped by its owner"))

    # ---- inside

    def _try_enter(self) -> bool:
        """Take a place in the mailbox if a call may be sent now; return whether it may."""
        if self.life.state is not _RUNNING or not self.mailbox.try_enter():
            return False
        if self._channel is None or self._channel.has_room:
            return True
        self.mailbox.leave()
        return False

    async def _enter(self) -> None:
        """Wait for a place in the mailbox of a running incarnation, and for room on the way to it.

        Raises: ActorDied if there will be none.
        """
        await self.mailbox.enter()
        try:
            await self.life.until_running()
            channel = None
            while channel is not self._channel:  # another incarnation, if it died meanwhile
                channel = self._channel
                assert channel is not None
                await channel.until_room()
                await self.life.until_running()
        except BaseException:
            self.mailbox.leave()
            raise

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
        self._deadlines.note_sent(pending, args)
        return call

    def _grant(self, call: int, pending: PendingStream, items: int) -> None:
        if call in self._pending and self._channel is not None:
            pending.num_granted += items
            pending.since = time.monotonic()
            self._deadlines.note_turn(pending)
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
                self._deadlines.note_turn(pending)
            channel.send(
                channel.codec.encode(Kind.CANCEL, 0, channel.actor_id, call, None, self.name)
            )

    def _log_untold_error(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.error("%s: a call sent with tell() failed.", self.name, exc_info=error)

    def _freeze(self, cause: str) -> None:
        """Treat the actor as frozen: fail its calls, and end its process."""
        channel = self._channel
        assert channel is not None
        self.disconnect(Death(channel.pid, cause, frozen=True), State.RESTARTING)
        channel.kill()
