"""ZeroMQ sockets for our messages: driven by their descriptor on a loop, bounded in bytes on the way.

pyzmq's own asyncio sockets cost three to four times as much as plain ones. Driving the descriptor
directly costs almost nothing, but it is edge-triggered: it announces a change once, any operation on
the socket may swallow that. So:

    1. messages are taken until the socket reports that there are no more,
    2. the socket is read again after sending,
    3. and once after it was registered.

Leaving out any of the three causes hangs, in one case only sometimes, under load. All three
happen in `_end_turn`, which follows each use of the socket within the same turn of the loop, after
the tasks that the message woke: off the critical path.

    sender ── arrays ──► ZeroMQ's queues, the network ──► reader's loop
       ▲                                                       │
       └────────────── RECEIVED, every few megabytes ──────────┘

ZeroMQ's own limit counts messages, one of ours may have a gigabyte. A sender therefore begins
no new work while `MOST_BYTES` are on the way: a reader whose loop is busy slows it down instead of
filling its own memory. Messages without array frames are not counted: their number is bounded.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import zmq
from zmq.backend import zmq_poll

from vla_rl.actors.wire.codec import count_described_bytes
from vla_rl.actors.wire.envelope import (
    BATCH_KIND,
    BATCHED_BELOW,
    ENVELOPE,
    ENVELOPE_SIZE,
    MAGIC,
    MAX_MESSAGE_BYTES,
    MOST_IN_BATCH,
    PART_BYTES,
    Frames,
    Kind,
    MalformedMessage,
    OnMessage,
    join_messages,
    num_announced_frames,
    split_messages,
)

HALF_SENT_MS: Final = 100
"""Time for the rest of a message that is half sent when its socket is closed. Without it, ZeroMQ 4.3.5
aborts the whole process if the connection is lost in that moment (session_base.cpp:233); seen when a
host died while a learner rank gave it its weights, and in 4 of 4 runs of 400 such closings."""

UNCHECKED_BYTES: Final = 64 << 20
"""Bytes of a message that are taken before they are compared with what it describes, and the most that
a socket takes whose messages begin with an identity."""

NO_VALUE: Final = b"\xc1"
"""The one byte that msgpack never uses."""

# a peer that floods the socket must not keep timers and other tasks of the loop from their turn
_MESSAGES_A_TURN = 256
_POLLIN, _POLLOUT, _NOBLOCK = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.NOBLOCK)


def lift_high_water_mark(socket: zmq.Socket[bytes]) -> None:
    """Remove the limit of a thousand queued messages.

    Above it messages are lost while ZeroMQ's thread is delayed.

    Call it before `bind` and `connect`. The queue is bounded by the number of calls in flight.
    """
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class MessageSocket:
    """Reads and writes our messages on `socket`; its subclasses decide when.

    Args:
        socket: bound or connected.
        on_message: called with the frames; must not raise. May be replaced.
        raw: hand over all frames as they come, because they begin with an identity or are not our
            messages.
        in_place: hand over the frames behind the first one as views of ZeroMQ's memory instead of
            copies: cheaper for large arrays, dearer for small ones.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[Frames], None],
        *,
        raw: bool = False,
        in_place: bool = False,
    ) -> None:
        self._socket, self.on_message, self._raw = socket, on_message, raw
        self._in_place = in_place
        self._get, self._recv = socket.getsockopt, socket.recv
        # skips the handling of options that we do not use
        self._send = super(zmq.Socket, socket).send
        self._batch: list[bytes] = []
        self.gathers = False
        """Whether small messages wait for later ones, to be sent together."""
        self._closed = False

    def send(self, frames: Frames) -> None:
        """Queue one message. The first of a turn is sent at once, the small ones after it together.

        Without a peer it is dropped: the peer's death is noticed elsewhere, and fails the call.
        """
        if not self.gathers:
            self._put(frames)
            self._open_turn()
        elif len(frames) == 1 and not self._raw and len(frames[0]) < BATCHED_BELOW:
            self._batch.append(frames[0])
            if len(self._batch) == MOST_IN_BATCH:
                self._flush()
        else:
            self._flush()
            self._put(frames)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self, linger_ms: int = 0) -> None:
        """Close the socket; messages not sent after `linger_ms` are dropped."""
        if not self._closed:
            self._flush()
            self._closed = True
            self._socket.close(linger=linger_ms)

    def _open_turn(self) -> None:
        """Gather small messages from now on, until the turn ends."""
        self.gathers = True

    def _flush(self) -> None:
        if self._batch and not self._closed:
            batch, self._batch = self._batch, []
            self._put(batch if len(batch) == 1 else [join_messages(batch)])

    def _put(self, frames: Frames) -> None:
        if self._closed:
            return
        try:
            if len(frames) == 1:
                self._send(frames[0], _NOBLOCK)
            else:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
        # No peer, and no limit is set: the channel reports its end, which fails the call.
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def receive(self) -> None:
        """Deliver the next message, if there is one."""
        try:
            head = self._recv(_NOBLOCK)
        except zmq.Again:
            return
        if self._raw:
            self.on_message(self._read_frames(head, _ALL))
        elif len(head) < ENVELOPE_SIZE or head[0] != MAGIC:
            self.on_message([head])
        elif head[1] == BATCH_KIND:
            self._deliver_batch(head)
        # The announced number of frames, because a query of the socket costs more than two bytes.
        elif head[4] or head[5]:
            self.on_message(self._read_frames(head, num_announced_frames(head)))
        else:
            self.on_message([head])

    def _read_frames(self, head: bytes, most: int) -> Frames:
        """Return a first frame with up to `most` others.

        Bytes are added up as frames come. Of a message with more than its payload describes only the
        envelope is kept, behind which no value can be read, so that the call that it answers fails.
        """
        frames: list[bytes | memoryview] = [head]
        num_bytes, expected = len(head), UNCHECKED_BYTES
        while len(frames) <= most and self._get(zmq.RCVMORE):
            if self._in_place or num_bytes >= PART_BYTES:
                frames.append(self._recv(zmq.NOBLOCK, copy=False).buffer.toreadonly())
            else:
                frames.append(self._recv(zmq.NOBLOCK))
            num_bytes += len(frames[-1])
            # Only behind 64 MiB: reading the description of each message would cost small ones most.
            if num_bytes > expected:
                expected = 0 if self._raw else find_most_bytes(frames)
                if num_bytes > expected:
                    frames.clear()
                    while self._get(zmq.RCVMORE):
                        self._recv(zmq.NOBLOCK, copy=False)
                    return [head] if self._raw else [head[:ENVELOPE_SIZE] + NO_VALUE]
        return frames

    def _deliver_batch(self, batch: bytes) -> None:
        try:
            messages = split_messages(batch)
        except MalformedMessage:
            self.on_message([b""])  # the receiver counts unreadable messages
            return
        for message in messages:
            self.on_message([message])


class LoopSocket(MessageSocket):
    """A socket on the running loop, which may serve other things too.

    Args:
        socket: bound or connected; other code that uses it calls `read_later` afterwards.
        on_message, raw, in_place: see `MessageSocket`.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: Callable[[Frames], None],
        *,
        raw: bool = False,
        in_place: bool = False,
    ) -> None:
        super().__init__(socket, on_message, raw=raw, in_place=in_place)
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._watched = [(socket, _POLLIN)]
        self._comes_back = False
        self._loop.add_reader(self._fd, self._on_readable)
        self.read_later()

    def read_later(self) -> None:
        """Read the socket later in this turn: after our own use, and after use by other code."""
        # Once in a turn: each message of it would otherwise schedule a read of its own.
        if not self._comes_back:
            self._comes_back = True
            self._loop.call_soon(self._end_turn)

    @property
    def has_peer(self) -> bool:
        """Whether a PAIR socket has a peer, or messages of one that ZeroMQ has not read yet."""
        return bool(zmq_poll([(self._socket, _POLLOUT)], 0))

    def drain_all(self) -> None:
        """Deliver all messages that have arrived."""
        while not self._deliver(_MESSAGES_A_TURN):
            pass

    def close(self, linger_ms: int = 0) -> None:
        """Leave the loop and close the socket; messages not sent after `linger_ms` are dropped."""
        if not self._closed:
            self._loop.remove_reader(self._fd)
        super().close(linger_ms)

    def _on_readable(self) -> None:
        """Deliver one message.

        The tasks that it wakes run before the turn ends, and what they send is sent at once.
        """
        if not self._closed:
            self.receive()
            self.read_later()

    def _deliver_batch(self, batch: bytes) -> None:
        super()._deliver_batch(batch)
        self._open_turn()  # several answers may wake tasks that each send a message

    def _open_turn(self) -> None:
        self.gathers = True
        self.read_later()

    def _end_turn(self) -> None:
        self.gathers = self._comes_back = False
        if self._closed:
            return
        if self._batch:
            self._flush()
        if not self._deliver(_MESSAGES_A_TURN):
            self._open_turn()  # others on this loop go first

    def _deliver(self, most: int) -> bool:
        """Deliver up to `most` messages; return True if none is left.

        Polling first is cheaper than an exception, and zmq_poll is cheaper than reading ZMQ_EVENTS.
        """
        for _ in range(most):
            if self._closed or not zmq_poll(self._watched, 0):
                return True
            self.receive()
        return False


_ALL = 1 << 30


def find_most_bytes(frames: Frames) -> int:
    """Return the most bytes that a message may have, from the frames of it that have come; 0 for
    one that cannot be read.
    """
    payload = bytearray()
    for frame in frames:
        payload += frame
        if len(frame) != PART_BYTES:
            break
    else:
        return MAX_MESSAGE_BYTES  # of the payload itself; it is still coming
    try:
        return len(payload) + count_described_bytes(memoryview(payload)[ENVELOPE_SIZE:])
    except MalformedMessage:
        return 0


MOST_BYTES: Final = 64 << 20
"""Bytes on the way in one direction, not counting the message that exceeds them: 50 ms of a link of
10 Gbit/s."""
ACKNOWLEDGED_BYTES: Final = MOST_BYTES // 8
"""Bytes that a reader acknowledges at once."""
_RECEIVED: Final = int(Kind.RECEIVED)


def count_array_bytes(frames: Frames) -> int:
    """Return the size of a message with array frames; 0 for any other."""
    return sum(map(len, frames)) if len(frames) > 1 else 0


class BoundedSocket:
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
        self._sent += count_array_bytes(frames)
        self._socket.send(frames)

    async def wait_for_room(self) -> None:
        """Wait for room, behind those that wait already; send in the same turn of the loop."""
        if self.has_room:
            return
        self._num_waiting += 1
        try:
            # waits for `_turn`, then `_news`; woken by RECEIVED of the reader, or by `close`.
            # The lock keeps the order: all of them would otherwise see room at once, and send.
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
        self._received += count_array_bytes(frames)
        # Every 8 MiB: an acknowledgement of each message would double their number.
        if self._received >= ACKNOWLEDGED_BYTES:
            self._socket.send([ENVELOPE.pack(MAGIC, _RECEIVED, 0, 0, 0, self._received)])
            self._received = 0
        self.on_message(frames)
