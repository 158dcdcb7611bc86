"""The actor's end of a channel: takes messages, runs methods, answers.

It is the same in all placements.

One task works through the mailbox, so that a call needs no task of its own; concurrent methods
get a task each, in a task group. In a process of its own an idle actor begins a call as its message
arrives, without a turn of the loop in between; if the call has to wait for something, the mailbox
task continues it. No message can end the loop of this task: unreadable bytes are counted; wrong
argument types and exceptions of the actor's own code are answered.
"""

import asyncio
import contextvars
import os
import time
from asyncio.tasks import _enter_task, _leave_task  # public by asyncio's chapter on extending it
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from vla_rl.actors.calls.actor import Actor, MethodTable
from vla_rl.actors.calls.callers import Caller, Guest
from vla_rl.actors.calls.running_calls import EagerCall, InboundCall
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import (
    ENVELOPE,
    ENVELOPE_SIZE,
    MAGIC,
    OWN_CALL,
    Frames,
    Kind,
    MalformedMessage,
    ProcessStart,
)
from vla_rl.actors.wire.sockets import BoundedSocket
from vla_rl.util.error_reports import make_report
from vla_rl.util.stalls import LoopLag

# plain numbers: access to an enum member costs a dictionary lookup for each message
_CALL, _STOP, _LAG, _SHARE = map(int, (Kind.CALL, Kind.STOP, Kind.LAG, Kind.SHARE))
_RESULT = int(Kind.RESULT)
_unpack = ENVELOPE.unpack_from

_LONGEST_TURN_S = 0.001
"""After this long without a pause the loop may read its sockets, where the cancellation of a call
may be waiting."""
_PAUSE_S = 20e-6
"""Calls closer together than this count as queued behind one another."""


class ActorServer:
    """Runs one actor for its owner, and for those to whom the owner gave a handle.

    Args:
        actor, table: the instance and its methods.
        send: queues frames for the caller.
        mailbox: largest number of unanswered calls; a caller of ours never sends more, so further
            ones are rejected.
        lag: lag sampler of this loop, reported on request.
        outgoing: bounds the bytes on the way to the caller; no call and no item of a stream is
            begun while it has no room. None if nothing has to be bounded.
        at_once: whether `on_message`, called by the loop outside any task, begins calls itself
            while the actor is idle.
    """

    def __init__(
        self,
        actor: Actor,
        table: MethodTable,
        codec: Codec,
        actor_id: int,
        send: Callable[[Frames], Any],
        mailbox: int,
        lag: LoopLag,
        outgoing: BoundedSocket | None = None,
        *,
        at_once: bool,
    ) -> None:
        self._actor, self._table, self._codec, self._actor_id, self._send = (
            actor,
            table,
            codec,
            actor_id,
            send,
        )
        self._lag, self._outgoing = lag, outgoing
        self._owner = Caller(actor, table, codec, actor_id, send, outgoing, mailbox, self._put)
        self._guests: set[Guest] = set()
        self._works, self._runner = self._owner.calls, self._owner.runner
        self._share_key = codec.get_decoder(str)
        self._functions, self._args = self._runner.functions, self._runner.decoders
        self._labels = [entry.label for entry in table.methods]
        self._short = frozenset(
            entry.index for entry in table.methods if at_once and entry.is_plain
        )
        self._mailbox: deque[InboundCall | None] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._group: asyncio.TaskGroup | None = None
        self._loop = asyncio.get_running_loop()
        self._context: contextvars.Context | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_idle, self._worked_s, self._ended = False, 0.0, 0.0
        self._eager_call: tuple[InboundCall, EagerCall] | None = None
        self._is_abandoned = False
        self.is_killed = False
        """Whether its task was cancelled for good. Its owner sets this, since a call may mistake
        the cancellation for its own."""

    @property
    def num_rejected(self) -> int:
        """Number of the owner's messages that could not be read."""
        return self._owner.num_rejected

    async def serve(self, *, is_started: bool = False) -> bool:
        """Start the actor, work until STOP, stop the actor; return True.

        With `is_started` it has been served to another caller before. If the caller is lost
        meanwhile (`abandon`), the actor is not stopped, and False is returned.

        Raises: what `on_start` or `on_stop` raises.
        """
        if not is_started:
            await self._actor.on_start()
        self._runner.send_answer(Kind.READY, OWN_CALL, ProcessStart(os.getpid()))
        self._context = contextvars.copy_context()
        try:
            async with asyncio.TaskGroup() as self._group:
                self._task = self._group.create_task(
                    self._work_through_mailbox(), name="mailbox", context=self._context
                )
                await self._task
                self._cancel_all()
        finally:
            self._group = None
            self._close_guests()
        if self._is_abandoned:
            return False
        await self._actor.on_stop()
        return True

    def abandon(self) -> None:
        """Cancel all calls and end `serve`, because the caller is lost; the actor lives on."""
        self._is_abandoned, self._is_idle = True, False
        self._cancel_all()
        self._mailbox.appendleft(None)
        self._wake_up()

    def on_message(self, frames: Frames) -> None:
        """Take one message from the channel; never raises."""
        head = frames[0]
        try:
            if len(head) < ENVELOPE_SIZE:
                raise MalformedMessage(
                    f"message of {len(head)} bytes, expected at least {ENVELOPE_SIZE}."
                )
            magic, kind, index, _, _, call = _unpack(head)
            if magic != MAGIC:
                raise MalformedMessage(f"message begins with {magic:#x}, expected {MAGIC:#x}.")
            if kind == _CALL:
                # Only while nothing waits: a call that overtook another would break the order of calls.
                if (
                    self._is_idle
                    and index in self._short
                    and call not in self._works
                    and (self._outgoing is None or self._outgoing.has_room)
                ):
                    self._begin(index, call, frames)
                else:
                    self._owner.take(kind, index, call, frames)
            elif kind == _STOP:
                self._is_idle = False
                self._mailbox.append(None)
                self._wake_up()
            # Answered here, past the mailbox: one asks for it because a call does not end.
            elif kind == _LAG:
                self._runner.send_answer(Kind.RESULT, call, self._lag.make_report())
            elif kind == _SHARE:
                self._share(call, frames)
            else:
                self._owner.take(kind, index, call, frames)
        except MalformedMessage as error:
            self._owner.reject(error)

    def _put(self, work: InboundCall) -> None:
        """Put a call in the mailbox, or begin it if its method is concurrent."""
        method = work.method
        if method.concurrent and self._group is not None:
            work.task = self._group.create_task(work.runner.run_call(work), name=method.label)
        else:
            self._is_idle = False
            self._mailbox.append(work)
            if len(self._mailbox) == 1:
                self._wake_up()

    def _share(self, call: int, frames: Frames) -> None:
        """Listen for one more caller, and answer with the address."""
        try:
            key = self._codec.decode(self._share_key, frames)
            guest = Guest(key, self._actor, self._table, self._put, self._guests.discard)
        except (OSError, msgspec.ValidationError) as error:
            self._runner.send_answer(Kind.ERROR, call, make_report(error))
        else:
            self._guests.add(guest)
            self._runner.send_answer(Kind.RESULT, call, guest.address)

    def _cancel_all(self) -> None:
        """Cancel all calls; those to whom the owner gave a handle lose it."""
        self._owner.cancel_all()
        self._close_guests()

    def _close_guests(self) -> None:
        for guest in list(self._guests):
            guest.close()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _begin(self, index: int, call: int, frames: Frames) -> None:
        """Run a call to its answer.

        If it waits or fails, the mailbox task, in whose name it runs, continues it.
        """
        task, loop, context = self._task, self._loop, self._context
        assert task is not None
        assert context is not None
        running: Coroutine[Any, Any, Any] | None = None
        waits_for: Any = None
        error: BaseException | None = None
        self._is_idle = False
        began = time.perf_counter()
        # The code of the actor sees the mailbox task as the current one, as it does when that task runs it:
        # `asyncio.timeout` and task groups need one.
        _enter_task(loop, task)
        try:
            running = self._functions[index](*self._codec.decode(self._args[index], frames))
            waits_for = context.run(running.send, None)
        except StopIteration as done:
            try:
                self._send(
                    self._codec.encode(
                        _RESULT, 0, self._actor_id, call, done.value, self._labels[index]
                    )
                )
            except TypeError as failure:
                error = failure
            else:
                ended = time.perf_counter()
                self._worked_s = (
                    ended - began + (self._worked_s if began - self._ended < _PAUSE_S else 0.0)
                )
                self._ended = ended
                self._is_idle = self._worked_s < _LONGEST_TURN_S
                if not self._is_idle:
                    self._wake_up()  # the loop takes a turn; what comes until then is queued
                return
        except BaseException as failure:
            # includes e.g. SystemExit: raised again in the mailbox task
            error = failure
        finally:
            _leave_task(loop, task)
        work = self._works[call] = InboundCall(self._table.methods[index], call, (), self._runner)
        work.task = task
        self._eager_call = work, EagerCall(running, waits_for, error)
        error = None  # its traceback refers to this frame
        self._wake_up()

    async def _work_through_mailbox(self) -> None:
        mailbox = self._mailbox
        task = asyncio.current_task()
        assert task is not None
        turn_began = time.perf_counter()
        # waits for                      woken by
        # work, in `_until_woken`        a message of the owner or a guest, an eager call, `abandon`
        # the call itself, `run_call`    whatever the actor's method awaits
        while not self.is_killed:
            while not mailbox and self._eager_call is None:
                await self._until_woken()
                turn_began = time.perf_counter()
            if self._eager_call is not None:
                (work, eager), self._eager_call = self._eager_call, None
                await self._runner.run_call(work, eager)
                if work.cancelled:
                    task.uncancel()
                continue
            waiting = mailbox.popleft()
            if waiting is None:
                return
            work = waiting
            # it came before the task group existed
            if work.method.concurrent and self._group is not None:
                work.task = self._group.create_task(
                    work.runner.run_call(work), name=work.method.label
                )
                continue
            work.task = task
            await work.runner.run_call(work)
            if work.cancelled:
                task.uncancel()
            # Methods that never suspend would keep the loop from its sockets, where a cancellation waits.
            if mailbox and time.perf_counter() - turn_began > _LONGEST_TURN_S:
                await asyncio.sleep(0)
                turn_began = time.perf_counter()
        raise asyncio.CancelledError

    async def _until_woken(self) -> None:
        """Wait for work. A cancellation meant for a call begun meanwhile is passed to that call."""
        self._wake = self._loop.create_future()
        self._is_idle, self._worked_s = True, 0.0  # the mailbox is empty
        try:
            await self._wake
        except asyncio.CancelledError as cancellation:
            if self._eager_call is None:
                raise
            self._eager_call[1].cancellation = cancellation
        finally:
            self._is_idle = False
