"""Bound the bytes on the way between the two ends of a connection.

    sender ── arrays ──► ZeroMQ's queues, the network ──► reader's loop
       ▲                                                       │
       └────────────── RECEIVED, every few megabytes ──────────┘

ZeroMQ's own limit counts messages, and one of ours may have a gigabyte. A sender therefore begins
no new work while `MOST_BYTES` are on the way: a reader whose loop is busy slows it down instead of
filling its own memory. Messages without array frames are not counted: their number is bounded.
"""

import asyncio
from typing import Final

from vla_rl.actors.channel import OnMessage
from vla_rl.actors.sockets import MessageSocket
from vla_rl.actors.wire import ENVELOPE, MAGIC, Frames, Kind

MOST_BYTES: Final = 64 << 20
"""Bytes on the way in one direction, not counting the message that exceeds them: 50 ms of a link of
10 Gbit/s."""
ACKNOWLEDGED_BYTES: Final = MOST_BYTES // 8
"""Bytes that a reader acknowledges at once."""
_RECEIVED: Final = int(Kind.RECEIVED)


def array_bytes(frames: Frames) -> int:
    """Return the size of a message with array frames; 0 for any other."""
    return sum(map(len, frames)) if len(frames) > 1 else 0


class MeteredSocket:
    """Counts what passes through `socket` in both directions; the other end has one too."""

    def __init__(self, socket: MessageSocket, on_message: OnMessage) -> None:
        self._socket, self.on_message = socket, on_message
        socket.on_message = self._on_message
        self._sent = self._received = self._num_waiting = 0
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._is_closed = False

    @property
    def has_room(self) -> bool:
        """Whether a sender need not wait."""
        return self._num_waiting == 0 and self._sent < MOST_BYTES

    def send(self, frames: Frames) -> None:
        """Queue one message, also if there is no room: it exists already."""
        self._sent += array_bytes(frames)
        self._socket.send(frames)

    async def until_room(self) -> None:
        """Wait for room, behind those that wait already; send in the same turn of the loop."""
        if self.has_room:
            return
        self._num_waiting += 1
        try:
            async with self._turn:
                while self._sent >= MOST_BYTES and not self._is_closed:
                    self._news.clear()
                    await self._news.wait()
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Release those that wait: what they send is dropped."""
        self._is_closed = True
        self._news.set()

    def _on_message(self, frames: Frames) -> None:
        head = frames[0]
        if len(head) == ENVELOPE.size and head[1] == _RECEIVED:
            self._sent -= ENVELOPE.unpack_from(head)[-1]
            self._news.set()
            return
        self._received += array_bytes(frames)
        if self._received >= ACKNOWLEDGED_BYTES:
            self._socket.send([ENVELOPE.pack(MAGIC, _RECEIVED, 0, 0, 0, self._received)])
            self._received = 0
        self.on_message(frames)
