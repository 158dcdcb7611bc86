"""Encrypted connections between two hosts of a run: a listening socket for one peer, and the way to it.

    receiver: its key ──► sender: listens for that key alone ──► port and key ──► receiver connects

The control process carries the keys, and nothing else.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import zmq

from vla_rl.actors.placement import KeyPair
from vla_rl.actors.remote.direct_link import (
    CurveAuthenticator,
    DirectLink,
    ListeningSocket,
    get_own_address,
)
from vla_rl.actors.wire.envelope import Frames, ListenSettings, OnMessage
from vla_rl.actors.wire.sockets import HALF_SENT_MS, BoundedSocket, LoopSocket


class SocketAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which a host listens for one peer, without the host."""

    port: int
    public_key: str


class ServerContext:
    """A context of ZeroMQ that several sockets share, with the authenticator that knows their keys.

    It has threads beside those of the episodes.

    Args:
        num_threads: threads that decrypt, about 1 GB/s each.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=num_threads)
        self.authenticator = CurveAuthenticator(self.context, [])

    def close(self) -> None:
        """End the threads. Close all sockets before."""
        self.authenticator.close()
        self.context.term()


class ServerSocket:
    """Listens for one peer.

    Args:
        peer_key: public key of the only peer that may connect.
        on_message: called with each message.
        context: shared with other sockets, and closed after them; None: its own. Of several sockets, the
            last one replaces the keys of those before: call `context.authenticator.allow` after it.

    Raises: OSError if no port is free.
    """

    def __init__(
        self, receiver_key: str, on_message: OnMessage, context: ServerContext | None = None
    ) -> None:
        self._on_message, self._is_met = on_message, False
        self._own = ServerContext() if context is None else None
        shared = context or self._own
        assert shared is not None
        settings = ListenSettings(*get_own_address(), receiver_key)
        try:
            self._listening = ListeningSocket(shared.context, settings, shared.authenticator)
        except BaseException:
            if self._own is not None:
                self._own.close()
            raise
        self._socket = LoopSocket(self._listening.socket, self._take, in_place=True)
        self._metered = BoundedSocket(self._socket, self._take)
        self.address = SocketAddress(
            port=self._listening.port, public_key=self._listening.public_key
        )
        """Address at which the peer connects."""

    def send(self, frames: Frames) -> None:
        """Queue one message."""
        self._metered.send(frames)

    def close(self) -> None:
        """Close the connection."""
        self._metered.close()
        self._socket.close(HALF_SENT_MS)
        self._listening.close()
        if self._own is not None:
            self._own.close()

    def _take(self, frames: Frames) -> None:
        if not self._is_met:
            # the peer has shown its key: the port answers to no one else
            self._listening.refuse_connections()
            self._is_met = True
        self._on_message(frames)


@contextmanager
def open_link(
    host: str,
    socket: SocketAddress,
    keys: KeyPair,
    on_message: OnMessage,
    on_lost: Callable[[], None],
) -> Iterator[DirectLink]:
    """Connect to a peer's socket while the block is open.

    Args:
        host: address of the peer's host, without a port.
        socket: its address there.
        keys: those whose public one the peer was given.
        on_message, on_lost: as for `DirectLink`.

    Raises: ConnectionError for a socket that cannot be.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"tcp://{host}:{socket.port}"
    try:
        link = DirectLink(context, address, socket.public_key, keys, on_message, on_lost)
    except BaseException:
        context.term()
        raise
    try:
        yield link
    finally:
        link.close()
        context.term()
