"""The caller's end: it sends the calls of one actor, whose incarnations it outlives.

    call_method, begin_call, send_call, iterate ─► OutgoingCalls ─► Channel ─► actor ─► Answers
                                 CallDeadlines watch the calls, ActorLifecycle holds the actor's state

Each call that was sent is answered, or fails as the incarnation ends: no future outlives its peer.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec

from vla_rl.actors.calls.actor import ActorMethod, MethodTable
from vla_rl.actors.calls.exchange import Answers, OutgoingCalls
from vla_rl.actors.calls.pending import (
    ActorLifecycle,
    ActorState,
    CallLimit,
    Mailbox,
    PendingCall,
    PendingDeferredCall,
    PendingStream,
)
from vla_rl.actors.processes.channels import ActorExit, Channel
from vla_rl.actors.remote.peer_sockets import SocketAddress
from vla_rl.actors.wire.envelope import ActorReference, Kind
from vla_rl.errors import ActorDied, ActorFrozen
from vla_rl.util.stalls import LagReport, Wait, record_exit

_WITHIN_S = 10.0


def _question(name: str, result_type: Any) -> ActorMethod:
    """Describe a question that each actor's process answers, whatever its class."""
    return ActorMethod(
        index=0,
        name=name,
        label=name,
        signature=inspect.Signature(),
        args_type=Any,
        result_type=result_type,
        is_stream=False,
        concurrent=True,
        deadline_s=None,
        keyword_only=(),
        num_plain_args=0,
    )


_LOOP_LAG: Final = _question("loop_lag", LagReport)
_SHARE: Final = _question("share", SocketAddress)


class ProcessQuestions:
    """Asks the process of one actor what it answers beside the actor's calls.

    Args:
        name: the actor's name.
        lifecycle: the actor's state; questions wait for a running incarnation.
        channel: returns the channel to the current incarnation, if there is one.
        ids: numbers of calls, shared with the actor's other calls.

    Attributes:
        unanswered: questions by number.
    """

    def __init__(
        self,
        name: str,
        lifecycle: ActorLifecycle,
        channel: Callable[[], Channel | None],
        ids: Iterator[int],
    ) -> None:
        self._name, self._lifecycle, self._channel, self._ids = name, lifecycle, channel, ids
        self.unanswered: dict[int, PendingCall] = {}

    async def ask_lag(self) -> LagReport:
        """Return the timer delays of the actor's loop. Raises: as `_ask`."""
        report: LagReport = await self._ask(Kind.LAG, _LOOP_LAG, None)
        return report

    async def ask_to_share(self, key: str) -> SocketAddress:
        """Let the holder of a key call the actor too; return where it listens.

        Raises: as `_ask`; OSError if no port is free.
        """
        address: SocketAddress = await self._ask(Kind.SHARE, _SHARE, key)
        return address

    async def _ask(self, kind: Kind, question: ActorMethod, value: Any) -> Any:
        """Return the answer. Raises: TimeoutError if there is none; ActorDied; what it reports."""
        try:
            # no deadline of a call: a blocked loop is what one asks about, and must not be killed
            async with asyncio.timeout(_WITHIN_S):
                await self._lifecycle.until_running()
                return await self._send(kind, question, value)
        except TimeoutError:
            channel = self._channel()
            why = (
                "it is restarting"
                if self._lifecycle.state is ActorState.RESTARTING
                else "its loop is blocked, or its process is stopped"
            )
            raise TimeoutError(
                f"actor {self._name!r} (pid {0 if channel is None else channel.pid}) did not "
                f"{_TO_ANSWER[kind]} within {_WITHIN_S:g} s: {why}."
            ) from None

    def fail_questions(self) -> None:
        """Fail all questions, as the incarnation has ended."""
        questions = [*self.unanswered.values()]
        self.unanswered.clear()
        for question in questions:
            question.fail(self._lifecycle.make_exit_error())

    def _send(self, kind: Kind, question: ActorMethod, value: Any) -> asyncio.Future[Any]:
        channel = self._channel()
        assert channel is not None
        decoder = channel.codec.get_decoder(question.result_type)
        pending = PendingCall(asyncio.get_running_loop(), question, decoder, asyncio.current_task())
        call = next(self._ids)
        self.unanswered[call] = pending
        channel.send_message(
            channel.codec.encode(kind, 0, channel.actor_id, call, value, self._name)
        )
        return pending.future


_TO_ANSWER: Final = {Kind.LAG: "report its lag", Kind.SHARE: "listen for one more caller"}

logger = logging.getLogger(__name__)

STREAM_WINDOW = 16
"""Items of a stream that may be sent before the consumer has taken one."""


class ActorClient:
    """Calls one actor.

    Each call begins in `call_method`, `begin_call`, `send_call` or `iterate`; each message back arrives in
    `on_message`.

    Args:
        name: the actor's name.
        mailbox: largest number of unanswered calls; further senders wait.
        deadlines_s: for each method, the longest time the actor may work on one call before it
            counts as frozen and is killed; None for ever. If a call waits behind another, its time
            starts when that one is answered.
        limits: by index of a method: shortens the deadline of each of its calls.
        lifecycle: state to begin with; None: that of an actor which is being started.
    """

    def __init__(
        self,
        name: str,
        table: MethodTable,
        mailbox: int,
        deadlines_s: Sequence[float | None],
        limits: Mapping[int, CallLimit] = MappingProxyType({}),
        lifecycle: ActorLifecycle | None = None,
    ) -> None:
        self.name, self.table, self.mailbox = name, table, Mailbox(mailbox)
        self._loop = asyncio.get_running_loop()
        self.lifecycle = lifecycle or ActorLifecycle(name)
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = []
        calls = self._calls = OutgoingCalls(
            name, table, self.lifecycle, self.mailbox, deadlines_s, limits, self._freeze
        )
        self._questions = ProcessQuestions(name, self.lifecycle, lambda: calls.channel, calls.ids)
        self._answers = Answers(
            name,
            calls.unanswered,
            self._questions.unanswered,
            self.mailbox,
            calls.deadlines,
            calls.cancel_call,
        )
        self.on_message = self._answers.on_message  # without a call of ours in between

    @property
    def state(self) -> ActorState:
        """State of the actor."""
        return self.lifecycle.state

    @property
    def pid(self) -> int:
        """Process id of the current incarnation; 0 in this loop, or if there is none."""
        channel = self._calls.channel
        return channel.pid if channel is not None else 0

    @property
    def exit_error(self) -> ActorDied | None:
        """Error that ended the last incarnation; None while one is alive."""
        return self.lifecycle.exit_error

    @property
    def num_rejected(self) -> int:
        """Number of messages of the actor that could not be read."""
        return self._answers.num_rejected

    @property
    def num_pending(self) -> int:
        """Number of calls that wait for an answer."""
        return len(self._calls.unanswered)

    @property
    def num_slots_taken(self) -> int:
        """Number of our shared-memory slots that the actor still reads."""
        channel = self._calls.channel
        return channel.codec.num_slots_taken if channel is not None else 0

    def list_waits(self) -> Iterator[Wait]:
        """Yield the tasks that wait for an answer of this actor.

        Called on the watchdog's thread.
        """
        # A copy in one step: the loop changes the table while this thread reads it.
        for pending in (*self._calls.unanswered.values(), *self._questions.unanswered.values()):
            if pending.task is not None and not pending.future.done():
                yield Wait(
                    pending.task.get_name(), f"{self.name}.{pending.method_name}", pending.since
                )

    async def call_method(
        self, method: ActorMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Send a call and wait for its answer; a cancellation is passed on to the actor."""
        # Binding is slow Python code of `inspect`; a call by position with every argument needs none.
        if kwargs or len(args) != method.num_plain_args:
            args = method.bind_arguments(args, kwargs)
        if not self._calls.try_take_slot():
            await self._calls.take_slot()
        pending = PendingCall(
            self._loop, method, self._decoders[method.index], asyncio.current_task(self._loop)
        )
        call = self._calls.send_call(method, args, pending)
        try:
            return await pending.future
        except asyncio.CancelledError:
            self._calls.cancel_call(call)
            raise

    def begin_call(
        self, method: ActorMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Awaitable[Any]:
        """Send a call now; await the result for its answer.

        If it cannot be sent now, it is sent when awaited.
        """
        # Bound now, not when awaited: a wrong argument is an error at the line that has it.
        bound = method.bind_arguments(args, kwargs)
        if not self._calls.try_take_slot():
            return self.call_method(method, args, kwargs)
        pending = PendingDeferredCall(
            self._loop, method, self._decoders[method.index], asyncio.current_task(self._loop)
        )
        self._calls.send_call(method, bound, pending)
        return pending.future

    async def send_call(
        self, method: ActorMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Send a call without an answer; waits only for a slot in the mailbox.

        An error is logged.
        """
        args = method.bind_arguments(args, kwargs)
        if not self._calls.try_take_slot():
            await self._calls.take_slot()
        pending = PendingCall(self._loop, method, self._decoders[method.index], None)
        self._calls.send_call(method, args, pending)
        pending.future.add_done_callback(self._log_untold_error)

    async def iterate(
        self, method: ActorMethod, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Iterate over a streaming method. Leaving the iteration stops the remote generator."""
        args = method.bind_arguments(args, kwargs)
        if not self._calls.try_take_slot():
            await self._calls.take_slot()
        pending = PendingStream(
            self._loop, method, self._decoders[method.index], asyncio.current_task()
        )
        call = self._calls.send_call(method, args, pending)
        try:
            self._calls.grant_items(call, pending, STREAM_WINDOW)
            while await pending.has_item():
                yield pending.items.popleft()
                if num_read := pending.count_read(STREAM_WINDOW // 2):
                    self._calls.grant_items(call, pending, num_read)
        # Waits until the generator in the actor has stopped, so that the next call finds it free.
        except GeneratorExit:
            self._calls.cancel_call(call)
            await asyncio.wait([pending.future])
            raise
        finally:
            if not pending.future.done():
                self._calls.cancel_call(call)
            if not pending.future.cancel() and not pending.future.cancelled():
                pending.future.exception()  # retrieved, or asyncio would log it

    def make_reference(self) -> ActorReference:
        """Return what a message carries of a handle. Raises: TypeError, as its owner keeps this one."""
        raise TypeError(
            f"the handle of {self.name!r} cannot be sent: it is its owner's; send `await runtime.share(handle)`."
        )

    async def share(self, key: str) -> SocketAddress:
        """Let the holder of a key call the actor too. Raises: as `ProcessQuestions.ask_to_share`."""
        return await self._questions.ask_to_share(key)

    def extend_deadlines(self, lost_s: float) -> None:
        """Exclude the last `lost_s` seconds, in which our loop did not run, from each deadline."""
        self._calls.deadlines.extend_deadlines(lost_s)

    async def loop_lag(self) -> LagReport:
        """Return the timer delays of the actor's loop.

        Raises: TimeoutError if it does not report them; ActorDied.

        Takes no slot in the mailbox: the actor answers while its calls run.
        """
        return await self._questions.ask_lag()

    def attach_channel(self, channel: Channel) -> None:
        """Send calls to a new incarnation from now on.

        Raises: TypeError for an annotation that cannot be decoded.
        """
        self._decoders = [
            channel.codec.get_decoder(entry.result_type) for entry in self.table.methods
        ]
        self._answers.set_channel(channel)
        self._calls.channel = channel
        self._calls.deadlines.start_watching()
        self.lifecycle.enter_state(ActorState.RUNNING, None)

    def detach_channel(self, death: ActorExit, state: ActorState) -> None:
        """Fail each pending call, as the incarnation has ended.

        Later calls wait (RESTARTING) or raise (DEAD, STOPPED).
        """
        # it was frozen, and its process has ended only now
        if self._calls.channel is None and self.lifecycle.exit_error is not None:
            self.lifecycle.enter_state(state, self.lifecycle.exit_error)
            return
        kind = ActorFrozen if death.frozen else ActorDied
        self._calls.channel = None
        self._answers.clear_channel()
        # settled before a call fails: its caller may call again at once, and has to wait then
        error = kind(self.name, death.pid, death.cause, death.stderr_tail)
        if state is not ActorState.STOPPED:
            record_exit(str(error))
        self.lifecycle.enter_state(state, error)
        self._calls.fail_calls()
        self._questions.fail_questions()

    def fail_waiters(self, state: ActorState, error: ActorDied) -> None:
        """Raise `error` in calls that wait for an incarnation, and in later ones."""
        # Only the state changes: calls that are at work still end by their answers.
        self.lifecycle.enter_state(state, error)

    def ask_to_stop(self) -> None:
        """Have the actor end after the calls that it has; later calls raise."""
        self._calls.ask_to_stop()
        self.fail_waiters(
            ActorState.STOPPED, ActorDied(self.name, self.pid, "stopped by its owner")
        )

    def _log_untold_error(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            logger.error("%s: a call sent with tell() failed.", self.name, exc_info=error)

    def _freeze(self, cause: str) -> None:
        """Treat the actor as frozen: fail its calls, and end its process."""
        channel = self._calls.channel
        assert channel is not None
        self.detach_channel(ActorExit(channel.pid, cause, frozen=True), ActorState.RESTARTING)
        channel.kill_incarnation()
