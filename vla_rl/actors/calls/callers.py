"""The callers of one actor: its owner, and actors that were given a handle.

    owner ── the channel ──────────► Caller ─┐
    holder of a handle ── CURVE ───► Guest ──┴► one mailbox ─► the actor, one call at a time

Each caller has its own codec, calls by number and bound on the bytes on the way; all share the mailbox,
so that calls of two callers never run at the same time unless their method is concurrent.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final

from vla_rl.actors.calls.actor import Actor, MethodTable
from vla_rl.actors.calls.running_calls import CallRunner, InboundCall
from vla_rl.actors.remote.peer_sockets import ServerSocket, SocketAddress
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import Frames, Kind, MalformedMessage, unpack_envelope
from vla_rl.actors.wire.sockets import BoundedSocket

logger = logging.getLogger(__name__)

# plain numbers: access to an enum member costs a dictionary lookup for each message
_CALL, _CREDIT, _CANCEL = int(Kind.CALL), int(Kind.CREDIT), int(Kind.CANCEL)

GUEST_CALLS: Final = 64
"""Most unanswered calls of one holder of a handle; the default mailbox of an owner has as many places."""

_OPENED_WITHIN_S: Final = 60.0
"""Time in which a handle that was shared has to be used. Its port is closed then: its holder may
have died before it read the handle, and no other process could ever use it."""


class Caller:
    """One caller's calls.

    Args:
        actor, table: the instance and its methods.
        codec, actor_id, send, outgoing: of the caller's connection; see `ActorServer`.
        most_calls: largest number of unanswered calls; further ones are rejected.
        put: puts a call in the actor's mailbox.

    Attributes:
        calls: calls that have no answer yet, by number.
        runner: runs them.
        num_rejected: number of messages that could not be read.
    """

    def __init__(
        self,
        actor: Actor,
        table: MethodTable,
        codec: Codec,
        actor_id: int,
        send: Callable[[Frames], Any],
        outgoing: BoundedSocket | None,
        most_calls: int,
        put: Callable[[InboundCall], None],
    ) -> None:
        self._table, self._codec, self._most_calls, self._put = table, codec, most_calls, put
        self.calls: dict[int, InboundCall] = {}
        self.num_rejected = 0
        self.runner = CallRunner(
            actor, table, codec, actor_id, send, outgoing, self.calls, self.reject
        )

    def take(self, kind: int, index: int, call: int, frames: Frames) -> None:
        """Take a message about a call. Raises: MalformedMessage."""
        if kind == _CALL:
            self._take_call(index, call, frames)
        elif kind == _CREDIT:
            if (work := self.calls.get(call)) is not None:
                work.grant_items(index)
        elif kind == _CANCEL:
            if (work := self.calls.get(call)) is not None:
                work.cancel()
        else:
            raise MalformedMessage(f"message of kind {kind} is not for an actor.")

    def cancel_all(self) -> None:
        """Cancel all calls that have no answer yet."""
        for work in list(self.calls.values()):
            work.cancel()

    def reject(self, error: MalformedMessage) -> None:
        """Count unreadable bytes; only the first case is logged."""
        self.num_rejected += 1
        if self.num_rejected == 1:
            logger.warning(
                "%s rejected a message: %s Later ones are only counted.",
                self._table.actor_class.__name__,
                error,
            )

    def _take_call(self, index: int, call: int, frames: Frames) -> None:
        if (
            index >= len(self._table.methods)
            or call in self.calls
            or len(self.calls) >= self._most_calls
        ):
            self._codec.discard(frames)
            raise MalformedMessage(
                f"call {call} of method {index} is unknown, already here, or exceeds the mailbox."
            )
        method = self._table.methods[index]
        work = self.calls[call] = InboundCall(method, call, frames, self.runner)
        self._put(work)


class Guest:
    """An actor that holds a handle; it listens for that one until the connection ends.

    Args:
        key: public key of the guest.
        actor, table, put: see `Caller`.
        forget: called once, when it is closed.

    Raises: OSError if no port is free.
    """

    def __init__(
        self,
        key: str,
        actor: Actor,
        table: MethodTable,
        put: Callable[[InboundCall], None],
        forget: Callable[["Guest"], None],
    ) -> None:
        self._forget, self._is_closed = forget, False
        codec = Codec()
        self._socket = ServerSocket(key, self._on_message, on_lost=self.close)
        self._caller = Caller(
            actor,
            table,
            codec,
            0,
            self._socket.send_frames,
            self._socket.outgoing,
            GUEST_CALLS,
            put,
        )
        self._timer = asyncio.get_running_loop().call_later(_OPENED_WITHIN_S, self.close)

    @property
    def address(self) -> SocketAddress:
        """Address at which the guest connects."""
        return self._socket.address

    def close(self) -> None:
        """Cancel its calls, and close the connection."""
        if not self._is_closed:
            self._is_closed = True
            self._timer.cancel()
            self._caller.cancel_all()
            self._socket.close()
            self._forget(self)

    def _on_message(self, frames: Frames) -> None:
        self._timer.cancel()
        try:
            kind, index, _, call = unpack_envelope(frames[0])
            self._caller.take(kind, index, call, frames)
        except MalformedMessage as error:
            self._caller.reject(error)
