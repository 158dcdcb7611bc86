"""A call as its actor sees it, from arrival to answer, with the credit of its stream."""

import asyncio
from collections import deque
from typing import Any

from vla_rl.actors.actor import ActorMethod
from vla_rl.actors.in_flight import MOST_BYTES
from vla_rl.actors.wire import Frames


class ArrivedCall:
    """One call: waiting in the mailbox, running, or streaming.

    Attributes:
        task: runs it; None while it waits in the mailbox.
        cancelled: whether its caller has cancelled it.
    """

    __slots__ = (
        "_credit",
        "_credit_came",
        "_sizes",
        "_unread_bytes",
        "call",
        "cancelled",
        "frames",
        "method",
        "task",
    )

    def __init__(self, method: ActorMethod, call: int, frames: Frames) -> None:
        self.method, self.call, self.frames = method, call, frames
        self.task: asyncio.Task[Any] | None = None
        self.cancelled = False
        self._credit = self._unread_bytes = 0
        self._credit_came: asyncio.Event | None = None
        self._sizes: deque[int] | None = None

    @property
    def has_credit(self) -> bool:
        """Whether the next item of the stream may be sent."""
        return self._credit > 0 and self._unread_bytes < MOST_BYTES

    async def until_credit(self) -> None:
        """Wait until the next item may be sent."""
        while not self.has_credit:
            self._credit_came = asyncio.Event()
            await self._credit_came.wait()

    def grant(self, items: int) -> None:
        """Allow as many items more; the consumer has read as many of those sent before."""
        self._credit += items
        # the first credit comes before any item
        for _ in range(min(items, len(self._sizes or ()))):
            assert self._sizes is not None
            self._unread_bytes -= self._sizes.popleft()
        if self._credit_came is not None:
            self._credit_came.set()

    def note_item(self, num_bytes: int) -> None:
        """Count an item of the stream that was sent."""
        if self._sizes is None:
            self._sizes = deque()
        self._credit -= 1
        self._sizes.append(num_bytes)
        self._unread_bytes += num_bytes
