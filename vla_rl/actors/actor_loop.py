"""The event loop of an actor's own process, which waits in ZeroMQ and answers there.

A call whose method never suspends, such as the step of a simulator, is received, run and answered
inside the loop's wait. It needs no turn of asyncio and no edge-triggered descriptor. The wait ends,
and asyncio takes its turn, as soon as there is anything else to do: a woken task, a due timer, a
descriptor or a thread with news. The socket is read again before the next turn.
"""

import asyncio
import contextvars
import math
import selectors
import time
from collections.abc import Callable
from typing import Any, TypeVarTuple

import zmq
from zmq.backend import zmq_poll

from vla_rl.actors.sockets import MessageSocket
from vla_rl.actors.wire import Frames

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
            if ready[-1][0] is not watched[0][0] or self.num_changes != num_changes:
                socket.end_turn()
                return super().select(0)
