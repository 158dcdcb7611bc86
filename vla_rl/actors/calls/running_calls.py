"""How the calls of one actor run: from their arrival to a result, the items of a stream, or an error.

A call whose method never suspends, such as the step of a simulator, is received, run, answered
inside the wait of the actor's own loop. It needs no turn of asyncio, no edge-triggered descriptor. The
wait ends as soon as there is anything else to do: a woken task, a due timer, a descriptor or a thread
with news. Then asyncio takes its turn; the socket is read again before the next one.

A call that has to wait after such a start continues as if its task had begun it (`EagerCall`).
"""

import asyncio
import contextvars
import math
import selectors
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from typing import Any, TypeVarTuple

import msgspec
import zmq
from zmq.backend import zmq_poll

from vla_rl.actors.calls.actor import Actor, ActorMethod, MethodTable
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import Frames, Kind, MalformedMessage
from vla_rl.actors.wire.sockets import MOST_BYTES, BoundedSocket, MessageSocket, count_array_bytes
from vla_rl.util.error_reports import make_report


class EagerCall:
    """Awaiting it resumes the coroutine at its current position, as its own task would have.

    Args:
        running: suspended after its first `send`; None if it was ended by `error`.
        waits_for: what it yielded to the loop: a future, or None for one turn.
        error: the exception that ended it; raised again when this is awaited.
    """

    def __init__(
        self,
        running: Coroutine[Any, Any, Any] | None,
        waits_for: Any = None,
        error: BaseException | None = None,
    ) -> None:
        self._running, self._waits_for, self._error = running, waits_for, error
        self.cancellation: asyncio.CancelledError | None = None
        """Cancellation that arrived for the coroutine before it was awaited."""

    def __await__(self) -> Generator[Any, Any, Any]:
        running = self._running
        if self._error is not None or running is None:
            raise self._error or RuntimeError(
                "a call that was begun has neither a coroutine nor an error."
            )
        waits_for, cancellation = self._waits_for, self.cancellation
        # As asyncio's own task does: what it waits for is cancelled, and only if that has ended already the
        # coroutine gets the error directly.
        if cancellation is not None and (waits_for is None or not waits_for.cancel()):
            step, value = running.throw, cancellation
        else:
            step, value = yield from _await_outcome(running, waits_for)
        while True:
            try:
                waits_for = step(value)
            except StopIteration as done:
                return done.value
            step, value = yield from _await_outcome(running, waits_for)


def _await_outcome(
    running: Coroutine[Any, Any, Any], waits_for: Any
) -> Generator[Any, Any, tuple[Any, Any]]:
    """Wait as the coroutine asks; return how to resume it, and with which value."""
    try:
        value = yield waits_for
    except BaseException as error:
        return running.throw, error
    return running.send, value


class InboundCall:
    """One call: waiting in the mailbox, running, or streaming.

    Attributes:
        task: runs it; None while it waits in the mailbox.
        runner: that of its caller.
        cancelled: whether its caller has cancelled it.
    """

    __slots__ = (
        "_credit",
        "_credit_event",
        "_sizes",
        "_unread_bytes",
        "call",
        "cancelled",
        "frames",
        "method",
        "runner",
        "task",
    )

    def __init__(
        self, method: ActorMethod, call: int, frames: Frames, runner: "CallRunner"
    ) -> None:
        self.method, self.call, self.frames, self.runner = method, call, frames, runner
        self.task: asyncio.Task[Any] | None = None
        self.cancelled = False
        self._credit = self._unread_bytes = 0
        self._credit_event: asyncio.Event | None = None
        self._sizes: deque[int] | None = None

    @property
    def has_credit(self) -> bool:
        """Whether the next item of the stream may be sent."""
        return self._credit > 0 and self._unread_bytes < MOST_BYTES

    async def until_credit(self) -> None:
        """Wait until the next item may be sent."""
        while not self.has_credit:
            self._credit_event = asyncio.Event()
            await self._credit_event.wait()

    def grant_items(self, items: int) -> None:
        """Allow as many items more; the consumer has read as many of those sent before."""
        self._credit += items
        # the first credit comes before any item
        for _ in range(min(items, len(self._sizes or ()))):
            assert self._sizes is not None
            self._unread_bytes -= self._sizes.popleft()
        if self._credit_event is not None:
            self._credit_event.set()

    def cancel(self) -> None:
        """End it, because its caller wants no answer any more."""
        if not self.cancelled:
            self.cancelled = True
            if self.task is not None:
                self.task.cancel()

    def count_item(self, num_bytes: int) -> None:
        """Count an item of the stream that was sent."""
        if self._sizes is None:
            self._sizes = deque()
        self._credit -= 1
        self._sizes.append(num_bytes)
        self._unread_bytes += num_bytes


_RESULT = int(Kind.RESULT)


class CallRunner:
    """Calls the methods of one actor, and sends what comes of it.

    Args:
        actor, table: the instance and its methods.
        send: queues frames for the caller.
        outgoing: bounds the bytes on the way to the caller; see `ActorServer`.
        calls: calls that have no answer yet, by number; one leaves it here.
        reject: counts arguments that cannot be read.

    Attributes:
        functions: the actor's methods, by index.
        decoders: decoders of their arguments, by index.
    """

    def __init__(
        self,
        actor: Actor,
        table: MethodTable,
        codec: Codec,
        actor_id: int,
        send: Callable[[Frames], Any],
        outgoing: BoundedSocket | None,
        calls: dict[int, InboundCall],
        reject: Callable[[MalformedMessage], None],
    ) -> None:
        self._codec, self._actor_id, self._send = codec, actor_id, send
        self._outgoing, self._calls, self._reject = outgoing, calls, reject
        self._actor_label = type(actor).__name__
        # Found once: a simulator is called thousands of times a second, and methods do not change.
        self.functions = [getattr(actor, entry.name) for entry in table.methods]
        self.decoders = [codec.get_decoder(entry.args_type) for entry in table.methods]

    def send_answer(self, kind: Kind, call: int, value: Any) -> None:
        """Send an answer that is not a method's result."""
        self._send(self._codec.encode(kind, 0, self._actor_id, call, value, self._actor_label))

    async def run_call(self, work: InboundCall, eager: EagerCall | None = None) -> None:
        """Run one call to its answer, or continue one that was begun.

        Raises a cancellation only if the actor itself is being stopped.
        """
        method, call = work.method, work.call
        try:
            if eager is not None:
                self._send_result(work, await eager)
                return
            if work.cancelled:
                self._codec.discard(work.frames)
                self.send_answer(Kind.CANCELLED, call, None)
                return
            if self._outgoing is not None:
                await self._outgoing.wait_for_room()
            args = self._codec.decode(self.decoders[method.index], work.frames)
            work.frames = ()
            function = self.functions[method.index]
            if method.is_stream:
                await self._stream(work, method.call_function(function, args))
                self.send_answer(Kind.END, call, None)
            else:
                result = await (
                    function(*args)
                    if method.num_plain_args >= 0
                    else method.call_function(function, args)
                )
                self._send_result(work, result)
        except asyncio.CancelledError as error:
            if work.cancelled:
                self.send_answer(Kind.CANCELLED, call, None)
            # Only a cancellation of this task ends it. One that the actor's code caused is its result.
            elif (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            else:  # the application's own, e.g. it awaited a cancelled future
                self.send_answer(Kind.ERROR, call, make_report(error))
        except msgspec.ValidationError as error:
            problem = TypeError(f"{method.label} got wrong argument types: {error}")
            self.send_answer(Kind.ERROR, call, make_report(problem))
        except MalformedMessage as error:
            self._reject(error)
            self.send_answer(Kind.ERROR, call, make_report(error))
        except Exception as error:  # each exception of the actor is sent to the caller
            self.send_answer(Kind.ERROR, call, make_report(error))
        finally:
            del self._calls[call]

    def _send_result(self, work: InboundCall, result: Any) -> None:
        label = work.method.label
        self._send(self._codec.encode(_RESULT, 0, self._actor_id, work.call, result, label))

    async def _stream(self, work: InboundCall, items: AsyncIterator[Any]) -> None:
        """Send items as long as the caller grants credit.

        Close the generator however the stream ends.
        """
        try:
            async for item in items:
                if not work.has_credit:
                    await work.until_credit()
                if self._outgoing is not None:
                    await self._outgoing.wait_for_room()
                frames = self._codec.encode(
                    Kind.ITEM, 0, self._actor_id, work.call, item, work.method.label
                )
                work.count_item(count_array_bytes(frames))
                self._send(frames)
        # Else the generator's own `finally` runs whenever the collector finds it.
        finally:
            await items.aclose()  # type: ignore[attr-defined]


_POLLIN = int(zmq.POLLIN)
_Ts = TypeVarTuple("_Ts")


class ActorLoop(asyncio.SelectorEventLoop):
    """An asyncio loop with one `WaitingSocket` of its own.

    Without one it behaves like any other loop.
    """

    def __init__(self) -> None:
        self._wait = _Wait()
        super().__init__(self._wait)

    def open_socket(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[Frames], None],
        *,
        in_place: bool = False,
    ) -> "WaitingSocket":
        """Read `socket` whenever the loop has nothing to do, and once per turn otherwise.

        See `MessageSocket` for `in_place`.
        """
        self._wait.socket = WaitingSocket(socket, on_message, in_place=in_place)
        # Both in one poll: the loop's other descriptors must end a wait for messages.
        self._wait.watched = [(socket, _POLLIN), (self._wait.fileno(), _POLLIN)]
        return self._wait.socket

    def call_soon(
        self,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        """Schedule as asyncio does; also end the wait."""
        self._wait.num_changes += 1
        return super().call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule as asyncio does; also end the wait, which may have been longer."""
        self._wait.num_changes += 1
        return super().call_at(when, callback, *args, context=context)


class WaitingSocket(MessageSocket):
    """A socket that is read by the wait of an `ActorLoop`.

    The answer to a call that came alone is sent at once; answers to calls that came together are
    sent together.
    """

    def end_turn(self) -> None:
        """Send the gathered messages; the next message is sent at once again."""
        self.gathers = False
        if self._batch:
            self._flush()

    def _deliver_batch(self, batch: bytes) -> None:
        self.gathers = True
        super()._deliver_batch(batch)


class _Wait(selectors.EpollSelector):
    """The descriptors of a loop, and its socket."""

    socket: WaitingSocket | None = None
    watched: list[tuple[Any, int]]
    num_changes = 0
    """Number of times that something was scheduled; a wait ends when it grows."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the ready descriptors; wait at most `timeout` s, None for ever.

        Messages are delivered meanwhile.
        """
        socket = self.socket
        if socket is None or socket.is_closed:
            return super().select(timeout)
        watched, end = self.watched, math.inf if timeout is None else time.monotonic() + timeout
        num_changes = self.num_changes
        while True:
            socket.end_turn()
            ready = zmq_poll(
                watched,
                -1 if timeout is None else max(0, math.ceil((end - time.monotonic()) * 1000)),
            )
            if not ready:
                return []
            if ready[0][0] is watched[0][0]:
                socket.receive()
            # Anything scheduled belongs to asyncio's turn; a timer of it may be due before `end`.
            if ready[-1][0] is not watched[0][0] or self.num_changes != num_changes:
                socket.end_turn()
                return super().select(0)
