"""Calls that wait: for a free slot in the mailbox, for a running actor, for their answer."""

import asyncio
import enum
import time
from collections import deque
from typing import Any, Protocol

import msgspec

from vla_rl.actors.calls.actor import ActorMethod
from vla_rl.actors.wire.sockets import ACKNOWLEDGED_BYTES, MOST_BYTES
from vla_rl.errors import ActorDied


class ActorState(enum.Enum):
    """State of an actor, as a call finds it."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    DEAD = "dead"


class ActorLifecycle:
    """State of one actor, the error that ended its last incarnation, and the wait for the next one.

    Attributes:
        state: current state.
        exit_error: error that ended the last incarnation; None while one is alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.state = ActorState.STARTING
        self.exit_error: ActorDied | None = None
        self._settled = asyncio.Event()

    def enter_state(self, state: ActorState, error: ActorDied | None) -> None:
        """Enter a state. Callers that wait for an incarnation go on, except while it restarts."""
        self.state, self.exit_error = state, error
        if state is ActorState.RESTARTING:
            self._settled.clear()
        else:
            self._settled.set()

    async def until_running(self) -> None:
        """Wait for a running incarnation. Raises: ActorDied if there will be none."""
        while self.state is not ActorState.RUNNING:
            if self.state is not ActorState.RESTARTING:
                raise self.make_exit_error()
            await self._settled.wait()

    def make_exit_error(self) -> ActorDied:
        """Return a new error that repeats the one which ended the last incarnation."""
        # each caller gets its own: a traceback and notes are added to the error that is raised
        error = self.exit_error
        if error is None:
            return ActorDied(self._name, 0, f"it is {self.state.value}")
        return type(error)(error.name, error.pid, error.cause, error.stderr_tail)

    def make_final_error(self, why: str, cause: BaseException | None) -> ActorDied:
        """Return the error that ended the last incarnation, and why there is no next one."""
        last = self.make_exit_error()
        reason = f"{last.cause}; {why}"
        if cause is not None:
            reason += f"; the last restart failed: {cause}"
        return type(last)(self._name, last.pid, reason, last.stderr_tail)


class Mailbox:
    """Slots for unanswered calls. Waiting senders get them in the order of their requests."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"mailbox is {size}, expected at least 1 unanswered call.")
        self.size = size
        self._taken = 0
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def num_waiting(self) -> int:
        """Number of senders that wait for a free slot."""
        return len(self._waiters)

    def try_take_slot(self) -> bool:
        """Take a slot if one is free and no sender waits for it; return whether it was taken."""
        # Not past those that wait: under load a quick caller would starve them for ever.
        if self._taken < self.size and not self._waiters:
            self._taken += 1
            return True
        return False

    async def take_slot(self) -> None:
        """Take a slot; waits while the mailbox is full."""
        if self.try_take_slot():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.free_slot()  # the slot came together with the cancellation: pass it on
            elif waiter in self._waiters:  # else `free_slot` has passed over it
                self._waiters.remove(waiter)
            raise

    def free_slot(self) -> None:
        """Free a slot, or hand it to the sender that has waited longest."""
        while self._waiters:
            waiter = self._waiters.popleft()
            # the slot is handed over, not freed: else a caller that came later could take it first
            if not waiter.done():
                waiter.set_result(None)
                return
        self._taken -= 1


class CallLimit(Protocol):
    """Sets the deadlines of a method's calls from the durations of earlier calls.

    Its methods must not block.
    """

    def num_units(self, args: tuple[Any, ...]) -> int:
        """Return the work of a call with these arguments, in the limit's own units."""
        ...

    def limit_s(self, num_units: int) -> float | None:
        """Return the longest time for this much work (s); None if too little is known."""
        ...

    def record_duration(self, num_units: int, seconds: float) -> None:
        """Learn from an answered call: its work, and its time without the wait before it."""
        ...

    def record_overdue(self, num_units: int) -> str:
        """Learn from a call that was not answered within `limit_s`.

        Return the reason for that limit, for the error.
        """
        ...


class PendingCall:
    """Waits for one answer.

    `since` is the time of sending (time.monotonic seconds). `task` is the waiting task; None for
    `tell`. `limit` sets its deadline from earlier calls, given its work of `num_units`, which is
    only set if there is a limit.
    """

    num_units: int

    __slots__ = (
        "deadline_s",
        "decoder",
        "future",
        "limit",
        "method",
        "num_units",
        "since",
        "task",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        method: ActorMethod,
        decoder: msgspec.msgpack.Decoder[Any],
        task: asyncio.Task[Any] | None,
    ) -> None:
        self.future: asyncio.Future[Any] = loop.create_future()
        self.method, self.decoder, self.task = method, decoder, task
        self.since = time.monotonic()
        self.deadline_s: float | None = None
        self.limit: CallLimit | None = None

    @property
    def method_name(self) -> str:
        """Name of the method, for messages."""
        return self.method.name

    @property
    def concurrent(self) -> bool:
        """Whether the actor handles it concurrently with other calls."""
        return self.method.concurrent

    @property
    def expects_answer(self) -> bool:
        """Whether the actor has to act next."""
        return True

    @property
    def is_awaited(self) -> bool:
        """Whether its task does nothing else until it is answered."""
        return not self.future.done()

    def waits_for_caller(self, other: "PendingCall") -> bool:
        """Return whether two calls wait for each other.

        This one waits for the task that made the other one, while that task waits for the other
        one.
        """
        if (
            self.expects_answer
            or self.concurrent
            or self.task is None
            or self.task is not other.task
        ):
            return False
        return other.is_awaited

    def succeed(self, value: Any) -> None:
        """Hand the answer to the caller."""
        # Done already if the caller was cancelled, or a type error ended it before.
        if not self.future.done():
            self.future.set_result(value)
        self.wake_waiter()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the caller."""
        if not self.future.done():
            self.future.set_exception(error)
        self.wake_waiter()

    def wake_waiter(self) -> None:
        """Wake a task that waits for something other than the future."""


class PendingDeferredCall(PendingCall):
    """A call that was sent before it is awaited; its task may do other things meanwhile."""

    __slots__ = ()

    @property
    def is_awaited(self) -> bool:
        """Whether its task currently awaits it; False if asyncio does not show that."""
        return getattr(self.task, "_fut_waiter", None) is self.future


class PendingStream(PendingCall):
    """Waits for items and then for the end. Holds at most the items that were granted.

    It holds at most `MOST_BYTES` of them, and one item more: the actor counts as it does.
    """

    __slots__ = (
        "_news",
        "_read_bytes",
        "_sizes",
        "_unread_bytes",
        "is_cancelled",
        "items",
        "num_granted",
        "num_read",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        method: ActorMethod,
        decoder: msgspec.msgpack.Decoder[Any],
        task: asyncio.Task[Any] | None,
    ) -> None:
        super().__init__(loop, method, decoder, task)
        self.items: deque[Any] = deque()
        self.num_granted = 0
        self.num_read = 0
        self._sizes: deque[int] = deque()
        self._read_bytes = self._unread_bytes = 0
        self.is_cancelled = False
        self._news = asyncio.Event()

    @property
    def expects_answer(self) -> bool:
        """Whether the actor has to act next: it has credit, or was asked to stop.

        Else it waits for its consumer.
        """
        # Counted as the actor counts: at this many bytes it pauses, and its silence is no fault.
        is_full = self._read_bytes + self._unread_bytes >= MOST_BYTES
        return (self.num_granted > 0 and not is_full) or self.is_cancelled

    def cancel(self) -> None:
        """Record that the actor was asked to stop the stream; its deadline for that starts now."""
        if not self.is_cancelled:
            self.is_cancelled, self.since = True, time.monotonic()

    def add_item(self, item: Any, num_bytes: int) -> None:
        """Take one item from the wire; the deadline of the next one starts."""
        self.num_granted -= 1
        self._sizes.append(num_bytes)
        self._unread_bytes += num_bytes
        # Each item has the whole deadline: a stream of an hour is no call that hangs.
        self.since = time.monotonic()
        self.items.append(item)
        self._news.set()

    def wake_waiter(self) -> None:
        """Wake the consumer."""
        self._news.set()

    async def has_item(self) -> bool:
        """Wait for an item; return False at the end of the stream.

        Raises: the error that ended the stream.
        """
        while not self.items:
            if self.future.done():
                self.future.result()
                return False
            self._news.clear()
            await self._news.wait()
        return True

    def count_read(self, batch: int) -> int:
        """Count an item that its consumer has read.

        Returns: the number of items since the last grant if it has reached `batch`, or if their
            size is worth a message; else 0.
        """
        self.num_read += 1
        num_bytes = self._sizes.popleft()
        self._unread_bytes -= num_bytes
        self._read_bytes += num_bytes
        if self.num_read < batch and self._read_bytes < ACKNOWLEDGED_BYTES:
            return 0
        # Half a window or 8 MiB at once: a message for each item would double the messages of a stream.
        num_read, self.num_read, self._read_bytes = self.num_read, 0, 0
        return num_read
