"""ZeroMQ sockets that carry our messages, and one of them driven by its file descriptor on the running loop.

pyzmq's own asyncio sockets cost three to four times the plain ones. The descriptor by hand costs nearly nothing, but it is
edge-triggered: it announces a change once, and any operation on the socket may swallow the announcement. So:

    1. what has arrived is taken until the socket says that there is no more,
    2. the socket is looked at again after sending,
    3. and once after it was registered.

Leaving out any of the three hangs, one of them only sometimes and only under load. All three happen in `_end_turn`, which
follows every use of the socket within the same turn of the loop, after whoever the message woke: off the critical path.
"""

import asyncio
from collections.abc import Callable

import zmq
from zmq.backend import zmq_poll

from vla_rl.actors.wire import (
    BATCH_KIND,
    BATCHED_BELOW,
    ENVELOPE_SIZE,
    MAGIC,
    MOST_IN_BATCH,
    Frames,
    MalformedMessage,
    join_messages,
    num_frames_after,
    split_messages,
)

_MESSAGES_A_TURN = 256
_POLLIN, _POLLOUT, _NOBLOCK = int(zmq.POLLIN), int(zmq.POLLOUT), int(zmq.NOBLOCK)


def lift_high_water_mark(socket: zmq.Socket[bytes]) -> None:
    """Drop nothing: above ZeroMQ's mark of a thousand messages, what is sent while its thread is kept waiting is lost.

    To be called before `bind` and `connect`. The calls in flight are what bounds the queue.
    """
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class MessageSocket:
    """Reads and writes messages of ours on `socket`; who says when is a matter of its subclasses.

    Args:
        socket: bound or connected.
        on_message: called with the frames; must not raise. May be replaced.
        raw: hand over all frames as they come, because they begin with an identity, or are not ours at all.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[Frames], None], *, raw: bool = False) -> None:
        self._socket, self.on_message, self._raw = socket, on_message, raw
        self._get, self._recv = socket.getsockopt, socket.recv
        self._send = super(zmq.Socket, socket).send  # without a look at options that we do not use
        self._batch: list[bytes] = []
        self.gathers = False
        """Whether small messages wait for those behind them, to leave together."""
        self._closed = False

    def send(self, frames: Frames) -> None:
        """Queue one message. The first of a turn leaves at once, the small ones after it together.

        Where there is nobody at the other end it is dropped: its death is noticed elsewhere, and fails the call.
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
        """Close the socket; what is not sent after `linger_ms` is dropped."""
        if not self._closed:
            self._flush()
            self._closed = True
            self._socket.close(linger=linger_ms)

    def _open_turn(self) -> None:
        """From here on messages are gathered, until the turn ends."""
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
        except zmq.Again:
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def receive(self) -> None:
        """Deliver what comes next, if anything does."""
        try:
            head = self._recv(_NOBLOCK)
        except zmq.Again:
            return
        if self._raw:
            self.on_message([head, *self._frames_after(_ALL)])
        elif len(head) < ENVELOPE_SIZE or head[0] != MAGIC:
            self.on_message([head])
        elif head[1] == BATCH_KIND:
            self._deliver_batch(head)
        elif head[4] or head[5]:
            self.on_message([head, *self._frames_after(num_frames_after(head))])
        else:
            self.on_message([head])

    def _frames_after(self, most: int) -> list[bytes]:
        frames: list[bytes] = []
        while len(frames) < most and self._get(zmq.RCVMORE):
            frames.append(self._recv(zmq.NOBLOCK))
        return frames

    def _deliver_batch(self, batch: bytes) -> None:
        try:
            messages = split_messages(batch)
        except MalformedMessage:
            self.on_message([b""])  # the receiver counts what it cannot read
            return
        for message in messages:
            self.on_message([message])


class LoopSocket(MessageSocket):
    """A socket on the running loop, beside whatever else that loop does.

    Args:
        socket: bound or connected; whoever else uses it calls `look_again` afterwards.
        on_message, raw: see `MessageSocket`.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[Frames], None], *, raw: bool = False) -> None:
        super().__init__(socket, on_message, raw=raw)
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._watched = [(socket, _POLLIN)]
        self._comes_back = False
        self._loop.add_reader(self._fd, self._on_readable)
        self.look_again()

    def look_again(self) -> None:
        """Look at the socket later in this turn; for us, and for whoever uses the socket beside us."""
        if not self._comes_back:
            self._comes_back = True
            self._loop.call_soon(self._end_turn)

    @property
    def has_peer(self) -> bool:
        """Whether a PAIR socket has somebody at its other end, or ZeroMQ's thread has not read all that they sent."""
        return bool(zmq_poll([(self._socket, _POLLOUT)], 0))

    def drain_all(self) -> None:
        """Deliver everything that has arrived, however much."""
        while not self._deliver(_MESSAGES_A_TURN):
            pass

    def close(self, linger_ms: int = 0) -> None:
        """Leave the loop and close the socket; what is not sent after `linger_ms` is dropped."""
        if not self._closed:
            self._loop.remove_reader(self._fd)
        super().close(linger_ms)

    def _on_readable(self) -> None:
        """Whoever the message wakes runs before the turn ends; what it sends then leaves at once."""
        if not self._closed:
            self.receive()
            self.look_again()

    def _deliver_batch(self, batch: bytes) -> None:
        super()._deliver_batch(batch)
        self._open_turn()  # what several answers wake may have several things to send

    def _open_turn(self) -> None:
        self.gathers = True
        self.look_again()

    def _end_turn(self) -> None:
        self.gathers = self._comes_back = False
        if self._closed:
            return
        if self._batch:
            self._flush()
        if not self._deliver(_MESSAGES_A_TURN):
            self._open_turn()  # others on this loop go first

    def _deliver(self, most: int) -> bool:
        """Deliver up to `most` messages; True where nothing is left.

        Asking first is cheaper than an exception, and this way cheaper than by ZMQ_EVENTS, which it reads.
        """
        for _ in range(most):
            if self._closed or not zmq_poll(self._watched, 0):
                return True
            self.receive()
        return False


_ALL = 1 << 30
