"""Bounded channels between one writer and one reader of a stream, in one update."""

import asyncio
from collections import deque
from typing import Any, Final, final

from vla_rl.graph.spans import Activity, Interval, Waited


@final
class _End:
    def __repr__(self) -> str:
        return "END"


END: Final = _End()
"""Returned by a channel after its last item."""


class StreamBuffer:
    """Items in order. When `capacity` items are unread, the writer waits; no item is ever dropped.

    Both ends record in their `Activity` when they waited and what released them.
    """

    __slots__ = ("_abandoned", "_capacity", "_closed", "_items", "_reader", "_writer")

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: deque[Any] = deque()
        self._closed = self._abandoned = False
        self._reader: asyncio.Future[Interval | None] | None = None
        self._writer: asyncio.Future[Interval | None] | None = None

    async def put(self, item: object, activity: Activity) -> None:
        """Add an item; waits while the channel is full. Does nothing once the reader has ended."""
        while len(self._items) >= self._capacity and not self._abandoned:
            # the pause is recorded, so that a full stream shows up on the critical path as the
            # reader's time and not as the writer's work
            activity.pause()
            self._writer = asyncio.get_running_loop().create_future()
            activity.resume(await self._writer, Waited.FULL_STREAM)
        if not self._abandoned:
            self._items.append(item)
            _wake(self._reader, activity.last)

    async def get(self, activity: Activity) -> Any:
        """Wait for the next item and return it, or `END`."""
        while not self._items and not self._closed:
            activity.pause()
            self._reader = asyncio.get_running_loop().create_future()
            activity.resume(await self._reader, Waited.STREAM)
        activity.begin()
        if not self._items:
            return END
        item = self._items.popleft()
        _wake(self._writer, activity.last)
        return item

    def close(self, last: Interval | None) -> None:
        """Close the channel for writing; `last` is the interval in which the writer ended."""
        self._closed = True
        _wake(self._reader, last)

    def abandon(self) -> None:
        """Drop unread items, as the reader has ended.

        The writer then continues as if each item were read at once.
        """
        # a reader that failed must not leave its writer waiting for ever: the writer may feed
        # other readers that still need the rest of the stream
        self._abandoned = True
        self._items.clear()
        _wake(self._writer, None)


def _wake(waiter: "asyncio.Future[Interval | None] | None", cause: Interval | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(cause)
