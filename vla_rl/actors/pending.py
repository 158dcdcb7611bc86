"""A call that was sent and not answered yet."""

import asyncio
import time
from collections import deque
from typing import Any

import msgspec

from vla_rl.actors.actor import ActorMethod
from vla_rl.actors.call_limit import CallLimit


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
    """Waits for items and then for the end. Holds at most the items that were granted."""

    __slots__ = ("_news", "is_cancelled", "items", "num_granted", "num_taken")

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
        self.num_taken = 0
        self.is_cancelled = False
        self._news = asyncio.Event()

    @property
    def expects_answer(self) -> bool:
        """Whether the actor has to act next: it has credit, or was asked to stop.

        Else it waits for its consumer.
        """
        return self.num_granted > 0 or self.is_cancelled

    def cancel(self) -> None:
        """Record that the actor was asked to stop the stream; its deadline for that starts now."""
        if not self.is_cancelled:
            self.is_cancelled, self.since = True, time.monotonic()

    def add(self, item: Any) -> None:
        """Take one item from the wire; the deadline of the next one starts."""
        self.num_granted -= 1
        self.since = time.monotonic()
        self.items.append(item)
        self._news.set()

    def notify(self) -> None:
        """Wake the consumer."""
        self._news.set()

    async def until_news(self) -> None:
        """Wait for an item or the end."""
        self._news.clear()
        await self._news.wait()
