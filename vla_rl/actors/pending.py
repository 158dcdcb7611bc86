"""A call that was sent and not answered yet."""

import asyncio
import time
from collections import deque
from typing import Any

import msgspec

from vla_rl.actors.actor import ActorMethod
from vla_rl.actors.call_limit import CallLimit
from vla_rl.actors.in_flight import ACKNOWLEDGED_BYTES, MOST_BYTES


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

    def waits_for_caller_of(self, other: "PendingCall") -> bool:
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
        if not self.future.done():
            self.future.set_result(value)
        self.notify()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the caller."""
        if not self.future.done():
            self.future.set_exception(error)
        self.notify()

    def notify(self) -> None:
        """Wake a task that waits for something other than the future."""


class PendingBegun(PendingCall):
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
        is_full = self._read_bytes + self._unread_bytes >= MOST_BYTES
        return (self.num_granted > 0 and not is_full) or self.is_cancelled

    def cancel(self) -> None:
        """Record that the actor was asked to stop the stream; its deadline for that starts now."""
        if not self.is_cancelled:
            self.is_cancelled, self.since = True, time.monotonic()

    def add(self, item: Any, num_bytes: int) -> None:
        """Take one item from the wire; the deadline of the next one starts."""
        self.num_granted -= 1
        self._sizes.append(num_bytes)
        self._unread_bytes += num_bytes
        self.since = time.monotonic()
        self.items.append(item)
        self._news.set()

    def notify(self) -> None:
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
        num_read, self.num_read, self._read_bytes = self.num_read, 0, 0
        return num_read
